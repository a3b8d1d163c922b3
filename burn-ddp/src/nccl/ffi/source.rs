//! CubeCL's tensors as the inputs and results of NCCL calls.
//!
//! NCCL has a stream of its own, so that it works while CubeCL's streams proceed. Its stream waits, on the device, until
//! a call's inputs are computed: for an event that is recorded on the submitting thread's stream when the call is submitted.
//! The event comes after the work that this thread has submitted so far and, by CubeCL's rules for tensors that threads
//! share, after the work that computes the inputs. Work that is submitted later (the rest of backward, while an asynchronous
//! call waits for its turn) is not waited for. The host waits until NCCL is done before it returns the results, so that an
//! error belongs to the call in which it happened.

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

/// Whether this machine has the CUDA driver. Without it, cudarc panics.
pub(crate) fn has_driver() -> bool {
    // SAFETY: this loads the driver's library, as any use of CUDA does.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

type Server = <CudaRuntime as Runtime>::Server;
type Storage = <Server as ServerStorage>::Storage;

/// Device memory that keeps its address while this value lives.
type Memory = ManagedResource<<Storage as ComputeStorage>::Resource>;

/// A tensor that is an input or a result of a call.
pub(crate) struct Source {
    tensor: CubeTensor,
    memory: Memory,
    /// The moment from which a call may use it. Of several sources that were created together, for one call, the first has
    /// the moment of all.
    moment: Option<Moment>,
    /// The tensor for its result, if one was allocated in advance.
    room: Option<Box<Source>>,
}

impl Source {
    /// The tensors of a call, created by the thread that submits it, with room for results of the shapes that `room` returns.
    /// The host waits for CubeCL's thread once for all of them.
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

    /// Finds the memory of one device's tensors, and the moment at which this thread's stream has done all work submitted to it,
    /// after the work of other streams on that memory.
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
            // This also makes the device the thread's current one.
            let memory = bindings
                .iter()
                .map(|binding| server.get_resource(binding.clone(), stream).map_err(text));
            let memory: Vec<Memory> = memory.collect::<Result<_, String>>()?;
            // Makes the stream wait for the streams that used the memory.
            let streams = server.write_streams().resolve(stream, bindings.iter());
            let stream = streams.map_err(text)?.current().sys;
            // SAFETY: the stream is alive, because it is CubeCL's, and this runs on CubeCL's thread.
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
    /// The end of the work that was put on a stream so far.
    ///
    /// # Safety
    ///
    /// The stream is alive, and belongs to the thread's current device.
    unsafe fn on(stream: CUstream) -> Result<Self, DriverError> {
        let moment = Self(event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?);
        // SAFETY: the event was created just now, and the stream is as this function's contract requires.
        unsafe { event::record(moment.0, stream) }?;
        Ok(moment)
    }

    /// Makes another stream wait for this moment.
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
        // SAFETY: the event was created with this value. By the driver's documentation, a stream that waits for it still does.
        let destroyed = unsafe { event::destroy(self.0) };
        if let Err(error) = destroyed {
            log::debug!("burn-ddp: an event of CUDA's was not destroyed: {error}");
        }
    }
}
