//! CubeCL's tensors on their way through NCCL.
//!
//! NCCL has a stream of its own, so that it works while CubeCL's streams go on. It waits, on the device, until those have
//! made a call's inputs: for an event that is recorded on the submitting thread's stream when the call is submitted, behind
//! the work of that thread up to there and, by CubeCL's own rules for tensors that threads share, behind what made the
//! inputs. What is submitted later (the rest of backward, while an asynchronous call waits for its turn) is not waited
//! for. The host waits until NCCL is done, before anyone gets the results: an error is that of the call in which it
//! happened.

use burn::{backend::TensorMetadata, tensor::Shape};
use burn_cubecl::{kernel::into_contiguous, tensor::CubeTensor};
use burn_fusion::custom::StreamId;
use cubecl::{
    client::Client,
    cuda::CudaRuntime,
    device_handle::{CallResultExt, DeviceHandle},
    server::{Handle, ServerError},
};
use cubecl_runtime::{
    runtime::Runtime,
    server::ServerStorage,
    storage::{ComputeStorage, ManagedResource},
};
use cubecl_server::stream::WriteScoped;
use cudarc::driver::{
    DriverError,
    result::{event, stream},
    sys::{CUevent, CUevent_flags, CUevent_wait_flags, CUstream},
};

use super::DeviceStream;
use crate::{DdpError, nccl::Resident};

type Server = <CudaRuntime as Runtime>::Server;
type Storage = <Server as ServerStorage>::Storage;

/// Device memory that stays where it is while this lives.
type Memory = ManagedResource<<Storage as ComputeStorage>::Resource>;

/// A tensor that a call takes or makes, and the moment from which a call may use it.
pub(crate) struct Source {
    tensor: CubeTensor,
    memory: Memory,
    moment: Moment,
}

impl Source {
    /// To be made where the call is submitted.
    pub(crate) fn new(tensor: CubeTensor) -> Result<Self, DdpError> {
        let tensor = into_contiguous(tensor);
        let (memory, moment) = now(&tensor.client, &tensor.handle)?;
        Ok(Self {
            tensor,
            memory,
            moment,
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

    fn room(&self, shape: Shape) -> Result<Self, DdpError> {
        let Self { tensor: like, .. } = self;
        let client = like.client.clone();
        let handle = client.empty(shape.num_elements() * like.dtype.size());
        let (memory, moment) = now(&client, &handle)?;
        let tensor =
            CubeTensor::new_contiguous(client, like.device.clone(), shape, handle, like.dtype);
        Ok(Self {
            tensor,
            memory,
            moment,
        })
    }

    fn precede(&mut self, stream: &dyn DeviceStream) -> Result<(), DdpError> {
        self.moment.precede(stream)
    }
}

/// Where a handle's memory is, and the moment at which this thread's stream has done all that was submitted to it, and
/// what others have done to that memory.
fn now(client: &Client, handle: &Handle) -> Result<(Memory, Moment), DdpError> {
    let stream = StreamId::current();
    let binding = handle.clone().binding();
    let device = DeviceHandle::<Server>::new(client.service_id().device);
    let found = device.submit_blocking(move |server: &mut Server| {
        // Also makes the device the thread's current one.
        let memory = server.get_resource(binding.clone(), stream).map_err(text)?;
        // Makes the stream wait for the one that the memory was used on.
        let streams = server
            .write_streams()
            .resolve(stream, [&binding].into_iter());
        let stream = streams.map_err(text)?.current().sys;
        // SAFETY: the stream is alive: it is CubeCL's, on whose thread this is.
        let moment = unsafe { Moment::on(stream) }.map_err(|error| error.to_string())?;
        Ok((memory, moment))
    });
    found.unwrap_or_resume().map_err(DdpError::Device)
}

fn text(error: ServerError) -> String {
    error.to_string()
}

/// A point in the work of a stream.
struct Moment(CUevent);

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Moment {}

impl Moment {
    /// The end of what was put on a stream so far.
    ///
    /// # Safety
    ///
    /// The stream is alive, and of the thread's current device.
    unsafe fn on(stream: CUstream) -> Result<Self, DriverError> {
        let moment = Self(event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?);
        // SAFETY: the event was created just now; the stream is what this function's contract says.
        unsafe { event::record(moment.0, stream) }?;
        Ok(moment)
    }

    /// Makes another stream wait for it.
    fn precede(&self, stream: &dyn DeviceStream) -> Result<(), DdpError> {
        let wait = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        stream.bind().map_err(DdpError::Device)?;
        // SAFETY: both the stream and the event are alive.
        let waits = unsafe { stream::wait_event(stream.raw() as CUstream, self.0, wait) };
        waits.map_err(|error| DdpError::Device(error.to_string()))
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        // SAFETY: it was created with this. A stream that waits for it still does, by the driver's documents.
        let destroyed = unsafe { event::destroy(self.0) };
        if let Err(error) = destroyed {
            log::debug!("burn-ddp: an event of CUDA's was not destroyed: {error}");
        }
    }
}
