//! What ranks in processes of their own do.

use std::{sync::OnceLock, thread, time::Duration};

use burn::tensor::Device;
use burn_ddp::{Checkpoints, DdpConfig, DdpError, LocalGroup, ProcessGroup};
use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    signal::Signal,
};

use super::ranks::{FOLDER, SCENARIO};

/// Not a test by itself: what a process runs that [`start`](super::ranks::start) starts. Without a scenario, it checks
/// that an unknown one is refused.
#[test]
fn play() {
    let Ok(scenario) = std::env::var(SCENARIO) else {
        assert!(scenario_named("none").is_none());
        return;
    };
    if crate::suite::launch::played(&scenario) {
        return;
    }
    if scenario == "environment" {
        let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
        let group = ProcessGroup::connect("env://", rank, 2).unwrap();
        let sum = group
            .all_gather(&[rank as u64])
            .unwrap()
            .iter()
            .sum::<u64>();
        let local = LocalGroup::new(1)[0].timeout();
        println!("RESULT ok {:?} {local:?} {sum}", group.timeout());
        return;
    }
    limit_descriptors(&scenario);
    if scenario != crate::suite::learner::WITHOUT_LOGGER {
        log::set_logger(&Printer).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
    }
    let init = match scenario.as_str() {
        // Of which nothing is left once it is a member.
        "loop, begun on a thread" => || thread::spawn(ProcessGroup::init).join().unwrap(),
        _ => ProcessGroup::init,
    };
    let result = init().and_then(|group| {
        if let Some(body) = crate::suite::overlapped::scenario_named(&scenario) {
            return body(&group).map(|()| String::new());
        }
        let body = scenario_named(&scenario).expect("a known scenario");
        body(group)
    });
    match result {
        Ok(text) => println!("RESULT ok {text}"),
        Err(error) => {
            println!("RESULT error {error}");
            std::process::exit(1);
        }
    }
}

/// Leaves no room for many connections, where the scenario is about that.
fn limit_descriptors(scenario: &str) {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let few = 40;
    // Not every launcher sets it.
    let rank = std::env::var("RANK").unwrap_or_default();
    if scenario == format!("few descriptors {rank}") {
        setrlimit(Resource::RLIMIT_NOFILE, few, few).unwrap();
    } else if scenario == "a low limit of descriptors" {
        setrlimit(Resource::RLIMIT_NOFILE, few, hard).unwrap();
    }
}

/// What a rank logs goes where its results go.
struct Printer;

impl log::Log for Printer {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target().starts_with("burn_ddp")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            println!("LOG {} {}", record.level(), record.args());
        }
    }

    fn flush(&self) {}
}

type Scenario = fn(ProcessGroup) -> Result<String, DdpError>;

fn scenario_named(name: &str) -> Option<Scenario> {
    let body: Scenario = match name {
        "sum" => |group| {
            let mut data = vec![group.rank() as f32 + 0.5; 100_003];
            group.all_reduce(&mut data, burn_ddp::ReduceOp::Sum)?;
            group.barrier()?;
            Ok(format!("{} {}", data[0], data[100_002]))
        },
        // All-reduces for ever, with a word after the first, so that it can be shot.
        "loop" | "loop, begun on a thread" => |group| {
            println!("PID {}", std::process::id());
            let mut data = vec![1f32; 1 << 20];
            loop {
                group.all_reduce(&mut data, burn_ddp::ReduceOp::Mean)?;
                println!("STEP");
            }
        },
        // The same by a handle whose calls may take an hour.
        "patient" => |group| {
            let group = group.with_timeout(Duration::from_secs(3600));
            loop {
                group.all_reduce(&mut [1f32; 100], burn_ddp::ReduceOp::Mean)?;
                println!("STEP");
            }
        },
        "few descriptors 0" | "few descriptors 1" | "a low limit of descriptors" => |group| {
            let mut communicators = vec![group];
            while communicators.len() < 60 {
                communicators.push(communicators[0].duplicate()?);
            }
            let mut sum = [1f32];
            communicators[59].all_reduce(&mut sum, burn_ddp::ReduceOp::Sum)?;
            Ok(sum[0].to_string())
        },
        // Several calls at a time, whose handles all tell the same.
        "pending" => |group| loop {
            let start = |_| group.all_reduce_async(vec![1f32; 1 << 18], burn_ddp::ReduceOp::Mean);
            let pending: Vec<_> = (0..6).map(start).collect();
            let ends: Vec<_> = pending.into_iter().map(burn_ddp::Pending::wait).collect();
            let faults: Vec<String> = ends
                .iter()
                .filter_map(|end| Some(end.as_ref().err()?.to_string()))
                .collect();
            assert!(faults.iter().all(|fault| *fault == faults[0]), "{faults:?}");
            assert!(
                ends.iter()
                    .skip_while(|end| end.is_ok())
                    .all(Result::is_err)
            );
            ends.into_iter().collect::<Result<Vec<_>, _>>()?;
            println!("STEP");
        },
        // Communicators for ever.
        "duplicate" => |group| loop {
            group.duplicate()?.barrier()?;
            println!("STEP");
        },
        "leave" => |group| {
            if group.rank() == 1 {
                return Ok("left".into());
            }
            group.barrier()?;
            group.barrier()?;
            Ok("stayed".into())
        },
        // What is in a `static` is never dropped.
        "static" => |group| {
            if group.rank() == 1 {
                static GROUP: OnceLock<ProcessGroup> = OnceLock::new();
                GROUP.get_or_init(|| group.clone());
                std::process::exit(0);
            }
            group.barrier()?;
            Ok("stayed".into())
        },
        // Counts to 6 with a checkpoint at each step. Rank 1 is killed at step 3 of the first attempt and
        // fails at step 5 of the second.
        "count" => |group| {
            let folder = std::env::var(FOLDER).unwrap();
            let attempt: usize = std::env::var("RESTART_COUNT").unwrap().parse().unwrap();
            let checkpoints = Checkpoints::new(&folder, &group)?;
            let start = checkpoints
                .latest()?
                .map_or(0, |checkpoint| checkpoint.step);
            if group.is_main() {
                let note = format!("{folder}/attempt-{attempt}-from-{start}");
                std::fs::write(note, "").unwrap();
            }
            for step in start + 1..=6 {
                match (group.rank(), attempt, step) {
                    (1, 0, 3) => {
                        let own = nix::unistd::Pid::this();
                        nix::sys::signal::kill(own, Signal::SIGKILL).unwrap();
                    }
                    (1, 1, 5) => std::process::exit(9),
                    _ => group.barrier()?,
                }
                checkpoints.save(step, None, |_| Ok(()))?;
            }
            Ok(String::new())
        },
        "exit 7" => |group| {
            if group.rank() == 1 {
                std::process::exit(7);
            }
            thread::sleep(Duration::from_secs(300));
            Ok("slept".into())
        },
        "die" => |group| {
            if group.rank() == 2 {
                let own = nix::unistd::Pid::this();
                nix::sys::signal::kill(own, Signal::SIGKILL).unwrap();
            }
            group.barrier()?;
            Ok("stayed".into())
        },
        "averaged after backward" => |group| {
            let config = DdpConfig::new().bucket_bytes(600).first_bucket_bytes(100);
            let (_, run) = crate::suite::net::train(&group, config, 12);
            Ok(serde_json::to_string(&run).unwrap())
        },
        "overlapped" => |group| {
            let config = DdpConfig::new().bucket_bytes(100).first_bucket_bytes(100);
            let (run, timeline) =
                crate::suite::net::train_overlapped(&group, config, 12, Device::flex())?;
            assert!(timeline.buckets.len() > 2, "{timeline:?}");
            // Nothing waits for the end of backward but the last bucket.
            let launched = timeline.buckets.iter().rev().skip(1).map(|it| it.launched);
            assert!(launched.max() < Some(timeline.backward_end), "{timeline:?}");
            assert!(
                timeline
                    .buckets
                    .iter()
                    .all(|it| it.finished >= Some(it.launched))
            );
            Ok(serde_json::to_string(&(run, timeline.hidden())).unwrap())
        },
        "stopped in a checkpoint" => {
            |group| crate::suite::stopped::while_it_writes(&group).map(|()| String::new())
        }
        "whole run" => |group| crate::suite::whole_run::play(&group, 0, false),
        "whole run overlapped" => |group| crate::suite::whole_run::play(&group, 0, true),
        "whole run on a small disk" => {
            |group| crate::suite::whole_run::play(&group, 8 << 10, false)
        }
        "learner overlapped" => |group| crate::suite::learner::train_overlapped(&group),
        crate::suite::learner::WITHOUT_LOGGER => {
            |group| crate::suite::learner::train_without_logger(&group)
        }
        "epochs for ever" => |group| crate::suite::learner::epochs_for_ever(&group),
        "learner with dropout" => |group| crate::suite::learner::resume_with_dropout(&group),
        "learner saved late" => |group| crate::suite::learner::save_late(&group),
        "learner for ever" => |group| crate::suite::learner::train_for_ever(&group),
        #[cfg(feature = "cuda")]
        "nccl" => crate::suite::nccl::two_ranks,
        #[cfg(feature = "cuda")]
        "nccl for ever" => crate::suite::nccl::for_ever,
        #[cfg(feature = "cuda")]
        "nccl threads" => crate::suite::nccl::threads,
        // For ever. Rank 1 ends first, and rank 0 must not hear of a death.
        "amaxes kept" => |group| {
            std::mem::forget(group.amax_reducer()?);
            group.barrier()?;
            if group.rank() == 0 {
                thread::sleep(Duration::from_secs(1));
            }
            group.fault().map_or(Ok(String::new()), Err)
        },
        // Rank 1 is late, but comes.
        "late" => |group| {
            if group.rank() == 1 {
                thread::sleep(Duration::from_secs(5));
            }
            group.barrier()?;
            group.barrier()?;
            Ok(String::new())
        },
        "panic" => |group| {
            if group.rank() == 1 {
                panic!("on purpose");
            }
            group.barrier()?;
            Ok("stayed".into())
        },
        _ => return None,
    };
    Some(body)
}
