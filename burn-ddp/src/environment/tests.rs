//! Tests with made-up variables of each launcher.

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

const SRUN: [(&str, &str); 7] = [
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NTASKS_PER_NODE", "4"),
    ("SLURM_JOB_NODELIST", "node[07-08,11]"),
    ("SLURM_JOB_ID", "123456"),
    ("SLURM_STEP_ID", "0"),
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
        local: false,
    };
    assert_eq!(env.place().unwrap(), expected);
}

#[test]
fn addresses_of_version_6_may_be_in_brackets() {
    for host in ["::1", "[::1]"] {
        let master = [("MASTER_ADDR", host), ("MASTER_PORT", "1234")];
        let expected = Place::Address {
            host: "::1".into(),
            port: 1234,
            local: false,
        };
        assert_eq!(with(&master).place().unwrap(), expected);
    }
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
        local: false,
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
        local: false,
    };
    assert_eq!(env.place().unwrap(), expected);
}

#[test]
fn a_slurm_job_of_one_task_is_not_distributed_and_a_group_of_one() {
    let mut variables = SRUN;
    variables[0].1 = "0";
    variables[1].1 = "1";
    variables[2].1 = "0";
    let alone = Ranks {
        rank: 0,
        world_size: 1,
        local_rank: 0,
    };
    let pmi = [("PMI_RANK", "0"), ("PMI_SIZE", "1")];
    for more in [&[][..], &pmi] {
        let variables = [&variables[..], more].concat();
        assert!(!with(&variables).is_distributed());
        assert_eq!(with(&variables).ranks().unwrap(), alone);
    }
    // Without a step, this is a batch script, which no launcher has started.
    assert!(with(&variables[..6]).ranks().is_err());
}

/// The variables in the shell of an interactive step (`salloc -n 4` with `LaunchParameters=use_interactive_step`), and
/// those of a task that srun starts from there.
#[test]
fn the_shell_of_salloc_is_no_task() {
    let shell = [
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_NUM_TASKS", "1"),
        ("SLURM_STEP_ID", "4294967290"),
        ("SLURM_JOB_NODELIST", "node07"),
    ];
    assert!(!with(&shell).is_distributed());
    assert!(with(&shell).ranks().is_err());
    // Without the step's number of tasks, the number of the step suffices.
    let mut older = shell;
    older[4].0 = "OTHER";
    assert!(!with(&older).is_distributed());
    // MPICH's mpiexec can start ranks from this shell.
    let mpiexec = [&shell[..], &[("PMI_RANK", "1"), ("PMI_SIZE", "2")]].concat();
    assert!(with(&mpiexec).is_distributed());
    // In a task of `srun -n 2`, SLURM_NTASKS may still be the job's number of tasks.
    let mut task = shell;
    task[0].1 = "1";
    task[4].1 = "2";
    task[5].1 = "3";
    let ranks = with(&task).ranks().unwrap();
    assert_eq!((ranks.rank, ranks.world_size), (1, 2));
}

#[test]
fn steps_of_a_slurm_job_do_not_meet() {
    let step = |step: &'static str| {
        let mut variables = SRUN;
        variables[6].1 = step;
        let env = with(&variables);
        let Place::Address { port, .. } = env.place().unwrap() else {
            panic!("Slurm has no store");
        };
        (port, env.secret_of_job())
    };
    let steps: Vec<_> = ["0", "1", "2", "15000"].map(step).into();
    assert_eq!(steps[0], step("0"));
    for (at, (port, secret)) in steps.iter().enumerate() {
        assert!((15_000..30_000).contains(port));
        for (other_port, other_secret) in &steps[..at] {
            assert_ne!(secret, other_secret);
            // Steps 0 and 15000 share a port, because there are 15,000 ports.
            assert!(port != other_port || at == 3);
        }
    }
    // The port of the next job's first step is not that of this job's second step.
    let mut next = SRUN;
    next[5].1 = "123457";
    let Place::Address { port, .. } = with(&next).place().unwrap() else {
        panic!("Slurm has no store");
    };
    assert!(steps.iter().all(|(other, _)| *other != port));
}

#[test]
fn a_jobs_own_name_stands_in_for_a_secret() {
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("PMIX_NAMESPACE", "prterun-node07-17@1"),
        ("MASTER_ADDR", "node07"),
    ];
    let name = with(&open_mpi).secret_of_job();
    assert!(name.contains("prterun-node07-17@1"), "{name}");
    let secret = [&open_mpi[..], &[(SECRET, "s")]].concat();
    assert_eq!(with(&secret).secret_of_job(), "s");
    // Under mpirun, only some ranks are in a Slurm step, so that the step does not count.
    let mut both = [&open_mpi[..], &SRUN].concat();
    both[10].1 = "4";
    assert_eq!(with(&both).secret_of_job(), name);
    assert_eq!(both[10].0, "SLURM_STEP_ID");
    let without_step = with(&both[..10]).place().unwrap();
    assert_eq!(without_step, with(&both).place().unwrap());
    // With one `srun` for each machine's torchrun, the ranks of one job are in different steps.
    let torchrun = [("RANK", "1"), ("WORLD_SIZE", "2")];
    let torchrun = [&torchrun[..], &SRUN].concat();
    assert_eq!(with(&torchrun).secret_of_job(), "");
    assert_eq!(with(&[]).secret_of_job(), "");
}

/// In Kubeflow's PyTorchJob, MASTER_ADDR is `localhost` in the pod of rank 0, and the name of that pod in the others.
#[test]
fn a_loopback_address_is_one_machine_where_the_launcher_says_so() {
    let master = [
        ("RANK", "0"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1234"),
    ];
    let url = [(RENDEZVOUS, "tcp://127.0.0.1:1234")];
    let store = [("TORCHELASTIC_USE_AGENT_STORE", "True")];
    for more in [&[][..], &url, &store] {
        for (ranks_here, expected) in [(None, false), (Some("2"), false), (Some("4"), true)] {
            let mut variables = [&master[..], more].concat();
            variables.extend(ranks_here.map(|ranks| ("LOCAL_WORLD_SIZE", ranks)));
            let place = with(&variables).place().unwrap();
            let (Place::Address { local, .. } | Place::TorchStore { local, .. }) = place else {
                panic!("{place:?}");
            };
            assert_eq!(local, expected, "{variables:?}");
        }
    }
    // Slurm's number of tasks per node is the largest that any node has.
    let slurm = |machines| {
        let mut variables = [&SRUN[..], &[("MASTER_ADDR", "localhost")]].concat();
        variables[3].1 = "8";
        variables.push(("SLURM_STEP_NUM_NODES", machines));
        let place = with(&variables).place().unwrap();
        matches!(place, Place::Address { local: true, .. })
    };
    assert!(slurm("1") && !slurm("2"));
}

#[test]
fn a_batch_script_is_no_task_of_srun() {
    // The variables of `sbatch --ntasks 8`: all of srun's but the step.
    let mut variables = SRUN;
    variables[0].1 = "0";
    assert!(with(&variables).is_distributed());
    let (step, script) = variables.split_last().unwrap();
    assert_eq!(step.0, "SLURM_STEP_ID");
    assert!(!with(script).is_distributed());
    assert!(with(script).ranks().is_err());
}

#[test]
fn a_local_rank_is_read_where_it_is_set() {
    assert_eq!(with(&[]).local_rank().unwrap(), None);
    assert_eq!(with(&[("LOCAL_RANK", "3")]).local_rank().unwrap(), Some(3));
    assert!(with(&[("LOCAL_RANK", "x")]).local_rank().is_err());
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
            local: true,
        };
        assert_eq!(with(&variables).place().unwrap(), expected);
        assert_eq!(with(&variables).ranks().unwrap().local_rank, 1);
        variables[3] = (local_size, "2");
        let error = with(&variables).place().unwrap_err().to_string();
        assert!(error.contains("MASTER_ADDR"), "{error}");
    }
}

/// The variables that srun with `--mpi=pmi2` (Slurm's `p_mpi_hook_slurmstepd_task`) and Flux (flux-environment(7)) set.
const PMI_OF_OTHERS: [(&str, &str); 2] = [("PMI_RANK", "5"), ("PMI_SIZE", "8")];

#[test]
fn srun_that_speaks_pmi_tells_more_in_its_own_names() {
    let mut variables = SRUN.to_vec();
    variables.extend(PMI_OF_OTHERS);
    assert_eq!(
        with(&variables).ranks().unwrap(),
        with(&SRUN).ranks().unwrap()
    );
    assert_eq!(
        with(&variables).place().unwrap(),
        with(&SRUN).place().unwrap()
    );
    // Ranks that Hydra starts inherit the variables of the step that starts Hydra on each machine.
    variables.extend([("MPI_LOCALRANKID", "2"), ("MPI_LOCALNRANKS", "4")]);
    assert_eq!(with(&variables).ranks().unwrap().local_rank, 2);
}

#[test]
fn flux() {
    let on = |machines| {
        let flux = [
            ("FLUX_TASK_RANK", "5"),
            ("FLUX_JOB_SIZE", "8"),
            ("FLUX_TASK_LOCAL_ID", "1"),
            ("FLUX_JOB_NNODES", machines),
        ];
        [&flux[..], &PMI_OF_OTHERS].concat()
    };
    let expected = Ranks {
        rank: 5,
        world_size: 8,
        local_rank: 1,
    };
    assert_eq!(with(&on("2")).ranks().unwrap(), expected);
    let error = with(&on("2")).place().unwrap_err().to_string();
    assert!(error.contains("MASTER_ADDR"), "{error}");
    let expected = Place::Address {
        host: "127.0.0.1".into(),
        port: DEFAULT_PORT,
        local: true,
    };
    assert_eq!(with(&on("1")).place().unwrap(), expected);
    // `mpirun` inside a Flux job.
    let mut variables = on("1");
    variables[4].1 = "3";
    variables.extend([("MPI_LOCALRANKID", "3"), ("MPI_LOCALNRANKS", "8")]);
    let ranks = with(&variables).ranks().unwrap();
    assert_eq!((ranks.rank, ranks.local_rank), (3, 3));
}

#[test]
fn one_machine_is_not_inferred_from_what_is_missing() {
    let mut variables = PMI_OF_OTHERS.to_vec();
    let error = with(&variables).ranks().unwrap_err().to_string();
    assert!(
        error.contains("LOCAL_RANK") && error.contains("PMI"),
        "{error}"
    );
    let error = with(&variables).place().unwrap_err().to_string();
    assert!(error.contains("MASTER_ADDR"), "{error}");
    // Do what the errors say.
    variables.extend([("LOCAL_RANK", "1"), ("MASTER_ADDR", "node07")]);
    assert_eq!(with(&variables).ranks().unwrap().local_rank, 1);
    assert!(with(&variables).place().is_ok());
    // A single rank is always on one machine.
    let alone = [("PMI_RANK", "0"), ("PMI_SIZE", "1")];
    assert_eq!(with(&alone).ranks().unwrap().local_rank, 0);
    // Variables set by hand: either all ranks are on one machine, or nothing uses the local rank as a GPU's number.
    let by_hand = [("RANK", "5"), ("WORLD_SIZE", "8")];
    assert_eq!(with(&by_hand).ranks().unwrap().local_rank, 5);
    let several = [&by_hand[..], &[("LOCAL_WORLD_SIZE", "4")]].concat();
    assert!(with(&several).ranks().is_err());
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
fn the_backend_is_read_by_name() {
    assert_eq!(with(&[]).backend().unwrap(), None);
    let backend = with(&[(BACKEND, "nccl")]).backend();
    assert_eq!(backend.unwrap(), Some(Backend::Nccl));
    let error = with(&[(BACKEND, "gloo")]).backend().unwrap_err();
    let text = error.to_string();
    assert!(text.contains(BACKEND) && text.contains("`gloo`"), "{text}");
}
