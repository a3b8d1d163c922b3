//! The settings of a process group, and how it joins a job.

use std::time::Duration;

use super::{ProcessGroup, Settings, TIMEOUT, alone::Alone};
use crate::{
    Backend, DdpError,
    environment::{self, Ranks},
    launch, tcp,
    transport::Deadline,
};

/// Settings for joining a job.
///
/// ```no_run
/// use burn_ddp::ProcessGroup;
/// use std::time::Duration;
///
/// let group = ProcessGroup::builder()
///     .timeout(Duration::from_secs(60))
///     .init()?;
/// # Ok::<(), burn_ddp::DdpError>(())
/// ```
///
/// # Addresses
///
/// Ranks listen on the loopback address only if they are certain to be on one machine: at `file://`; if [`connect`](Self::connect) is
/// given `tcp://localhost:…` or `tcp://127.…`; or if the master is literally one of these and the launcher says that there is one
/// machine (`LOCAL_WORLD_SIZE` equal to `WORLD_SIZE`, Slurm's number of nodes, ...). Otherwise they listen on all addresses, so set a
/// [secret](Self::secret): `MASTER_ADDR=localhost` may be set on rank 0 alone (Kubeflow's PyTorchJob), and Debian resolves a machine's
/// own name to a loopback address. In these two cases a rank listens on all addresses of IPv4 and of IPv6, as the others may know
/// it by either.
#[derive(Clone, Debug)]
#[must_use]
pub struct GroupBuilder {
    timeout: Option<Duration>,
    connect_timeout: Option<Duration>,
    secret: Option<String>,
    sockets: usize,
    local_rank: Option<usize>,
    backend: Option<Backend>,
}

impl GroupBuilder {
    pub(super) fn new() -> Self {
        Self {
            timeout: None,
            connect_timeout: None,
            secret: None,
            sockets: 1,
            local_rank: None,
            backend: None,
        }
    }

    /// The time limit of each call. Default: `BURN_DDP_TIMEOUT` (seconds), or 10 minutes, as for NCCL in PyTorch. When a fifth
    /// of it is over, the log warns and names the ranks that are waited for.
    ///
    /// # Panics
    ///
    /// Panics if it is 0.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        assert!(!timeout.is_zero(), "a call needs more time than none");
        self.timeout = Some(timeout);
        self
    }

    /// How long to wait for all ranks to appear. Default: the time limit of calls. Ranks other than 0 wait up to 2 seconds
    /// longer: what rank 0 says when its own time is over, such as which ranks are missing, is still on its way then.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// The secret that all ranks of the job must know. Default: `BURN_DDP_SECRET`, or none. Without one,
    /// [`init`](Self::init) still tells jobs and steps of Slurm, Flux and Open MPI apart, by their ids.
    ///
    /// A secret keeps strangers out: each side proves that it knows the secret without sending it. Messages are
    /// not encrypted. On one machine, [`launch`](crate::launch) and `burn-ddp run` make a random secret; for several machines, set one.
    /// Connections that send nothing are dropped when others need the room, and a rank whose connection is refused or cut tries
    /// again until its time is over.
    pub fn secret(mut self, secret: impl Into<String>) -> Self {
        self.secret = Some(secret.into());
        self
    }

    /// The number of connections between any two ranks, over which large payloads are striped. Default: 1. More
    /// help if one connection does not saturate the network. The number must be the same on all ranks; a rank
    /// with a different one is [refused](DdpError::Refused).
    ///
    /// In each communicator, a rank has so many connections to every other rank, and each takes a file descriptor. If the soft limit is
    /// too low for that, the rank raises it up to the hard limit; if that is too low as well, the error names `ulimit -n`.
    ///
    /// # Panics
    ///
    /// Panics if it is not 1 to 64.
    pub fn sockets(mut self, sockets: usize) -> Self {
        assert!((1..=64).contains(&sockets), "expected 1 to 64 sockets");
        self.sockets = sockets;
        self
    }

    /// This process's number among the ranks on its machine, usually the number of the GPU to use. Default:
    /// from the launcher; with [`connect`](Self::connect), `LOCAL_RANK`, or the rank if that is not set (which
    /// is right on one machine).
    pub fn local_rank(mut self, local_rank: usize) -> Self {
        self.local_rank = Some(local_rank);
        self
    }

    /// How tensors travel. Default: `BURN_DDP_BACKEND` (`auto`, `host` or `nccl`), or [`Backend::Auto`]: by
    /// NCCL if every rank has its own GPU. Must be the same on all ranks.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = Some(backend);
        self
    }

    /// See [`ProcessGroup::init`].
    ///
    /// # Errors
    ///
    /// Those of [`ProcessGroup::init`].
    pub fn init(self) -> Result<ProcessGroup, DdpError> {
        let environment = environment::process();
        let ranks = environment.ranks()?;
        if let Some(parent) = environment.parent()? {
            launch::die_with(parent, environment.parent_namespace())?;
        }
        let secret = self.secret.clone();
        let settings = Self {
            secret: secret.or_else(|| Some(environment.secret_of_job())),
            ..self
        };
        match ranks.world_size {
            1 => settings.join(None, ranks),
            _ => settings.join(Some(environment.place()?), ranks),
        }
    }

    /// See [`ProcessGroup::init_or_single`].
    ///
    /// # Errors
    ///
    /// Those of [`ProcessGroup::init`].
    pub fn init_or_single(self) -> Result<ProcessGroup, DdpError> {
        let alone = Ranks {
            rank: 0,
            world_size: 1,
            local_rank: 0,
        };
        match is_distributed_env() {
            true => self.init(),
            false => self.join(None, alone),
        }
    }

    /// See [`ProcessGroup::connect`].
    ///
    /// # Errors
    ///
    /// Those of [`ProcessGroup::connect`].
    pub fn connect(
        self,
        url: &str,
        rank: usize,
        world_size: usize,
    ) -> Result<ProcessGroup, DdpError> {
        let place = environment::parse_url(url)?;
        if rank >= world_size {
            return Err(DdpError::InvalidArgument(format!(
                "rank {rank}; expected one below the world size, {world_size}"
            )));
        }
        let ranks = Ranks {
            rank,
            world_size,
            local_rank: environment::process().local_rank()?.unwrap_or(rank),
        };
        let place = match (world_size, place) {
            (1, _) => None,
            (_, Some(place)) => Some(place),
            (_, None) => Some(environment::process().place()?),
        };
        self.join(place, ranks)
    }

    fn join(self, place: Option<tcp::Place>, ranks: Ranks) -> Result<ProcessGroup, DdpError> {
        let environment = environment::process();
        let timeout = match self.timeout {
            Some(timeout) => timeout,
            None => environment.timeout()?.unwrap_or(TIMEOUT),
        };
        let backend = match self.backend {
            Some(backend) => backend,
            None => environment.backend()?.unwrap_or_default(),
        };
        let Ranks {
            rank,
            world_size,
            local_rank,
        } = ranks;
        let local_rank = self.local_rank.unwrap_or(local_rank);
        let transport = match place {
            None => Box::new(Alone::default()),
            Some(place) => {
                let connected = tcp::connect(
                    &place,
                    rank,
                    world_size,
                    &self.secret.unwrap_or_else(|| environment.secret()),
                    self.sockets,
                    Deadline::after(self.connect_timeout.unwrap_or(timeout)),
                );
                launch::note_meeting(rank, &connected);
                connected?
            }
        };
        Ok(ProcessGroup::new(
            transport,
            rank,
            world_size,
            local_rank,
            Settings::new(timeout, backend),
        ))
    }
}

/// Whether a launcher started this process as a rank of a job, so that [`ProcessGroup::init`] will find the
/// job. `false` for a single task of `srun` (though `init` makes it a group of one), for a Slurm batch script,
/// and in the shell of `salloc`, which start ranks themselves.
pub fn is_distributed_env() -> bool {
    environment::process().is_distributed()
}
