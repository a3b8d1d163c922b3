//! The edge to cuBLASLt: all that is unsafe about it is in here.

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{Arc, Mutex, OnceLock},
};

use burn::tensor::FloatDType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{cuda::CudaRuntime, future::block_on, server::Handle};
use cubecl_runtime::runtime::Runtime;
use cudarc::{
    cublaslt::{result, sys},
    driver::{CudaContext, CudaStream},
};

use super::plan::{BiasPlan, Plan};
use crate::{Fp8Format, MatmulSpec};

/// Memory that an algorithm may use: what NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Addresses are multiples of this.
const ALIGNMENT: u32 = 16;
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;
/// The first compute capability with fp8.
const OLDEST: (i32, i32) = (8, 9);

/// cuBLASLt on a device, with a stream of its own.
pub(super) struct Library {
    handle: sys::cublasLtHandle_t,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// What the heuristics advise, or that there is nothing.
    algorithms: Mutex<HashMap<Shape, Option<sys::cublasLtMatmulAlgo_t>>>,
}

// SAFETY: cuBLASLt's handles may be used from any thread, by several at a time (its documents, "Thread Safety").
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// What an algorithm is chosen by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    sizes: [usize; 3],
    leading: [usize; 2],
    formats: [Fp8Format; 2],
    output: u32,
    fast: bool,
    bias: bool,
}

impl Shape {
    fn of(plan: &Plan, spec: MatmulSpec) -> Self {
        Self {
            sizes: [plan.m, plan.n, plan.k],
            leading: [plan.lhs.leading(plan.k), plan.rhs.leading(plan.k)],
            formats: [spec.lhs, spec.rhs],
            output: output_type(spec.output) as u32,
            fast: plan.fast,
            bias: plan.bias == BiasPlan::Epilogue,
        }
    }
}

/// The tensors of a product: codes with the inner dimension contiguous, and what codes are multiplied by.
pub(super) struct Operands {
    pub(super) lhs: CubeTensor,
    pub(super) rhs: CubeTensor,
    pub(super) lhs_scale: CubeTensor,
    pub(super) rhs_scale: CubeTensor,
    /// In the output's type.
    pub(super) bias: Option<CubeTensor>,
    pub(super) output: CubeTensor,
}

/// cuBLASLt for a device, if it can be used there; the log says once why not.
pub(super) fn library(ordinal: usize) -> Option<Arc<Library>> {
    static KNOWN: OnceLock<Mutex<HashMap<usize, Option<Arc<Library>>>>> = OnceLock::new();
    let mut known = KNOWN
        .get_or_init(Mutex::default)
        .lock()
        .expect("no panic under lock");
    let library = known.entry(ordinal).or_insert_with(|| {
        Library::open(ordinal)
            .inspect_err(|why| log::info!("burn-fp8: no cuBLASLt on cuda:{ordinal}: {why}"))
            .ok()
            .map(Arc::new)
    });
    library.clone()
}

impl Library {
    /// Whether a product of this kind was put to cuBLASLt before, and it has no algorithm for it.
    pub(super) fn has_refused(&self, plan: &Plan, spec: MatmulSpec) -> bool {
        let algorithms = self.algorithms.lock().expect("no panic under lock");
        matches!(algorithms.get(&Shape::of(plan, spec)), Some(None))
    }

    fn open(ordinal: usize) -> Result<Self, String> {
        // SAFETY: looking for the library loads it, whose initializers touch nothing but its own data.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcublasLt was not found".into());
        }
        let context = CudaContext::new(ordinal).map_err(text)?;
        let capability = context.compute_capability().map_err(text)?;
        if capability < OLDEST {
            let (major, minor) = capability;
            return Err(format!("compute capability {major}.{minor} has no fp8"));
        }
        let stream = context.new_stream().map_err(text)?;
        Ok(Self {
            handle: result::create_handle().map_err(text)?,
            context,
            stream,
            algorithms: Mutex::default(),
        })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle was created with this, and nothing uses it afterwards.
        let destroyed = unsafe { result::destroy_handle(self.handle) };
        if let Err(problem) = destroyed {
            log::debug!("burn-fp8: cuBLASLt: {problem}");
        }
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Computes `operands.output`, and waits until it is there.
pub(super) fn run(
    library: &Library,
    plan: &Plan,
    spec: MatmulSpec,
    operands: &Operands,
) -> Result<(), String> {
    let client = &operands.output.client;
    // Makes this thread's stream wait for those that the tensors were made on; the memory stays where it is while the
    // resource lives.
    let memory = |handle: &Handle| {
        let handle = handle.clone();
        client
            .get_resource::<<CudaRuntime as Runtime>::Server>(handle)
            .map_err(text)
    };
    let lhs = memory(&operands.lhs.handle)?;
    let rhs = memory(&operands.rhs.handle)?;
    let lhs_scale = memory(&operands.lhs_scale.handle)?;
    let rhs_scale = memory(&operands.rhs_scale.handle)?;
    let bias = operands.bias.as_ref().map(|bias| memory(&bias.handle));
    let bias = bias.transpose()?;
    let output = memory(&operands.output.handle)?;
    let workspace = memory(&client.empty(WORKSPACE))?;
    let addresses = Addresses {
        lhs: lhs.resource().ptr,
        rhs: rhs.resource().ptr,
        lhs_scale: lhs_scale.resource().ptr,
        rhs_scale: rhs_scale.resource().ptr,
        bias: bias.as_ref().map(|bias| bias.resource().ptr),
        output: output.resource().ptr,
        workspace: workspace.resource().ptr,
    };
    addresses.check()?;
    block_on(client.sync()).map_err(text)?;
    library.context.bind_to_thread().map_err(text)?;
    let shape = Shape::of(plan, spec);
    // SAFETY: the addresses are of the library's device. The tensors there have the plan's shapes: codes of k elements
    // `leading` apart, one f32 as a scale, n elements as a bias, m times n as the output, and `WORKSPACE` bytes. The
    // resources keep them in place, and the host has waited until they are filled and until nobody uses them.
    let enqueued = unsafe { library.enqueue(plan, spec, shape, &addresses) };
    // Whatever was enqueued has to end before the memory is anyone else's.
    let done = library.stream.synchronize().map_err(text);
    enqueued.and(done)
}

/// Where the tensors of a product are on the device.
struct Addresses {
    lhs: u64,
    rhs: u64,
    lhs_scale: u64,
    rhs_scale: u64,
    bias: Option<u64>,
    output: u64,
    workspace: u64,
}

impl Addresses {
    fn check(&self) -> Result<(), String> {
        let large = [
            self.lhs,
            self.rhs,
            self.output,
            self.workspace,
            self.bias.unwrap_or(0),
        ];
        match large.iter().all(|at| at.is_multiple_of(ALIGNMENT.into())) {
            true => Ok(()),
            false => Err(format!("an address that is no multiple of {ALIGNMENT}")),
        }
    }
}

impl Library {
    /// Enqueues the product on the library's stream.
    ///
    /// # Safety
    ///
    /// The addresses are of the library's device, and tensors as `plan` says are there until the stream is done.
    unsafe fn enqueue(
        &self,
        plan: &Plan,
        spec: MatmulSpec,
        shape: Shape,
        addresses: &Addresses,
    ) -> Result<(), String> {
        let (m, n, k) = (plan.m as u64, plan.n as u64, plan.k as u64);
        let output = output_type(spec.output);
        // Columns first: our right side is the first operand, our left side the second.
        let a = Layout::new(code_type(spec.rhs), k, n, plan.rhs.leading(plan.k))?;
        let b = Layout::new(code_type(spec.lhs), k, m, plan.lhs.leading(plan.k))?;
        let d = Layout::new(output, n, m, plan.n)?;
        let description = Description::new()?;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        description.set(
            Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
            &addresses.rhs_scale,
        )?;
        description.set(
            Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
            &addresses.lhs_scale,
        )?;
        description.set(
            Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM,
            &i8::from(plan.fast),
        )?;
        if let Some(bias) = &addresses.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
            description.set(
                Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                &(output as i32),
            )?;
        }
        let algorithm = self.algorithm(shape, &description, &a, &b, &d)?;
        let (alpha, beta) = (1f32, 0f32);
        let pointer = |address: u64| address as *const c_void;
        // SAFETY: the descriptors live through the call, as do the factors, which are f32 as the description says; the
        // addresses are as this function's contract says. With a beta of 0, C is not read, and may be D.
        unsafe {
            result::matmul(
                self.handle,
                description.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                pointer(addresses.rhs),
                a.0,
                pointer(addresses.lhs),
                b.0,
                pointer(addresses.output),
                d.0,
                addresses.output as *mut c_void,
                d.0,
                &algorithm,
                addresses.workspace as *mut c_void,
                WORKSPACE,
                self.stream.cu_stream() as sys::cudaStream_t,
            )
        }
        .map_err(text)
    }

    /// The algorithm that the heuristics advise for a shape, asked for once.
    fn algorithm(
        &self,
        shape: Shape,
        description: &Description,
        a: &Layout,
        b: &Layout,
        d: &Layout,
    ) -> Result<sys::cublasLtMatmulAlgo_t, String> {
        let mut algorithms = self.algorithms.lock().expect("no panic under lock");
        let known = algorithms.entry(shape).or_insert_with(|| {
            let preference = Preference::new().ok()?;
            // SAFETY: all descriptors are alive.
            let found = unsafe {
                result::get_matmul_algo_heuristic(
                    self.handle,
                    description.0,
                    a.0,
                    b.0,
                    d.0,
                    d.0,
                    preference.0,
                )
            };
            found.ok().map(|found| found.algo)
        });
        known.ok_or_else(|| "no algorithm for this shape".into())
    }
}

fn code_type(format: Fp8Format) -> sys::cudaDataType {
    match format {
        Fp8Format::E4M3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        Fp8Format::E5M2 => sys::cudaDataType::CUDA_R_8F_E5M2,
    }
}

fn output_type(dtype: FloatDType) -> sys::cudaDataType {
    match dtype {
        FloatDType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        FloatDType::F16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// A matrix, columns first.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(
        dtype: sys::cudaDataType,
        rows: u64,
        columns: u64,
        leading: usize,
    ) -> Result<Self, String> {
        result::create_matrix_layout(dtype, rows, columns, leading as i64)
            .map(Self)
            .map_err(text)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it was created with this, and nothing uses it afterwards. There is nothing to do about an error.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// What is computed: sums and factors in f32.
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new() -> Result<Self, String> {
        let sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        result::create_matmul_desc(sums, sys::cudaDataType::CUDA_R_32F)
            .map(Self)
            .map_err(text)
    }

    /// Sets an attribute, whose type must be the one that cuBLASLt's documents say; a wrong size is an error.
    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), String> {
        let (value, size) = (std::ptr::from_ref(value).cast(), size_of::<T>());
        // SAFETY: the description is alive, and the value is read in the call, no further than its size.
        let set = unsafe { result::set_matmul_desc_attribute(self.0, attribute, value, size) };
        set.map_err(|error| format!("{attribute:?}: {error}"))
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: as for a layout.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// What the heuristics may count on.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, String> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(result::create_matmul_pref().map_err(text)?);
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            &WORKSPACE,
        )?;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(attribute, &ALIGNMENT)?;
        }
        Ok(preference)
    }

    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), String> {
        let (value, size) = (std::ptr::from_ref(value).cast(), size_of::<T>());
        // SAFETY: the preference is alive, and the value is read in the call, no further than its size.
        let set = unsafe { result::set_matmul_pref_attribute(self.0, attribute, value, size) };
        set.map_err(|error| format!("{attribute:?}: {error}"))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: as for a layout.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
