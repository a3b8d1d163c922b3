//! A rank's NCCL communicator, with a stream of its own.

use std::{
    ffi::c_int,
    mem, ptr,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use super::{
    functions::{
        Buffer, Comm, Config, DataType, Functions, IN_PROGRESS, MAGIC, MutBuffer, SUCCESS, Stream,
        VERSION,
    },
    library::{RawUniqueId, Status, UniqueId},
};
use crate::nccl::plan::{Kind, Move};

/// A stream of a device, used by one communicator alone. Errors are the driver's messages.
pub(crate) trait DeviceStream: Send {
    /// Makes the stream's device the current one of this thread.
    fn bind(&self) -> Result<(), String>;

    /// The `cudaStream_t`, valid as long as this value lives.
    fn raw(&self) -> Stream;

    /// Records an event behind all work that has been put on the stream so far.
    fn record(&mut self) -> Result<(), String>;

    /// Whether all work before the recorded event is done.
    fn is_done(&self) -> Result<bool, String>;
}

/// How long a communicator that is no longer needed may take to let its peers finish.
const FAREWELL: Duration = Duration::from_secs(5);

/// How long NCCL may take to end a communicator, for which it joins threads of its own and frees device memory.
const END: Duration = Duration::from_secs(10);

/// A nonblocking NCCL communicator on a device, with a stream of its own. None of its functions waits, except that `abort` and
/// dropping it may take a while. Errors are the messages of NCCL or of the driver.
pub(in crate::nccl) struct DeviceCommunicator {
    functions: Functions,
    /// Boxed to keep its address: NCCL before 2.18 reads the communicator there until it has met its peers.
    comm: Box<Comm>,
    stream: Box<dyn DeviceStream>,
    /// The `ncclDataType_t` of the next calls.
    dtype: DataType,
    /// Whether an event was recorded on the stream behind the calls, after NCCL had accepted them.
    recorded: bool,
}

// SAFETY: an NCCL communicator may be used from any thread, by one at a time. The type is not `Sync`, so one thread has it.
unsafe impl Send for DeviceCommunicator {}

impl DeviceCommunicator {
    /// Begins to meet the other ranks. [`accepted`](Self::accepted) tells when they have met.
    pub(in crate::nccl) fn join(
        functions: Functions,
        stream: Box<dyn DeviceStream>,
        id: UniqueId,
        rank: usize,
        world_size: usize,
    ) -> Result<Self, String> {
        stream.bind()?;
        let mut config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: VERSION,
            blocking: 0,
        };
        let mut communicator = Self {
            functions,
            comm: Box::new(ptr::null_mut()),
            stream,
            dtype: 0,
            recorded: false,
        };
        // SAFETY: NCCL copies the configuration. The box for the communicator lives as long as the communicator. The
        // stream's device is this thread's current one, which is the one that NCCL uses.
        let status = unsafe {
            (communicator.functions.init)(
                &mut *communicator.comm,
                world_size as c_int,
                RawUniqueId(id),
                rank as c_int,
                &mut config,
            )
        };
        let joined = communicator.check(status);
        if joined.is_err() {
            communicator.abort();
        }
        joined.map(|()| communicator)
    }

    /// Sets the type of the elements of the next calls.
    ///
    /// # Safety
    ///
    /// The addresses in the calls that [`enqueue`](Self::enqueue) is given next are on this
    /// device. Each has the call's number of elements of this type, until the calls have ended, or the
    /// communicator was aborted and the stream has no work left.
    pub(in crate::nccl) unsafe fn set_type(&mut self, dtype: DataType) {
        self.dtype = dtype;
    }

    /// The stream that calls go to.
    pub(in crate::nccl) fn stream(&self) -> &dyn DeviceStream {
        &*self.stream
    }

    fn check(&self, status: Status) -> Result<(), String> {
        self.functions.check(status, *self.comm)
    }

    fn enqueue_one(&self, call: &Move) -> Status {
        let Move {
            kind, count, op, ..
        } = *call;
        let (from, into) = (call.from as Buffer, call.into as MutBuffer);
        let (peer, dtype) = (call.peer as c_int, self.dtype);
        let (functions, comm, stream) = (&self.functions, *self.comm, self.stream.raw());
        // SAFETY: the communicator is alive, and the stream is one of its device. Addresses and counts are
        // as `set_type`'s contract requires. NCCL only notes them.
        unsafe {
            match kind {
                Kind::AllReduce => {
                    (functions.all_reduce)(from, into, count, dtype, op, comm, stream)
                }
                Kind::Reduce => {
                    (functions.reduce)(from, into, count, dtype, op, peer, comm, stream)
                }
                Kind::Broadcast => {
                    (functions.broadcast)(from, into, count, dtype, peer, comm, stream)
                }
                Kind::AllGather => (functions.all_gather)(from, into, count, dtype, comm, stream),
                Kind::ReduceScatter => {
                    (functions.reduce_scatter)(from, into, count, dtype, op, comm, stream)
                }
                Kind::Send => (functions.send)(from, count, dtype, peer, comm, stream),
                Kind::Receive => (functions.receive)(into, count, dtype, peer, comm, stream),
            }
        }
    }

    /// Ends the communicator once its peers no longer need it.
    fn leave(&mut self) -> Result<(), String> {
        // SAFETY: the communicator is alive and idle.
        self.check(unsafe { (self.functions.finalize)(*self.comm) })?;
        let start = Instant::now();
        while !self.accepted()? {
            if start.elapsed() > FAREWELL {
                return Err("it takes too long".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        self.end(self.functions.destroy)
    }

    /// Ends the communicator by `how`, which is `ncclCommDestroy` if it is finalized, or `ncclCommAbort`, and forgets it. If NCCL
    /// takes too long, which has been seen to happen, it continues on its own thread, and an error is returned.
    fn end(&mut self, how: unsafe extern "C" fn(Comm) -> Status) -> Result<(), String> {
        /// A communicator that only NCCL uses, at the address where NCCL may still read it.
        struct Ended(Box<Comm>);

        // SAFETY: an NCCL communicator may be used from any thread, by one at a time.
        unsafe impl Send for Ended {}

        let functions = self.functions;
        let ended = Ended(mem::replace(&mut self.comm, Box::new(ptr::null_mut())));
        let (sender, result) = mpsc::channel();
        let end = move || {
            let Ended(comm) = { ended };
            // SAFETY: the communicator is alive, and nothing uses it afterwards. NCCL itself makes the device current.
            let status = unsafe { how(*comm) };
            // Fails if the receiver no longer waits.
            let _ = sender.send(functions.check(status, ptr::null_mut()));
        };
        let thread = thread::Builder::new().name("ddp-nccl-end".into());
        thread.spawn(end).map_err(|error| error.to_string())?;
        let result = result.recv_timeout(END);
        result.unwrap_or_else(|_| Err(format!("it did not end within {END:?}, and is left behind")))
    }

    /// Hands calls to NCCL, as one group.
    pub(in crate::nccl) fn enqueue(&mut self, moves: &[Move]) -> Result<(), String> {
        self.recorded = false;
        self.stream.bind()?;
        // SAFETY: this starts a group of this thread's calls, which is ended below whatever happens in between.
        self.check(unsafe { (self.functions.group_start)() })?;
        let first_error = moves
            .iter()
            .map(|call| self.enqueue_one(call))
            .find(|status| *status != SUCCESS && *status != IN_PROGRESS);
        // SAFETY: the group was started above.
        let end = unsafe { (self.functions.group_end)() };
        self.check(first_error.unwrap_or(end))
    }

    /// Whether NCCL has accepted all calls that it was handed (`ncclCommGetAsyncError`).
    pub(in crate::nccl) fn accepted(&mut self) -> Result<bool, String> {
        let mut state = 0;
        // SAFETY: the communicator is alive, and the pointer is to an int that lives through the call.
        self.check(unsafe { (self.functions.state)(*self.comm, &mut state) })?;
        self.check(state)?;
        Ok(state != IN_PROGRESS)
    }

    /// Whether the device has completed all calls that NCCL was handed.
    pub(in crate::nccl) fn finished(&mut self) -> Result<bool, String> {
        self.stream.bind()?;
        if !self.recorded {
            self.stream.record()?;
            self.recorded = true;
        }
        self.stream.is_done()
    }

    /// Stops all calls in progress. No other function is called afterwards.
    pub(in crate::nccl) fn abort(&mut self) {
        if self.comm.is_null() {
            return;
        }
        if let Err(problem) = self.end(self.functions.abort) {
            log::warn!("burn-ddp: NCCL could not abort a communicator: {problem}");
        }
    }
}

impl Drop for DeviceCommunicator {
    fn drop(&mut self) {
        if self.comm.is_null() {
            return;
        }
        // Without a current device, NCCL could only fail.
        if let Err(problem) = self.stream.bind().and_then(|()| self.leave()) {
            log::debug!("burn-ddp: a communicator of NCCL is aborted at its end: {problem}");
            self.abort();
        }
    }
}
