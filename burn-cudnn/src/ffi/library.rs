//! The installed cuDNN.

use std::{
    collections::HashMap,
    ptr,
    sync::{Arc, OnceLock},
};

use burn_cublaslt::stream;
use cudarc::{
    cudnn::sys::{cudnnBackendAttributeName_t as Name, cudnnBackendDescriptorType_t as Kind},
    driver::{CudaContext, sys::CUstream},
};
use parking_lot::Mutex;

use super::{
    descriptor::Descriptor,
    functions::{self, Functions},
    known_answer::known_answers,
    plan::{Plan, Target},
    text,
};
use crate::{Convolution, ConvolutionError, Operands};

/// The most plans that are kept. A program whose images are all of other sizes asks for new ones in every step.
const MOST: usize = 1 << 12;

/// cuDNN on a device.
pub struct Library {
    functions: &'static Functions,
    /// One thread at a time may use it.
    handle: Mutex<Handle>,
    /// The device's primary context, which CubeCL uses too.
    context: Arc<CudaContext>,
    /// The plan for each kind of convolution, or why there is none.
    plans: Mutex<HashMap<Convolution, Result<Arc<Plan>, String>>>,
}

/// cuDNN for a device, if it can be used there. If not, the log says why, once.
pub(crate) fn library(ordinal: usize) -> Option<Arc<Library>> {
    static KNOWN: OnceLock<Mutex<HashMap<usize, Option<Arc<Library>>>>> = OnceLock::new();
    let mut known = KNOWN.get_or_init(Mutex::default).lock();
    let library = known.entry(ordinal).or_insert_with(|| {
        Library::open(ordinal)
            .inspect_err(|why| log::info!("burn-cudnn: no cuDNN on cuda:{ordinal}: {why}"))
            .ok()
            .map(Arc::new)
    });
    library.clone()
}

impl Library {
    /// Makes a plan for a convolution, if there is none yet. Then [`submit`](Self::submit) only enqueues it.
    ///
    /// # Errors
    /// If the sizes are not those of a convolution, cuDNN has no plan for it, or it failed before.
    pub fn prepare(&self, convolution: &Convolution) -> Result<(), ConvolutionError> {
        self.plan(convolution).map(|_| ())
    }

    /// Enqueues a convolution on CubeCL's own stream, in order with its kernels, so nothing waits. A graph that the stream records
    /// contains it too.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare); if an address is no multiple of [`ALIGNMENT`](crate::ALIGNMENT), or a tensor reaches
    /// further than its memory: then nothing was enqueued. An error that occurs when the stream reaches the convolution is found by the
    /// reader of the output, and the library has no plan for such convolutions from then on.
    pub fn submit(
        self: &Arc<Self>,
        convolution: &Convolution,
        operands: Operands<'_>,
    ) -> Result<(), ConvolutionError> {
        operands.check(convolution)?;
        let plan = self.plan(convolution)?;
        let Operands {
            client,
            inputs,
            output,
        } = operands;
        let mut inputs = Vec::from(inputs);
        inputs.extend((plan.workspace > 0).then(|| client.empty(plan.workspace)));
        let (library, convolution) = (self.clone(), convolution.clone());
        stream::enqueue(client, inputs, output, move |inputs, output, stream| {
            let workspace = inputs.get(2).copied().unwrap_or(0);
            let tensors = [inputs[0], inputs[1], output];
            // SAFETY: the addresses are of the stream's device. They hold the tensors, and the workspace has the bytes that the plan
            // asks for. They exist when the stream reaches this, and nobody else uses them until it is done, in each replay of a graph
            // too: see `stream`.
            let done = unsafe { library.execute(&plan, tensors, workspace, stream.raw) };
            done.inspect_err(|why| library.refuse(&convolution, why))
        });
        Ok(())
    }

    fn plan(&self, convolution: &Convolution) -> Result<Arc<Plan>, ConvolutionError> {
        convolution.check()?;
        let known = self.plans.lock().get(convolution).cloned();
        let plan = known.unwrap_or_else(|| {
            let made = self.make_plan(convolution).map(Arc::new);
            self.keep(convolution, made.clone());
            made
        });
        plan.map_err(|reason| ConvolutionError::NoPlan { reason })
    }

    /// A plan that is not kept.
    pub(super) fn make_plan(&self, convolution: &Convolution) -> Result<Plan, String> {
        // Plans are for the thread's current device.
        self.context.bind_to_thread().map_err(text)?;
        let handle = self.handle.lock();
        let target = Target::Handle(handle.0);
        Plan::new(self.functions, &target, &convolution.clone().lifted())
    }

    fn keep(&self, convolution: &Convolution, plan: Result<Arc<Plan>, String>) {
        let mut plans = self.plans.lock();
        if plans.len() >= MOST {
            plans.clear();
        }
        plans.insert(convolution.clone(), plan);
    }

    /// Records that a convolution of this kind failed, although there was a plan.
    fn refuse(&self, convolution: &Convolution, why: &str) {
        self.keep(convolution, Err(why.to_string()));
    }

    /// Enqueues a convolution of these tensors, in the order of [`Convolution::shapes`], on a stream.
    ///
    /// # Safety
    ///
    /// The stream must belong to the library's device, which must be the thread's current device. The addresses must be on that
    /// device too. From when the stream reaches this convolution until it is done, they must hold the tensors that the plan is for, and
    /// as much memory as it uses besides.
    pub(super) unsafe fn execute(
        &self,
        plan: &Plan,
        tensors: [u64; 3],
        workspace: u64,
        stream: CUstream,
    ) -> Result<(), String> {
        let functions = self.functions;
        let memory = Descriptor::new(functions, Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        memory.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &Plan::IDS)?;
        memory.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &tensors)?;
        memory.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[workspace])?;
        let memory = memory.finalized()?;
        let handle = self.handle.lock();
        // SAFETY: the handle is alive, and this thread alone uses it. The stream is one by this function's contract.
        let status = unsafe { (functions.set_stream)(handle.0, stream) };
        functions.check(status, "cudnnSetStream")?;
        // SAFETY: as above. The descriptors are alive, and the addresses valid by this function's contract.
        let status = unsafe { (functions.execute)(handle.0, plan.plan.raw, memory.raw) };
        functions.check(status, "cudnnBackendExecute")
    }

    fn open(ordinal: usize) -> Result<Self, String> {
        let functions = Functions::get()?;
        let context = CudaContext::new(ordinal).map_err(text)?;
        // The handle is for the thread's current device.
        context.bind_to_thread().map_err(text)?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is written to during the call.
        let status = unsafe { (functions.create)(&raw mut handle) };
        functions.check(status, "cudnnCreate")?;
        let library = Self {
            functions,
            handle: Mutex::new(Handle(handle, functions)),
            context,
            plans: Mutex::default(),
        };
        known_answers(&library)?;
        Ok(library)
    }
}

struct Handle(functions::Handle, &'static Functions);

// SAFETY: a handle is of no thread. It may be used by any one at a time (cuDNN's documentation, "Thread Safety").
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: it was created by this library, and nothing uses it afterwards. An error cannot be handled here.
        let _ = unsafe { (self.1.destroy)(self.0) };
    }
}
