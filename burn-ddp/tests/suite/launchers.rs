//! Ranks that others' launchers start: torchrun, whose agent holds the master's port with a store, and
//! those that happen to be installed.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{IpAddr, TcpListener, TcpStream, UdpSocket},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use burn_ddp::ProcessGroup;

use crate::suite::{
    faults::free_port,
    ranks::{PLAY, Rank, SCENARIO, player},
};

/// A name that resolves to the loopback address without saying so, as a host's own name often does: 127.0.0.1
/// as inet_aton(3) reads it.
const OWN_NAME: &str = "2130706433";

/// An address of this machine that other machines could reach.
fn outer_address() -> Option<IpAddr> {
    // Nothing is sent: the system only chooses the address it would send from.
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("198.51.100.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

type Keys = Arc<Mutex<HashMap<String, Vec<u8>>>>;

/// A store as torchrun's agent has it: PyTorch's TCPStore, its backend's `query` and handlers
/// (torch/csrc/distributed/c10d/TCPStoreBackend.cpp). Answers one client until it goes.
fn serve(mut client: TcpStream, keys: &Keys) -> io::Result<()> {
    fn number(client: &mut TcpStream) -> io::Result<u64> {
        let mut bytes = [0; 8];
        client.read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }
    fn vector(client: &mut TcpStream) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; number(client)? as usize];
        client.read_exact(&mut bytes)?;
        Ok(bytes)
    }
    fn string(client: &mut TcpStream) -> io::Result<String> {
        String::from_utf8(vector(client)?).map_err(io::Error::other)
    }
    let mut validated = false;
    loop {
        let mut query = [0];
        client.read_exact(&mut query)?;
        match query[0] {
            0 if !validated => {
                let mut magic = [0; 4];
                client.read_exact(&mut magic)?;
                assert_eq!(u32::from_ne_bytes(magic), 0x3C85_F7CE);
                validated = true;
            }
            1 if validated => {
                let (key, value) = (string(&mut client)?, vector(&mut client)?);
                keys.lock().unwrap().insert(key, value);
            }
            3 if validated => {
                let key = string(&mut client)?;
                // `at`: a key that is not there ends the connection.
                let value = keys.lock().unwrap().get(&key).cloned();
                let value = value.ok_or(io::ErrorKind::NotFound)?;
                client.write_all(&(value.len() as u64).to_ne_bytes())?;
                client.write_all(&value)?;
            }
            5 if validated => {
                let mut ready = true;
                for _ in 0..number(&mut client)? {
                    ready &= keys.lock().unwrap().contains_key(&string(&mut client)?);
                }
                client.write_all(&[u8::from(!ready)])?;
            }
            query => panic!("query {query}, validated: {validated}"),
        }
    }
}

fn store() -> (u16, Keys) {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let keys = Keys::default();
    let served = keys.clone();
    thread::spawn(move || {
        for client in listener.incoming() {
            let keys = served.clone();
            thread::spawn(move || serve(client.unwrap(), &keys));
        }
    });
    (port, keys)
}

#[test]
fn ranks_meet_through_the_store_of_torchruns_agent() {
    let outer = outer_address().map(|ip| ip.to_string());
    if outer.is_none() {
        eprintln!("this machine has no address but loopback: all ranks use its own name");
    }
    let (port, keys) = store();
    let ranks = [0, 1, 2].map(|rank: usize| {
        // Two ranks of the first machine, where its name is a loopback name, and one of another.
        let master = match rank {
            2 => outer.as_deref().unwrap_or(OWN_NAME),
            _ => OWN_NAME,
        };
        let mut command = player("sum");
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "3")
            .env("LOCAL_RANK", (rank % 2).to_string())
            .env("LOCAL_WORLD_SIZE", "2")
            .env("MASTER_ADDR", master)
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env("TORCHELASTIC_RUN_ID", "some run")
            .env("TORCHELASTIC_RESTART_COUNT", "1")
            .env("BURN_DDP_TIMEOUT", "30");
        Rank(command.spawn().unwrap())
    });
    for rank in ranks {
        let output = rank.succeed(60);
        assert!(output.contains("RESULT ok 4.5 4.5"), "{output}");
    }
    // Nothing but the job's own key, which other runs and attempts do not have.
    let keys = keys.lock().unwrap();
    let names: Vec<&str> = keys.keys().map(String::as_str).collect();
    assert_eq!(names, ["burn-ddp/some run/1/port"]);
}

#[test]
fn ranks_of_several_machines_meet_where_the_masters_name_is_a_loopback_name() {
    let Some(outer) = outer_address() else {
        eprintln!("skipped: this machine has no address but loopback");
        return;
    };
    let port = free_port();
    let hosts = [
        OWN_NAME.to_string(),
        OWN_NAME.to_string(),
        outer.to_string(),
    ];
    thread::scope(|scope| {
        for (rank, host) in hosts.iter().enumerate() {
            scope.spawn(move || {
                let builder = ProcessGroup::builder().timeout(Duration::from_secs(30));
                let url = format!("tcp://{host}:{port}");
                let group = builder.connect(&url, rank, 3).unwrap();
                assert_eq!(group.all_gather(&[rank as u64]).unwrap(), [0, 1, 2]);
            });
        }
    });
}

#[test]
fn one_rank_needs_no_address_in_the_environment() {
    let group = ProcessGroup::connect("env://", 0, 1).unwrap();
    assert_eq!((group.rank(), group.world_size()), (0, 1));
    group.barrier().unwrap();
}

#[test]
fn a_program_without_a_launcher_is_a_rank_by_itself() {
    // Of two ranks, by their environment, and of one.
    let port = free_port().to_string();
    let ranks: Vec<Rank> = ["0", "1"]
        .map(|rank| {
            let mut command = player("init or single");
            command
                .envs([
                    ("RANK", rank),
                    ("WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "127.0.0.1"),
                ])
                .envs([("MASTER_PORT", port.as_str()), ("BURN_DDP_TIMEOUT", "20")]);
            Rank(command.spawn().unwrap())
        })
        .into();
    for (rank, process) in ranks.into_iter().enumerate() {
        let printed = process.succeed(60);
        assert!(printed.contains(&format!("RANK {rank} OF 2")), "{printed}");
    }
    let printed = Rank(player("init or single").spawn().unwrap()).succeed(60);
    assert!(printed.contains("RANK 0 OF 1"), "{printed}");
}

#[test]
fn a_local_rank_is_the_rank_unless_another_is_named() {
    let url = "tcp://127.0.0.1:1"; // nobody to meet
    let group = ProcessGroup::builder().local_rank(3).connect(url, 0, 1);
    let group = group.unwrap();
    assert_eq!(group.local_rank(), 3);
    assert_eq!(group.duplicate().unwrap().local_rank(), 3);
    if std::env::var_os("LOCAL_RANK").is_none() {
        assert_eq!(ProcessGroup::connect(url, 0, 1).unwrap().local_rank(), 0);
    }
}

/// Kubeflow's PyTorchJob gives rank 0 `localhost`, and the others, on other machines, its name. All of 127.0.0.0/8 is
/// this machine on Linux.
#[cfg(target_os = "linux")]
#[test]
fn rank_0_is_found_where_it_is_told_localhost_and_the_others_another_address() {
    let port = free_port().to_string();
    let ranks = ["localhost", "127.0.0.2"].into_iter().enumerate();
    let ranks: Vec<Rank> = ranks
        .map(|(rank, master)| {
            let mut command = player("sum");
            command
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", "2")
                .env_remove("LOCAL_WORLD_SIZE")
                .env("MASTER_ADDR", master)
                .env("MASTER_PORT", &port)
                .env("BURN_DDP_TIMEOUT", "20");
            Rank(command.spawn().unwrap())
        })
        .collect();
    for rank in ranks {
        let output = rank.succeed(60);
        assert!(output.contains("RESULT ok 2 2"), "{output}");
    }
}

/// A task as srun starts it.
fn task(job: &str, step: &str, rank: usize, tasks: usize, port: u16) -> Rank {
    let mut command = player("sum");
    command
        .env("SLURM_JOB_ID", job)
        .env("SLURM_STEP_ID", step)
        .env("SLURM_PROCID", rank.to_string())
        .env("SLURM_LOCALID", rank.to_string())
        .env("SLURM_NTASKS", tasks.to_string())
        .env("SLURM_STEP_NUM_TASKS", tasks.to_string())
        .env("SLURM_STEP_NUM_NODES", "1")
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("BURN_DDP_TIMEOUT", "30");
    Rank(command.spawn().unwrap())
}

#[test]
fn steps_of_one_job_that_meet_at_one_port_do_not_mix() {
    let port = free_port();
    let first = task("7", "0", 0, 2, port);
    let stranger = task("7", "1", 1, 2, port);
    let output = stranger.fail(60);
    assert!(output.contains("rank 1 was refused"), "{output}");
    assert!(output.contains("another job"), "{output}");
    for rank in [task("7", "0", 1, 2, port), first] {
        let output = rank.succeed(60);
        assert!(output.contains("RESULT ok 2 2"), "{output}");
    }
}

#[test]
fn one_task_of_srun_is_a_group_of_one() {
    let output = task("7", "0", 0, 1, 1).succeed(60);
    assert!(output.contains("RESULT ok 0.5 0.5"), "{output}");
}

/// Whether a program is on the PATH.
pub(crate) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Has a launcher start two ranks, which add up a half and one and a half.
fn launched_by(launcher: &str, arguments: &[&str]) {
    let inside_slurm = std::env::var_os("SLURM_JOB_ID").is_some();
    if !is_installed(launcher) || launcher == "srun" && !inside_slurm {
        eprintln!("skipped: no {launcher} here");
        return;
    }
    let mut command = Command::new(launcher);
    command
        .args(arguments)
        .arg(std::env::current_exe().unwrap())
        .args(PLAY)
        .env(SCENARIO, "sum")
        .env("BURN_DDP_TIMEOUT", "60")
        // Open MPI's own doubts about containers and small machines.
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let (success, output) = Rank(command.spawn().unwrap()).finish(Duration::from_secs(120));
    let results = output.matches("RESULT ok 2 2").count();
    assert!(success && results == 2, "{launcher}: {output}");
}

#[test]
fn ranks_that_real_launchers_start() {
    let torchrun = ["--no-python", "--standalone", "--nproc-per-node=2"];
    launched_by("torchrun", &torchrun);
    launched_by("mpirun", &["-n", "2"]);
    launched_by("srun", &["-n", "2"]);
}
