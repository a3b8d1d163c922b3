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
    cuda::CudaRuntime,
    device_handle::{CallResultExt, DeviceHandle},
    server::ServerError,
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

/// Whether this machine has CUDA's driver: cudarc panics where it does not.
pub(crate) fn has_driver() -> bool {
    // SAFETY: it loads the driver's library, as any use of CUDA does.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

type Server = <CudaRuntime as Runtime>::Server;
type Storage = <Server as ServerStorage>::Storage;

/// Device memory that stays where it is while this lives.
type Memory = ManagedResource<<Storage as ComputeStorage>::Resource>;

/// A tensor that a call takes or makes.
pub(crate) struct Source {
    tensor: CubeTensor,
    memory: Memory,
    /// From when on a call may use it. The first of those that were made together, which are of one call, has the moment
    /// of all.
    moment: Option<Moment>,
    /// Room for what comes of it.
    room: Option<Box<Source>>,
}

impl Source {
    /// The tensors of a call, to be made where it is submitted, with room for results of the shapes that `room` gives. The
    /// host waits for CubeCL's thread once for all of them.
    pub(crate) fn all(
        tensors: Vec<CubeTensor>,
        room: impl Fn(&Shape) -> Option<Shape>,
    ) -> Result<Vec<Self>, DdpError> {
        let mut tensors: Vec<_> = tensors.into_iter().map(into_contiguous).collect();
        let rooms = tensors
            .iter()
            .map(|tensor| Some(empty_like(tensor, room(&tensor.shape())?)));
        let rooms: Vec<Option<CubeTensor>> = rooms.collect();
        let has_room: Vec<bool> = rooms.iter().map(Option::is_some).collect();
        tensors.extend(rooms.into_iter().flatten());

        let mut sources = Self::now(tensors)?;
        let mut rooms = sources.split_off(has_room.len()).into_iter();
        for (source, has_room) in sources.iter_mut().zip(has_room) {
            source.room = has_room.then(|| Box::new(rooms.next().expect("one for each")));
        }
        Ok(sources)
    }

    /// Finds where the memory of one device's tensors is, and the moment at which this thread's stream has done all that was
    /// submitted to it, and what others have done to that memory.
    fn now(tensors: Vec<CubeTensor>) -> Result<Vec<Self>, DdpError> {
        let Some(first) = tensors.first() else {
            return Ok(Vec::new());
        };
        let device = DeviceHandle::<Server>::new(first.client.service_id().device);
        let stream = StreamId::current();
        let bindings: Vec<_> = tensors
            .iter()
            .map(|tensor| tensor.handle.clone().binding())
            .collect();
        let found = device.submit_blocking(move |server: &mut Server| {
            // Also makes the device the thread's current one.
            let memory = bindings
                .iter()
                .map(|binding| server.get_resource(binding.clone(), stream).map_err(text));
            let memory: Vec<Memory> = memory.collect::<Result<_, String>>()?;
            // Makes the stream wait for those that the memory was used on.
            let streams = server.write_streams().resolve(stream, bindings.iter());
            let stream = streams.map_err(text)?.current().sys;
            // SAFETY: the stream is alive: it is CubeCL's, on whose thread this is.
            let moment = unsafe { Moment::on(stream) }.map_err(|error| error.to_string())?;
            Ok((memory, moment))
        });
        let (memory, moment) = found.unwrap_or_resume().map_err(DdpError::Device)?;
        let mut moment = Some(moment);
        let sources = tensors.into_iter().zip(memory);
        let sources = sources.map(|(tensor, memory)| Self {
            tensor,
            memory,
            moment: moment.take(),
            room: None,
        });
        Ok(sources.collect())
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

    fn room(&mut self, shape: Shape) -> Result<Self, DdpError> {
        match self.room.take_if(|room| room.shape() == shape) {
            Some(room) => Ok(*room),
            None => {
                let room = Self::now(vec![empty_like(&self.tensor, shape)])?;
                Ok(room.into_iter().next().expect("one for each tensor"))
            }
        }
    }

    fn precede(&mut self, stream: &dyn DeviceStream) -> Result<(), DdpError> {
        match &self.moment {
            Some(moment) => moment.precede(stream),
            None => Ok(()),
        }
    }
}

fn empty_like(tensor: &CubeTensor, shape: Shape) -> CubeTensor {
    let client = tensor.client.clone();
    let handle = client.empty(shape.num_elements() * tensor.dtype.size());
    CubeTensor::new_contiguous(client, tensor.device.clone(), shape, handle, tensor.dtype)
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
