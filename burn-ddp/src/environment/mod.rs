//! What launchers tell a rank through environment variables.
//!
//! Launchers are tried in the order of [`LAUNCHERS`]: the names of torchrun (which our own launcher
//! sets too), then those of MPI, then Flux and Slurm. MPI comes before these because `mpirun` inside one of
//! their jobs leaves their variables, which describe the job and not the rank, in the environment.

mod address;
mod launchers;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub(crate) use self::address::parse_url;
use self::{
    address::first_host,
    launchers::{FLUX_RANK, LAUNCHERS, LOCAL_RANK, Launcher, PMI, SLURM, SLURM_STEP, TORCHRUN},
};
use crate::{Backend, DdpError, tcp::Place};

/// The port where nobody names one, as in PyTorch.
const DEFAULT_PORT: u16 = 29500;

/// Set by [`launch`](crate::launch): where the ranks meet.
pub(crate) const RENDEZVOUS: &str = "BURN_DDP_RENDEZVOUS";
/// The job's secret.
pub(crate) const SECRET: &str = "BURN_DDP_SECRET";
/// The time limit of every call, in seconds.
pub(crate) const TIMEOUT: &str = "BURN_DDP_TIMEOUT";
/// How tensors travel.
pub(crate) const BACKEND: &str = "BURN_DDP_BACKEND";
/// Set by [`launch`](crate::launch): the process that a rank must not outlive.
pub(crate) const PARENT: &str = "BURN_DDP_PARENT";
/// Set by [`launch`](crate::launch): how often the job was started again.
pub(crate) const RESTARTS: &str = "RESTART_COUNT";

/// A rank's place in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ranks {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) local_rank: usize,
}

/// Environment variables, real or made up by a test.
pub(crate) struct Environment<F: Fn(&str) -> Option<String>> {
    get: F,
}

/// The process's own environment. Empty variables count as absent.
pub(crate) fn process() -> Environment<impl Fn(&str) -> Option<String>> {
    Environment {
        get: |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty()),
    }
}

fn environment(variable: &str, problem: impl Into<String>) -> DdpError {
    DdpError::Environment {
        variable: variable.into(),
        problem: problem.into(),
    }
}

impl<F: Fn(&str) -> Option<String>> Environment<F> {
    /// The launcher that started this process as one of several, or as the one rank of its job.
    fn launcher(&self) -> Option<&'static Launcher> {
        LAUNCHERS.iter().find(|launcher| {
            let world_size = (self.get)(launcher.world_size);
            let found = (self.get)(launcher.rank).is_some() && world_size.is_some();
            // A batch script has these variables too, as if it were task 0, and an ordinary Slurm job of one
            // task has them. A task that srun has started also has the number of its step.
            let alone = || world_size.as_deref() == Some("1") || (self.get)(SLURM_STEP).is_none();
            // srun and Flux speak PMI too, which then says nothing of machines, as it does under `mpirun`.
            let in_own_names = || {
                let task = [SLURM_STEP, FLUX_RANK];
                !self.has_any(launcher.local_size) && self.has_any(&task)
            };
            found
                && match launcher.name {
                    SLURM => !alone(),
                    PMI => !in_own_names(),
                    _ => true,
                }
        })
    }

    /// Whether a launcher started this process.
    pub(crate) fn is_distributed(&self) -> bool {
        self.launcher().is_some()
    }

    pub(crate) fn ranks(&self) -> Result<Ranks, DdpError> {
        let Some(launcher) = self.launcher() else {
            let missing = match (self.get)("RANK") {
                None => "RANK",
                Some(_) => "WORLD_SIZE",
            };
            return Err(environment(
                missing,
                "missing; start the program by `burn-ddp run`, torchrun, mpirun or srun, \
                 or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            ));
        };
        let rank = self.number(launcher.rank)?.unwrap_or(0);
        let world_size = self.number(launcher.world_size)?.unwrap_or(1);
        if world_size == 0 {
            return Err(environment(launcher.world_size, "0; expected at least 1"));
        }
        if rank >= world_size {
            return Err(environment(
                launcher.rank,
                format!("{rank}; expected less than the world size, {world_size}"),
            ));
        }
        Ok(Ranks {
            rank,
            world_size,
            local_rank: match self.first_number(launcher.local_rank)? {
                Some(local_rank) => local_rank,
                None => self.guess_local_rank(launcher, rank)?,
            },
        })
    }

    /// The number among the ranks of this machine, where the launcher does not tell it.
    fn guess_local_rank(&self, launcher: &Launcher, rank: usize) -> Result<usize, DdpError> {
        let set = self.local_rank()?;
        let by_hand = launcher.name == TORCHRUN;
        match (set, self.spans_machines(launcher)?) {
            (Some(local_rank), _) => Ok(local_rank),
            (None, Some(false)) => Ok(rank),
            // As with `connect`: a launcher of torchrun's kind says how many ranks a machine has.
            (None, None) if by_hand => Ok(rank),
            (None, _) => Err(environment(
                LOCAL_RANK,
                format!(
                    "missing, and {} does not tell it; set it to this rank's number among those of its machine",
                    launcher.name
                ),
            )),
        }
    }

    /// Where the ranks meet.
    pub(crate) fn place(&self) -> Result<Place, DdpError> {
        if let Some(url) = (self.get)(RENDEZVOUS) {
            return parse_url(&url)?.ok_or_else(|| {
                environment(
                    RENDEZVOUS,
                    "env:// would lead back here; name an address or a file",
                )
            });
        }
        let launcher = self.launcher();
        let is_slurm = launcher.is_some_and(|launcher| launcher.name == SLURM);
        let host = match (self.get)("MASTER_ADDR") {
            Some(host) => host,
            None if is_slurm => {
                let nodes = (self.get)("SLURM_STEP_NODELIST")
                    .or_else(|| (self.get)("SLURM_JOB_NODELIST"))
                    .ok_or_else(|| {
                        environment("MASTER_ADDR", "missing, as is SLURM_JOB_NODELIST")
                    })?;
                first_host(&nodes).ok_or_else(|| {
                    environment("SLURM_JOB_NODELIST", format!("`{nodes}` names no host"))
                })?
            }
            None => match launcher {
                Some(launcher)
                    if launcher.name != TORCHRUN
                        && self.spans_machines(launcher)? == Some(false) =>
                {
                    "127.0.0.1".into()
                }
                _ => {
                    return Err(environment(
                        "MASTER_ADDR",
                        "missing; set it to the host of rank 0",
                    ));
                }
            },
        };
        let port = match (self.get)("MASTER_PORT") {
            Some(text) => text.parse().ok().filter(|port| *port != 0).ok_or_else(|| {
                environment("MASTER_PORT", format!("`{text}`; expected 1 to 65535"))
            })?,
            None => match launcher {
                Some(launcher) if launcher.name == TORCHRUN => {
                    return Err(environment(
                        "MASTER_PORT",
                        "missing; set it to a free port of MASTER_ADDR",
                    ));
                }
                // Jobs that share a machine should not share a port.
                _ => match self.number("SLURM_JOB_ID")? {
                    Some(job) => 15_000 + (job % 15_000) as u16,
                    None => DEFAULT_PORT,
                },
            },
        };
        // As URLs have addresses of version 6.
        let host = host.trim_matches(['[', ']']).to_owned();
        let agent = (self.get)("TORCHELASTIC_USE_AGENT_STORE");
        if agent.is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            let run = (self.get)("TORCHELASTIC_RUN_ID").unwrap_or_default();
            let restart = (self.get)("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
            return Ok(Place::TorchStore {
                host,
                port,
                prefix: format!("burn-ddp/{run}/{restart}"),
            });
        }
        Ok(Place::Address { host, port })
    }

    pub(crate) fn secret(&self) -> String {
        (self.get)(SECRET).unwrap_or_default()
    }

    pub(crate) fn timeout(&self) -> Result<Option<Duration>, DdpError> {
        (self.get)(TIMEOUT)
            .map(|text| {
                let seconds = text.parse::<f64>().ok();
                seconds
                    .filter(|seconds| *seconds < 1e9)
                    .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                    .filter(|timeout| !timeout.is_zero())
                    .ok_or_else(|| {
                        environment(TIMEOUT, format!("`{text}`; expected seconds above 0"))
                    })
            })
            .transpose()
    }

    pub(crate) fn backend(&self) -> Result<Option<Backend>, DdpError> {
        (self.get)(BACKEND)
            .map(|name| {
                name.parse()
                    .map_err(|problem: String| environment(BACKEND, problem))
            })
            .transpose()
    }

    /// The number among the ranks of this machine, where one is set in torchrun's way.
    pub(crate) fn local_rank(&self) -> Result<Option<usize>, DdpError> {
        self.number(LOCAL_RANK)
    }

    pub(crate) fn parent(&self) -> Result<Option<usize>, DdpError> {
        self.number(PARENT)
    }

    /// Whether the ranks are on several machines, if the launcher tells: a missing variable says nothing.
    fn spans_machines(&self, launcher: &Launcher) -> Result<Option<bool>, DdpError> {
        let world_size = self.number(launcher.world_size)?.unwrap_or(1);
        let local_size = self.first_number(launcher.local_size)?;
        let machines = self.first_number(launcher.machines)?;
        Ok(match (world_size, local_size, machines) {
            (1, ..) => Some(false),
            (_, Some(local_size), _) => Some(local_size < world_size),
            (.., machines) => machines.map(|machines| machines > 1),
        })
    }

    fn has_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| (self.get)(name).is_some())
    }

    fn number(&self, name: &str) -> Result<Option<usize>, DdpError> {
        (self.get)(name)
            .map(|text| {
                text.parse()
                    .map_err(|_| environment(name, format!("`{text}` is no whole number")))
            })
            .transpose()
    }

    fn first_number(&self, names: &[&str]) -> Result<Option<usize>, DdpError> {
        let found = names.iter().find(|name| (self.get)(name).is_some());
        found.map_or(Ok(None), |name| self.number(name))
    }
}
