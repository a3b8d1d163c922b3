//! What launchers tell a rank through environment variables.
//!
//! Launchers are tried in the order of [`LAUNCHERS`]: the names of torchrun (which our own launcher
//! sets too), then those of MPI, then Slurm. MPI comes before Slurm because `mpirun` inside a Slurm
//! job leaves Slurm's variables, which describe the job and not the rank, in the environment.

use std::path::PathBuf;

use crate::{DdpError, tcp::Place};

/// Variables by which one launcher describes a rank.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
}

const LAUNCHERS: [Launcher; 5] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    Launcher {
        name: "MVAPICH",
        rank: "MV2_COMM_WORLD_RANK",
        world_size: "MV2_COMM_WORLD_SIZE",
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_size: &["MV2_COMM_WORLD_LOCAL_SIZE"],
    },
    Launcher {
        name: "PMI",
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
    },
    Launcher {
        name: SLURM,
        rank: "SLURM_PROCID",
        world_size: "SLURM_NTASKS",
        local_rank: &["SLURM_LOCALID"],
        local_size: &["SLURM_NTASKS_PER_NODE"],
    },
];

const SLURM: &str = "Slurm";
/// The port where nobody names one, as in PyTorch.
const DEFAULT_PORT: u16 = 29500;

/// Set by [`launch`](crate::launch): where the ranks meet.
pub(crate) const RENDEZVOUS: &str = "BURN_DDP_RENDEZVOUS";
/// The job's secret.
pub(crate) const SECRET: &str = "BURN_DDP_SECRET";
/// The time limit of every call, in seconds.
pub(crate) const TIMEOUT: &str = "BURN_DDP_TIMEOUT";
/// Set by [`launch`](crate::launch): the process that a rank must not outlive.
pub(crate) const PARENT: &str = "BURN_DDP_PARENT";

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
            // An ordinary Slurm job of one task has these variables too.
            found && !(launcher.name == SLURM && world_size.as_deref() == Some("1"))
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
        let local_rank = self.first_number(launcher.local_rank)?.unwrap_or(
            match self.spans_machines(launcher)? {
                true => 0,
                false => rank,
            },
        );
        Ok(Ranks {
            rank,
            world_size,
            local_rank,
        })
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
                    if launcher.name != "torchrun" && !self.spans_machines(launcher)? =>
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
                Some(launcher) if launcher.name == "torchrun" => {
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

    pub(crate) fn timeout(&self) -> Result<Option<f64>, DdpError> {
        (self.get)(TIMEOUT)
            .map(|text| {
                text.parse::<f64>()
                    .ok()
                    .filter(|seconds| *seconds > 0.0 && *seconds < 1e9)
                    .ok_or_else(|| {
                        environment(TIMEOUT, format!("`{text}`; expected seconds above 0"))
                    })
            })
            .transpose()
    }

    pub(crate) fn parent(&self) -> Result<Option<usize>, DdpError> {
        self.number(PARENT)
    }

    fn spans_machines(&self, launcher: &Launcher) -> Result<bool, DdpError> {
        let world_size = self.number(launcher.world_size)?;
        let local_size = self.first_number(launcher.local_size)?;
        Ok(local_size.is_some() && local_size < world_size)
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

/// Reads a rendezvous address; `None` for `env://`.
pub(crate) fn parse_url(url: &str) -> Result<Option<Place>, DdpError> {
    let wrong = |problem: &str| DdpError::Url {
        url: url.into(),
        problem: problem.into(),
    };
    let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("no scheme"))?;
    match scheme {
        "env" => Ok(None),
        "file" if rest.starts_with('/') => Ok(Some(Place::File(PathBuf::from(rest)))),
        "file" => Err(wrong("the path is not absolute")),
        "tcp" => {
            let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("no port"))?;
            let host = host.trim_start_matches('[').trim_end_matches(']');
            if host.is_empty() {
                return Err(wrong("no host"));
            }
            let port = port.parse().ok().filter(|port| *port != 0);
            Ok(Some(Place::Address {
                host: host.into(),
                port: port.ok_or_else(|| wrong("the port is not 1 to 65535"))?,
            }))
        }
        _ => Err(wrong("unknown scheme")),
    }
}

/// The first host of a Slurm host list such as `node[03-07,12],login1`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let host = match rest.strip_prefix('[') {
        None => name.to_string(),
        Some(numbers) => {
            let (numbers, after) = numbers.split_once(']')?;
            let first = numbers.split([',', '-']).next()?;
            let suffix = after.split(',').next()?;
            format!("{name}{first}{suffix}")
        }
    };
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<'a>(
        variables: &'a [(&'a str, &'a str)],
    ) -> Environment<impl Fn(&str) -> Option<String> + 'a> {
        Environment {
            get: move |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| value.to_string())
            },
        }
    }

    const SRUN: [(&str, &str); 6] = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NTASKS_PER_NODE", "4"),
        ("SLURM_JOB_NODELIST", "node[07-08,11]"),
        ("SLURM_JOB_ID", "123456"),
    ];

    #[test]
    fn nothing_set_is_not_distributed() {
        let env = with(&[]);
        assert!(!env.is_distributed());
        let error = env.ranks().unwrap_err();
        assert!(matches!(error, DdpError::Environment { ref variable, .. } if variable == "RANK"));
        assert!(error.is_setup());
    }

    #[test]
    fn torchrun() {
        let env = with(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "1234"),
        ]);
        let expected = Ranks {
            rank: 3,
            world_size: 4,
            local_rank: 1,
        };
        assert_eq!(env.ranks().unwrap(), expected);
        let expected = Place::Address {
            host: "10.0.0.1".into(),
            port: 1234,
        };
        assert_eq!(env.place().unwrap(), expected);
    }

    #[test]
    fn torchruns_agent_holds_the_port() {
        let env = with(&[
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
        ]);
        let expected = Place::TorchStore {
            host: "localhost".into(),
            port: 29500,
            prefix: "burn-ddp/none/2".into(),
        };
        assert_eq!(env.place().unwrap(), expected);
    }

    #[test]
    fn slurm() {
        let env = with(&SRUN);
        let expected = Ranks {
            rank: 5,
            world_size: 8,
            local_rank: 1,
        };
        assert_eq!(env.ranks().unwrap(), expected);
        let expected = Place::Address {
            host: "node07".into(),
            port: 15_000 + (123_456 % 15_000) as u16,
        };
        assert_eq!(env.place().unwrap(), expected);
    }

    #[test]
    fn a_slurm_job_of_one_task_is_not_distributed() {
        assert!(!with(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")]).is_distributed());
    }

    #[test]
    fn mpirun_inside_a_slurm_job() {
        let mut variables = SRUN.to_vec();
        variables.extend([
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ]);
        let ranks = with(&variables).ranks().unwrap();
        assert_eq!((ranks.rank, ranks.world_size), (1, 2));
    }

    #[test]
    fn mpi_on_one_machine_needs_no_address_but_on_several_it_does() {
        for (rank, size, local_rank, local_size) in [
            (
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
            ),
            ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
            (
                "MV2_COMM_WORLD_RANK",
                "MV2_COMM_WORLD_SIZE",
                "MV2_COMM_WORLD_LOCAL_RANK",
                "MV2_COMM_WORLD_LOCAL_SIZE",
            ),
        ] {
            let mut variables = vec![
                (rank, "1"),
                (size, "4"),
                (local_rank, "1"),
                (local_size, "4"),
            ];
            let expected = Place::Address {
                host: "127.0.0.1".into(),
                port: DEFAULT_PORT,
            };
            assert_eq!(with(&variables).place().unwrap(), expected);
            assert_eq!(with(&variables).ranks().unwrap().local_rank, 1);
            variables[3] = (local_size, "2");
            let error = with(&variables).place().unwrap_err().to_string();
            assert!(error.contains("MASTER_ADDR"), "{error}");
        }
    }

    #[test]
    fn nonsense_is_named() {
        for (variables, wrong) in [
            (vec![("RANK", "x"), ("WORLD_SIZE", "2")], "RANK"),
            (vec![("RANK", "2"), ("WORLD_SIZE", "2")], "RANK"),
            (vec![("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE"),
            (vec![("RANK", "0")], "WORLD_SIZE"),
        ] {
            let error = with(&variables).ranks().unwrap_err();
            assert!(
                matches!(&error, DdpError::Environment { variable, .. } if variable == wrong),
                "{error}"
            );
        }
        let timeout = with(&[(TIMEOUT, "-1")]).timeout();
        assert!(timeout.unwrap_err().to_string().contains(TIMEOUT));
    }

    #[test]
    fn urls() {
        let address = |host: &str, port| {
            Some(Place::Address {
                host: host.into(),
                port,
            })
        };
        assert_eq!(parse_url("tcp://h:80").unwrap(), address("h", 80));
        assert_eq!(parse_url("tcp://[::1]:80").unwrap(), address("::1", 80));
        assert_eq!(
            parse_url("file:///a/b").unwrap(),
            Some(Place::File("/a/b".into()))
        );
        assert_eq!(parse_url("env://").unwrap(), None);
        for url in [
            "h:80",
            "tcp://h",
            "tcp://:80",
            "tcp://h:0",
            "file://a",
            "http://h:1",
        ] {
            assert!(matches!(parse_url(url), Err(DdpError::Url { .. })), "{url}");
        }
    }

    #[test]
    fn host_lists() {
        for (list, host) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[01-04,7]", "node01"),
            ("rack[3,5]-a,x", "rack3-a"),
            ("a,node[1-2]", "a"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        assert_eq!(first_host(""), None);
        assert_eq!(first_host("node[1"), None);
    }
}
