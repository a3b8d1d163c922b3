//! A rank's communicator, with a stream of its own.

use std::{
    ffi::{CStr, c_int, c_uint},
    ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::{
    functions::{Buffer, Comm, Config, DataType, Functions, MutBuffer, Stream},
    library::{Library, RawUniqueId, Status, UniqueId},
};
use crate::nccl::{drive::Communicator, plan::Move};

/// `ncclInProgress`: the call has been taken in, and goes on without its caller.
const IN_PROGRESS: Status = 7;

/// `NCCL_API_MAGIC`.
const MAGIC: c_uint = 0xcafe_beef;
const VERSION: c_uint = 21_400;

/// How long a communicator that is no longer needed may take to let its peers finish.
const FAREWELL: Duration = Duration::from_secs(5);

/// A communicator of NCCL that never blocks, on a device, with a stream of its own.
pub(in crate::nccl) struct DeviceCommunicator {
    library: &'static Library,
    functions: Functions,
    comm: Comm,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// `ncclDataType_t` of the calls that come.
    dtype: DataType,
    /// Recorded behind the calls, once NCCL has taken them in.
    event: Option<CudaEvent>,
}

// SAFETY: NCCL's communicators may be used from any thread, by one at a time; `&mut self` sees to that.
unsafe impl Send for DeviceCommunicator {}

impl DeviceCommunicator {
    /// Begins to meet the other ranks: [`accepted`](Communicator::accepted) tells when that is done.
    pub(in crate::nccl) fn join(
        library: &'static Library,
        context: Arc<CudaContext>,
        id: UniqueId,
        rank: usize,
        world_size: usize,
    ) -> Result<Self, String> {
        let functions = Functions::of(library)?;
        let driver = |error: cudarc::driver::DriverError| error.to_string();
        context.bind_to_thread().map_err(driver)?;
        // `new_stream` would first wait, without a limit, for all that the device is doing.
        let stream = context.default_stream().fork().map_err(driver)?;
        let mut config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: VERSION,
            blocking: 0,
        };
        let mut communicator = Self {
            library,
            functions,
            comm: ptr::null_mut(),
            context,
            stream,
            dtype: 0,
            event: None,
        };
        // SAFETY: the pointers are to what lives through the call; NCCL copies the configuration. The device
        // of the context is this thread's current one, which is the one that NCCL takes.
        let status = unsafe {
            (communicator.functions.init)(
                &mut communicator.comm,
                world_size as c_int,
                RawUniqueId(id),
                rank as c_int,
                &mut config,
            )
        };
        let joined = communicator.check(status);
        if joined.is_err() {
            // There is nothing to end.
            communicator.comm = ptr::null_mut();
        }
        joined.map(|()| communicator)
    }

    /// Which type the elements of the next calls have.
    ///
    /// # Safety
    ///
    /// The addresses in the calls that [`enqueue`](Communicator::enqueue) is given next are of this
    /// device, and as many elements of this type are there until the calls have ended or the
    /// communicator was aborted and the stream has run dry.
    pub(in crate::nccl) unsafe fn set_type(&mut self, dtype: DataType) {
        self.dtype = dtype;
    }

    /// An error in NCCL's words, with its last warning, unless the call was taken in.
    fn check(&self, status: Status) -> Result<(), String> {
        if status == IN_PROGRESS {
            return Ok(());
        }
        self.library.check(status).map_err(|text| {
            // SAFETY: the communicator does not matter (errors are the process's), and the string is the
            // library's until its next error.
            let detail = unsafe {
                let detail = (self.functions.last_error)(self.comm);
                match detail.is_null() {
                    true => String::new(),
                    false => CStr::from_ptr(detail).to_string_lossy().into_owned(),
                }
            };
            match detail.trim() {
                "" => text,
                detail => format!("{text} ({detail})"),
            }
        })
    }

    fn enqueue_one(&self, call: &Move) -> Status {
        let functions = &self.functions;
        let (comm, dtype) = (self.comm, self.dtype);
        let stream = self.stream.cu_stream() as Stream;
        let buffer = |address: u64| address as Buffer;
        let target = |address: u64| address as MutBuffer;
        // SAFETY: the communicator is alive, and the stream is one of its device. Addresses and counts are
        // what `set_type`'s contract says; NCCL only notes them.
        unsafe {
            match *call {
                Move::AllReduce {
                    from,
                    into,
                    count,
                    op,
                } => (functions.all_reduce)(
                    buffer(from),
                    target(into),
                    count,
                    dtype,
                    op,
                    comm,
                    stream,
                ),
                Move::Reduce {
                    from,
                    into,
                    count,
                    op,
                    root,
                } => (functions.reduce)(
                    buffer(from),
                    target(into),
                    count,
                    dtype,
                    op,
                    root as c_int,
                    comm,
                    stream,
                ),
                Move::Broadcast {
                    from,
                    into,
                    count,
                    root,
                } => (functions.broadcast)(
                    buffer(from),
                    target(into),
                    count,
                    dtype,
                    root as c_int,
                    comm,
                    stream,
                ),
                Move::AllGather { from, into, count } => {
                    (functions.all_gather)(buffer(from), target(into), count, dtype, comm, stream)
                }
                Move::ReduceScatter {
                    from,
                    into,
                    count,
                    op,
                } => (functions.reduce_scatter)(
                    buffer(from),
                    target(into),
                    count,
                    dtype,
                    op,
                    comm,
                    stream,
                ),
                Move::Send { from, count, peer } => {
                    (functions.send)(buffer(from), count, dtype, peer as c_int, comm, stream)
                }
                Move::Receive { into, count, peer } => {
                    (functions.receive)(target(into), count, dtype, peer as c_int, comm, stream)
                }
            }
        }
    }

    /// Ends the communicator once its peers need it no more.
    fn leave(&mut self) -> Result<(), String> {
        // SAFETY: the communicator is alive and idle.
        self.check(unsafe { (self.functions.finalize)(self.comm) })?;
        let start = Instant::now();
        while !self.accepted()? {
            if start.elapsed() > FAREWELL {
                return Err("it takes too long".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: it is finalized, and nothing uses it afterwards.
        let status = unsafe { (self.functions.destroy)(self.comm) };
        self.comm = ptr::null_mut();
        self.library.check(status)
    }
}

impl Communicator for DeviceCommunicator {
    fn enqueue(&mut self, moves: &[Move]) -> Result<(), String> {
        self.event = None;
        self.context
            .bind_to_thread()
            .map_err(|error| error.to_string())?;
        // SAFETY: a group of this thread's calls; it is ended below whatever happens in between.
        self.check(unsafe { (self.functions.group_start)() })?;
        let first_error = moves
            .iter()
            .map(|call| self.enqueue_one(call))
            .find(|status| *status != 0 && *status != IN_PROGRESS);
        // SAFETY: the group was started above.
        let end = unsafe { (self.functions.group_end)() };
        self.check(first_error.unwrap_or(end))
    }

    fn accepted(&mut self) -> Result<bool, String> {
        let mut state = 0;
        // SAFETY: the communicator is alive, and the pointer is to an int that lives through the call.
        self.check(unsafe { (self.functions.state)(self.comm, &mut state) })?;
        self.check(state)?;
        Ok(state != IN_PROGRESS)
    }

    fn finished(&mut self) -> Result<bool, String> {
        let driver = |error: cudarc::driver::DriverError| error.to_string();
        self.context.bind_to_thread().map_err(driver)?;
        if self.event.is_none() {
            self.event = Some(self.stream.record_event(None).map_err(driver)?);
        }
        let event = self.event.as_ref().expect("it was recorded above");
        event.try_is_complete().map_err(driver)
    }

    fn abort(&mut self) {
        if self.comm.is_null() {
            return;
        }
        // SAFETY: the communicator is alive, and nothing uses it afterwards.
        let status = unsafe { (self.functions.abort)(self.comm) };
        self.comm = ptr::null_mut();
        if let Err(problem) = self.library.check(status) {
            log::warn!("burn-ddp: NCCL could not abort a communicator: {problem}");
        }
    }
}

impl Drop for DeviceCommunicator {
    fn drop(&mut self) {
        if self.comm.is_null() {
            return;
        }
        // Without a context, NCCL could only fail.
        let bound = self
            .context
            .bind_to_thread()
            .map_err(|error| error.to_string());
        if let Err(problem) = bound.and_then(|()| self.leave()) {
            log::debug!("burn-ddp: a communicator of NCCL is aborted at its end: {problem}");
            self.abort();
        }
    }
}
