//! CubeCL's tensors on their way through NCCL.
//!
//! CubeCL's streams are private, and do not order with others. So the host waits twice: until the streams
//! have made a call's inputs, before NCCL starts, and until NCCL is done, before anyone gets its results.
//! The first wait is for an event that is recorded when the call is submitted: behind the work of that
//! thread up to there and, by CubeCL's own rules for tensors that threads share, behind what made the
//! inputs. What is submitted later (the rest of backward, while an asynchronous call waits for its turn) is
//! not waited for.

use burn::{backend::TensorMetadata, tensor::Shape};
use burn_cubecl::{kernel::into_contiguous, tensor::CubeTensor};
use cubecl::{
    client::Client,
    cuda::CudaRuntime,
    future::{DynFut, block_on},
    server::{Handle, ServerError},
};
use cubecl_runtime::{
    runtime::Runtime,
    server::ServerStorage,
    storage::{ComputeStorage, ManagedResource},
};

use crate::{DdpError, nccl::Resident};

type Storage = <<CudaRuntime as Runtime>::Server as ServerStorage>::Storage;

/// Device memory that stays where it is while this lives.
type Memory = ManagedResource<<Storage as ComputeStorage>::Resource>;

/// A tensor that a call takes or makes, and the moment from which its elements are there.
pub(crate) struct Source {
    tensor: CubeTensor,
    memory: Memory,
    made: Option<DynFut<Result<(), ServerError>>>,
}

impl Source {
    /// To be made where the call is submitted.
    pub(crate) fn new(tensor: CubeTensor) -> Result<Self, DdpError> {
        let tensor = into_contiguous(tensor);
        // Makes this thread's stream wait for the one that the tensor was made on.
        let memory = memory(&tensor.client, &tensor.handle)?;
        let made = Some(tensor.client.sync());
        Ok(Self {
            tensor,
            memory,
            made,
        })
    }

    pub(crate) fn into_tensor(self) -> CubeTensor {
        self.tensor
    }
}

impl Resident for Source {
    fn shape(&self) -> Shape {
        self.tensor.shape()
    }

    fn address(&self) -> u64 {
        self.memory.resource().ptr
    }

    fn wait(&mut self) -> Result<(), DdpError> {
        let made = self.made.take();
        made.map_or(Ok(()), |made| block_on(made).map_err(device))
    }

    fn room(&self, shape: Shape) -> Result<Self, DdpError> {
        let Self { tensor: like, .. } = self;
        let client = like.client.clone();
        let handle = client.empty(shape.num_elements() * like.dtype.size());
        let memory = memory(&client, &handle)?;
        let tensor =
            CubeTensor::new_contiguous(client, like.device.clone(), shape, handle, like.dtype);
        Ok(Self {
            tensor,
            memory,
            made: None,
        })
    }

    fn settle(&self) -> Result<(), DdpError> {
        block_on(self.tensor.client.sync()).map_err(device)
    }
}

fn memory(client: &Client, handle: &Handle) -> Result<Memory, DdpError> {
    client
        .get_resource::<<CudaRuntime as Runtime>::Server>(handle.clone())
        .map_err(device)
}

fn device(error: ServerError) -> DdpError {
    DdpError::Device(error.to_string())
}
