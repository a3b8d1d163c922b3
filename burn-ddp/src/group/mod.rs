//! The process group: the ranks of a job and the collective calls that they make together.

use std::{
    fmt::{self, Debug},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

mod alone;
mod asynchronous;
mod builder;
mod collectives;
mod local_device;
mod order;
mod owner;
mod pending;
mod plane;
mod refuse;
mod run;
mod subgroup;
mod tensors;
#[cfg(feature = "fp8")]
mod weak;

pub use self::{
    builder::{GroupBuilder, is_distributed_env},
    pending::Pending,
    tensors::TensorOp,
};

#[cfg(feature = "fp8")]
pub(crate) use self::weak::WeakGroup;
use self::{alone::Alone, order::Order, owner::Owner, plane::Plane, run::Sequences};
pub(crate) use self::{
    pending::{Worker, describe},
    plane::Location,
};
use crate::{Backend, DdpError, transport::Transport};

/// The default time limit of a call.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(600);

/// The ranks of a job, and this process's place among them.
///
/// Every rank must make the same calls in the same order, with the same shapes. Each message says which call it
/// belongs to, so that a rank which deviates is noticed. The first fault ends the group: on all ranks, the
/// current and every later call returns a [`DdpError`] that names the rank at fault.
///
/// Handles are cheap to clone and can be used from any thread. Calls on one communicator run one at a time, in
/// the order in which they were submitted. Two threads that communicate at the same time need separate
/// communicators ([`duplicate`](Self::duplicate)).
///
/// ```
/// use burn_ddp::{ProcessGroup, ReduceOp};
///
/// # fn main() -> Result<(), burn_ddp::DdpError> {
/// // Under `burn-ddp run`, torchrun, mpirun or srun this would be `ProcessGroup::init()?`.
/// let group = ProcessGroup::single();
/// let mut loss = [0.5f32];
/// group.all_reduce(&mut loss, ReduceOp::Mean)?;
/// if group.is_main() {
///     println!("mean loss over {} ranks: {}", group.world_size(), loss[0]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ProcessGroup {
    inner: Arc<Inner>,
    timeout: Duration,
    /// `None` for a handle of an asynchronous call.
    _owner: Option<Arc<Owner>>,
}

pub(crate) struct Inner {
    rank: usize,
    world_size: usize,
    /// This rank's number in the whole job, which error messages use.
    job_rank: usize,
    local_rank: usize,
    settings: Settings,
    transport: Box<dyn Transport>,
    order: Order,
    sequences: Mutex<Sequences>,
    worker: Worker,
    /// Locked while a call is handed to the worker.
    submitting: Mutex<()>,
    /// How tensors travel, once the ranks have agreed on it.
    plane: Mutex<Option<Result<Plane, DdpError>>>,
    counters: Counters,
    /// Groups that end with this one.
    #[cfg(feature = "fp8")]
    kept: Mutex<Vec<ProcessGroup>>,
}

/// Settings that all communicators of a rank share.
#[derive(Clone)]
pub(crate) struct Settings {
    /// The time limit of handles that do not have their own.
    timeout: Duration,
    backend: Backend,
    /// The lowest id that no communicator of this rank has had.
    next_communicator: Arc<AtomicU32>,
}

impl Settings {
    pub(crate) fn new(timeout: Duration, backend: Backend) -> Self {
        Self {
            timeout,
            backend,
            next_communicator: Arc::new(AtomicU32::new(1)),
        }
    }
}

#[derive(Default)]
struct Counters {
    calls: AtomicU64,
    bytes_reduced: AtomicU64,
    nanoseconds: AtomicU64,
}

/// What a communicator has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Calls made.
    pub calls: u64,
    /// Bytes of data passed to all-reduces.
    pub bytes_reduced: u64,
    /// Time spent inside calls, including waiting for other ranks.
    pub time: Duration,
}

impl Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("rank", &self.inner.rank)
            .field("world_size", &self.inner.world_size)
            .finish_non_exhaustive()
    }
}

impl ProcessGroup {
    /// Joins the job that the environment describes: of `burn-ddp run`, torchrun, Open MPI, MVAPICH, MPICH or
    /// Intel MPI, Flux, or Slurm (tried in this order).
    ///
    /// Waits until all ranks have joined.
    ///
    /// # Errors
    ///
    /// [Setup errors](DdpError::is_setup), when a variable is missing or wrong, the port is taken, or ranks do
    /// not appear in time. [`DdpError::RankDied`] when a rank dies meanwhile.
    pub fn init() -> Result<Self, DdpError> {
        Self::builder().init()
    }

    /// [`init`](Self::init) if a launcher [started this process](is_distributed_env), otherwise [`single`](Self::single): for
    /// programs that run on one rank as well as on many.
    ///
    /// ```
    /// use burn_ddp::ProcessGroup;
    ///
    /// let group = ProcessGroup::init_or_single()?;
    /// println!("rank {} of {}", group.rank(), group.world_size());
    /// # Ok::<(), burn_ddp::DdpError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`init`](Self::init).
    pub fn init_or_single() -> Result<Self, DdpError> {
        Self::builder().init_or_single()
    }

    /// Joins a job at a given address: `tcp://HOST:PORT` (rank 0 listens there), `file:///PATH` (a file that
    /// all ranks of one machine can access), or `env://` (takes only the address from the environment).
    /// A single rank needs no address.
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init), and when the address cannot be understood.
    pub fn connect(url: &str, rank: usize, world_size: usize) -> Result<Self, DdpError> {
        Self::builder().connect(url, rank, world_size)
    }

    /// A group of this process alone. All collectives work, but nothing travels.
    pub fn single() -> Self {
        let transport = Box::new(Alone::default());
        Self::new(transport, 0, 1, 0, Settings::new(TIMEOUT, Backend::Auto))
    }

    /// Settings for [`init`](Self::init) and [`connect`](Self::connect).
    pub fn builder() -> GroupBuilder {
        GroupBuilder::new()
    }

    pub(crate) fn new(
        transport: Box<dyn Transport>,
        rank: usize,
        world_size: usize,
        local_rank: usize,
        settings: Settings,
    ) -> Self {
        Self::with_numbers(transport, rank, world_size, rank, local_rank, settings)
    }

    fn with_numbers(
        transport: Box<dyn Transport>,
        rank: usize,
        world_size: usize,
        job_rank: usize,
        local_rank: usize,
        settings: Settings,
    ) -> Self {
        let inner = Arc::new(Inner {
            rank,
            world_size,
            job_rank,
            local_rank,
            settings,
            transport,
            order: Order::default(),
            sequences: Mutex::default(),
            worker: Worker::default(),
            submitting: Mutex::default(),
            plane: Mutex::default(),
            counters: Counters::default(),
            #[cfg(feature = "fp8")]
            kept: Mutex::default(),
        });
        Self {
            timeout: inner.settings.timeout,
            _owner: Some(Arc::new(Owner::of(&inner))),
            inner,
        }
    }

    /// This process's rank, from 0.
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// The number that a member of this group has in the whole job, which error messages use.
    pub(crate) fn number(&self, member: usize) -> usize {
        self.inner.transport.number(member)
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.inner.world_size
    }

    /// This process's number among the ranks on its machine, usually the number of the GPU to use.
    pub fn local_rank(&self) -> usize {
        self.inner.local_rank
    }

    /// Whether this is rank 0, which prints, logs and saves.
    pub fn is_main(&self) -> bool {
        self.inner.rank == 0
    }

    /// The time limit of each call.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A handle of the same communicator with another time limit for its calls. Communicators created from it
    /// ([`duplicate`](Self::duplicate), [`subgroup`](Self::subgroup)) have that limit too. Ranks may have
    /// different limits: the first to expire ends the job. A rank that shows no sign of life (it was stopped,
    /// or its machine is gone) is waited for no longer than the limit of the original handle.
    ///
    /// ```
    /// use burn_ddp::ProcessGroup;
    /// use std::time::Duration;
    ///
    /// # fn main() -> Result<(), burn_ddp::DdpError> {
    /// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?
    /// // Rank 0 first makes an index of the data, which takes long.
    /// group.with_timeout(Duration::from_secs(3600)).barrier()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the limit is 0.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        assert!(!timeout.is_zero(), "a call needs more time than none");
        Self {
            timeout,
            ..self.clone()
        }
    }

    /// What this communicator has done so far.
    pub fn stats(&self) -> GroupStats {
        let counters = &self.inner.counters;
        GroupStats {
            calls: counters.calls.load(Ordering::Relaxed),
            bytes_reduced: counters.bytes_reduced.load(Ordering::Relaxed),
            time: Duration::from_nanos(counters.nanoseconds.load(Ordering::Relaxed)),
        }
    }

    /// The fault that ended the group, if one did.
    pub fn fault(&self) -> Option<DdpError> {
        self.inner.transport.fault()
    }

    /// Ends the job: from now on, every call of every rank returns [`DdpError::Aborted`] with this rank and
    /// `reason`, unless another fault came first.
    pub fn abort(&self, reason: impl Into<String>) -> DdpError {
        self.inner.transport.fail(DdpError::Aborted {
            rank: self.inner.job_rank,
            reason: reason.into(),
        })
    }

    /// Ends the job because of an error that only this rank has, so that the other ranks do not wait for it.
    pub(crate) fn give_up(&self, error: DdpError) -> DdpError {
        match error.is_fault() {
            true => error,
            false => self.abort(error.to_string()),
        }
    }
}
