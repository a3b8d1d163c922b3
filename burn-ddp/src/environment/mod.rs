//! The environment variables by which launchers describe a rank.
//!
//! Launchers are tried in the order of [`LAUNCHERS`]: first the variables of torchrun (which our own launcher
//! sets too), then those of MPI, then those of Flux and Slurm. MPI comes before Flux and Slurm because `mpirun` inside one
//! of their jobs leaves their variables in the environment, where they describe the job and not the rank.

mod address;
mod launchers;
#[cfg(test)]
mod tests;

use std::{path::PathBuf, time::Duration};

pub(crate) use self::address::parse_url;
use self::{
    address::{first_host, is_loopback},
    launchers::{
        FLUX_RANK, LAUNCHERS, LOCAL_RANK, Launcher, PMI, SLURM, SLURM_JOB, SLURM_NO_STEP,
        SLURM_STEP, TORCHRUN,
    },
};
use crate::{Backend, DdpError, tcp::Place};

/// The default port, as in PyTorch.
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
/// The namespace in which the launcher has that number.
pub(crate) const PARENT_NAMESPACE: &str = "BURN_DDP_PARENT_NAMESPACE";
/// Set by [`launch`](crate::launch): the folder in which a rank notes why it fails.
pub(crate) const BLAME: &str = "BURN_DDP_BLAME";
/// Set by [`launch`](crate::launch): how often the job was restarted.
pub(crate) const RESTARTS: &str = "RESTART_COUNT";

/// A rank's place in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ranks {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) local_rank: usize,
}

/// Environment variables: those of the process, or those of a test.
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

/// A port that differs between Slurm jobs on the same machine, and between steps of one job that run at the same time:
/// the ports of successive steps are a prime apart.
fn slurm_port(job: usize, step: u32) -> u16 {
    const PORTS: u64 = 15_000;
    let number = job as u64 % PORTS + u64::from(step) * 7919;
    15_000 + (number % PORTS) as u16
}

impl<F: Fn(&str) -> Option<String>> Environment<F> {
    /// The launcher that started this process as a rank. A job of one rank counts, except with srun.
    fn launcher(&self) -> Option<&'static Launcher> {
        // `srun -n 1` is also how ordinary programs are run.
        self.starter().filter(|launcher| {
            let world_size = self.first(launcher.world_size);
            launcher.name != SLURM || world_size.as_deref() != Some("1")
        })
    }

    /// Like `launcher`, but srun also counts when it has started a single task.
    fn starter(&self) -> Option<&'static Launcher> {
        LAUNCHERS.iter().find(|launcher| {
            // srun and Flux set PMI's variables too, but not those about machines, which `mpirun` sets.
            let in_own_names = || {
                let is_task = self.slurm_step().is_some() || self.has_any(&[FLUX_RANK]);
                !self.has_any(launcher.local_size) && is_task
            };
            self.has_any(&[launcher.rank])
                && self.has_any(launcher.world_size)
                && match launcher.name {
                    // A batch script and the shell of `salloc` have Slurm's variables too, as if they were task 0.
                    SLURM => self.slurm_step().is_some(),
                    PMI => !in_own_names(),
                    _ => true,
                }
        })
    }

    /// The number of the step in which srun started this task.
    fn slurm_step(&self) -> Option<u32> {
        let step = (self.get)(SLURM_STEP)?.parse().ok()?;
        (step < SLURM_NO_STEP).then_some(step)
    }

    /// Whether a launcher started this process.
    pub(crate) fn is_distributed(&self) -> bool {
        self.launcher().is_some()
    }

    pub(crate) fn ranks(&self) -> Result<Ranks, DdpError> {
        let Some(launcher) = self.starter() else {
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
        let world_size = self.first_number(launcher.world_size)?.unwrap_or(1);
        if world_size == 0 {
            let names = launcher.world_size.join(" or ");
            return Err(environment(&names, "0; expected at least 1"));
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

    /// The rank's number among those of this machine, if the launcher does not set it.
    fn guess_local_rank(&self, launcher: &Launcher, rank: usize) -> Result<usize, DdpError> {
        let set = self.local_rank()?;
        let by_hand = launcher.name == TORCHRUN;
        match (set, self.spans_machines(launcher)?) {
            (Some(local_rank), _) => Ok(local_rank),
            (None, Some(false)) => Ok(rank),
            // As with `connect`: a launcher that works like torchrun would set the number of ranks on a machine.
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
            let place = parse_url(&url)?.ok_or_else(|| {
                environment(
                    RENDEZVOUS,
                    "env:// would lead back here; name an address or a file",
                )
            })?;
            return Ok(match place {
                Place::Address { host, port, local } => Place::Address {
                    host,
                    port,
                    local: local && self.is_one_machine()?,
                },
                place => place,
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
                // Jobs on the same machine should not share a port.
                _ => match self.number(SLURM_JOB)? {
                    // Under mpirun, only some ranks are in a Slurm step.
                    Some(job) => {
                        let step = self.slurm_step().filter(|_| is_slurm);
                        slurm_port(job, step.unwrap_or(0))
                    }
                    None => DEFAULT_PORT,
                },
            },
        };
        // IPv6 addresses may be in brackets, as in URLs.
        let host = host.trim_matches(['[', ']']).to_owned();
        // Kubeflow sets `localhost` on rank 0, and rank 0's host name on the others, which are on other machines.
        let local = is_loopback(&host) && self.is_one_machine()?;
        let agent = (self.get)("TORCHELASTIC_USE_AGENT_STORE");
        if agent.is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            let run = (self.get)("TORCHELASTIC_RUN_ID").unwrap_or_default();
            let restart = (self.get)("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
            return Ok(Place::TorchStore {
                host,
                port,
                prefix: format!("burn-ddp/{run}/{restart}"),
                local,
            });
        }
        Ok(Place::Address { host, port, local })
    }

    /// The secret. If none is set, a text that identifies the launcher's job, so that the ranks of two jobs of the same
    /// user do not meet by mistake.
    pub(crate) fn secret_of_job(&self) -> String {
        let job = self.launcher().and_then(|launcher| {
            let parts = launcher.job.iter().map(|name| (self.get)(name));
            let parts: Vec<String> = parts.collect::<Option<_>>()?;
            (!parts.is_empty()).then(|| format!("{} job {}", launcher.name, parts.join(".")))
        });
        (self.get)(SECRET).or(job).unwrap_or_default()
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

    /// The rank's number among those of this machine, if torchrun's variable for it is set.
    pub(crate) fn local_rank(&self) -> Result<Option<usize>, DdpError> {
        self.number(LOCAL_RANK)
    }

    pub(crate) fn parent(&self) -> Result<Option<usize>, DdpError> {
        self.number(PARENT)
    }

    /// The PID namespace in which the launcher has its number.
    pub(crate) fn parent_namespace(&self) -> Option<String> {
        (self.get)(PARENT_NAMESPACE)
    }

    /// The folder in which a rank notes for its launcher why it fails.
    pub(crate) fn blame(&self) -> Option<PathBuf> {
        (self.get)(BLAME).map(PathBuf::from)
    }

    /// Whether the launcher's variables say that all ranks are on this machine.
    fn is_one_machine(&self) -> Result<bool, DdpError> {
        match self.launcher() {
            Some(launcher) => Ok(self.spans_machines(launcher)? == Some(false)),
            None => Ok(false),
        }
    }

    /// Whether the ranks are on several machines. `None` if the launcher's variables do not tell: nothing is inferred from a
    /// missing variable.
    fn spans_machines(&self, launcher: &Launcher) -> Result<Option<bool>, DdpError> {
        let world_size = self.first_number(launcher.world_size)?.unwrap_or(1);
        let local_size = self.first_number(launcher.local_size)?;
        let machines = self.first_number(launcher.machines)?;
        Ok(match (world_size, machines, local_size) {
            (1, ..) => Some(false),
            // Slurm's local size is the largest number of tasks that a machine may have.
            (_, Some(machines), _) => Some(machines > 1),
            (.., local_size) => local_size.map(|local_size| local_size < world_size),
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

    fn first(&self, names: &[&str]) -> Option<String> {
        names.iter().find_map(|name| (self.get)(name))
    }

    fn first_number(&self, names: &[&str]) -> Result<Option<usize>, DdpError> {
        let found = names.iter().find(|name| (self.get)(name).is_some());
        found.map_or(Ok(None), |name| self.number(name))
    }
}
