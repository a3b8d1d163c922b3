//! The installed cuBLASLt.

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{Arc, OnceLock},
};

use cudarc::{
    cublaslt::{result, sys},
    driver::{CudaContext, sys::CUstream},
};
use parking_lot::Mutex;

use super::{
    apart::Apart,
    problem::{Addresses, Batches, Described, Preference, Problem, WORKSPACE},
    text,
};
use crate::{Product, algorithms::Algorithms};

/// The lowest compute capability with products of fp8.
const FP8: (i32, i32) = (8, 9);

/// cuBLASLt on a device.
pub struct Library {
    handle: sys::cublasLtHandle_t,
    /// The device's primary context, which CubeCL uses too.
    context: Arc<CudaContext>,
    has_fp8: bool,
    /// What the heuristics advise.
    algorithms: Mutex<Algorithms<sys::cublasLtMatmulAlgo_t>>,
    /// The same for products whose matrices are [apart](Batches::Apart), by the product of all.
    pub(super) apart: Mutex<Algorithms<Apart>>,
}

// SAFETY: cuBLASLt's handles may be used from any thread, and from several at a time (its documentation, "Thread Safety").
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// cuBLASLt for a device, if it can be used there. If not, the log says why, once.
pub(crate) fn library(ordinal: usize) -> Option<Arc<Library>> {
    static KNOWN: OnceLock<Mutex<HashMap<usize, Option<Arc<Library>>>>> = OnceLock::new();
    let mut known = KNOWN.get_or_init(Mutex::default).lock();
    let library = known.entry(ordinal).or_insert_with(|| {
        Library::open(ordinal)
            .inspect_err(|why| log::info!("burn-cublaslt: no cuBLASLt on cuda:{ordinal}: {why}"))
            .ok()
            .map(Arc::new)
    });
    library.clone()
}

impl Library {
    /// Whether the GPU multiplies fp8: Ada, Hopper, and newer.
    pub fn has_fp8(&self) -> bool {
        self.has_fp8
    }

    /// Whether cuBLASLt was asked for a product of this kind before, and had no algorithm for it, or failed.
    pub fn has_refused(&self, product: &Product) -> bool {
        self.algorithms.lock().has_refused(product)
    }

    /// Records that a product of this kind failed, although there was an algorithm.
    pub(crate) fn refuse(&self, product: &Product, why: &str) {
        self.algorithms.lock().refuse(product, why.to_string());
    }

    /// The algorithm that the heuristics advise for a product. They are asked once for each kind that is kept.
    pub(crate) fn algorithm(&self, product: &Product) -> Result<sys::cublasLtMatmulAlgo_t, String> {
        let mut algorithms = self.algorithms.lock();
        algorithms.get(product, || self.advice(product, Batches::Strided))
    }

    pub(super) fn advice(
        &self,
        product: &Product,
        batches: Batches,
    ) -> Result<sys::cublasLtMatmulAlgo_t, String> {
        // The heuristics are for the thread's current device.
        self.context.bind_to_thread().map_err(text)?;
        let problem = Problem::new(product, &Described::somewhere(product), batches)?;
        let preference = Preference::new(product.alignment)?;
        // SAFETY: all descriptors are alive. The heuristics read the descriptors, and no device memory.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                self.handle,
                problem.description.0,
                problem.a.0,
                problem.b.0,
                problem.d.0,
                problem.d.0,
                preference.0,
            )
        };
        found.map(|found| found.algo).map_err(text)
    }

    /// Enqueues a product on a stream.
    ///
    /// # Safety
    ///
    /// The stream must belong to the library's device, which must be the thread's current device. The addresses must be on that
    /// device too. From when the stream reaches this product until it is done, they must hold the tensors that the problem
    /// describes, or the addresses of these.
    pub(super) unsafe fn enqueue(
        &self,
        problem: &Problem,
        addresses: &Addresses,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        stream: CUstream,
    ) -> Result<(), String> {
        let (alpha, beta) = (1f32, 0f32);
        let pointer = |address: u64| address as *const c_void;
        // SAFETY: the descriptors live through the call, and so do the factors, which are f32 as the description says. The
        // addresses are valid by this function's contract. With a beta of 0, C is not read, and may be D.
        unsafe {
            result::matmul(
                self.handle,
                problem.description.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                pointer(addresses.rhs),
                problem.a.0,
                pointer(addresses.lhs),
                problem.b.0,
                pointer(addresses.output),
                problem.d.0,
                addresses.output as *mut c_void,
                problem.d.0,
                algorithm,
                addresses.workspace as *mut c_void,
                WORKSPACE,
                stream as sys::cudaStream_t,
            )
        }
        .map_err(text)
    }

    fn open(ordinal: usize) -> Result<Self, String> {
        // SAFETY: looking for the library loads it, and its initializers touch nothing but its own data.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcublasLt was not found".into());
        }
        let context = CudaContext::new(ordinal).map_err(text)?;
        Ok(Self {
            handle: result::create_handle().map_err(text)?,
            has_fp8: context.compute_capability().map_err(text)? >= FP8,
            context,
            algorithms: Mutex::default(),
            apart: Mutex::default(),
        })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle was created by this library, and nothing uses it afterwards.
        let destroyed = unsafe { result::destroy_handle(self.handle) };
        if let Err(problem) = destroyed {
            log::debug!("burn-cublaslt: {problem}");
        }
    }
}
