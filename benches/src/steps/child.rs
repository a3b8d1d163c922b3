//! The process that measures.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use super::{Event, Job};
use crate::{Memory, NoTraining, Precision, Training, peak_memory};

/// Warm-up steps, in which kernels are compiled and tuned.
const WARM_UP: usize = 5;
/// Steps of a way by itself: first steps that are timed, then steps whose memory is watched.
const ALONE: usize = 3;
const WATCHED: usize = 8;
/// Timed steps of a way in one round, after one step in which it allocates its memory again.
const IN_TURN: u32 = 2;
/// The fraction of the job's seconds after which no other way begins by itself, so that there is time for rounds.
const BY_ITSELF: f64 = 0.6;

/// Does a job: runs the training that `init` returns for each way, on a device with this memory, and passes what is found to
/// `tell`. First each way runs by itself, then all ways in turn. If the first takes too long, the rounds begin as soon as there are
/// two ways, and the ways that are not ready are [left out](Event::LeftOut).
///
/// Free memory is released before each turn, because all ways together may hold more than the device has.
///
/// # Errors
/// The error of `tell`, which ends the job. A way that [does not train](Event::Failed) ends the job too, without an error.
pub fn measure(
    job: &Job,
    memory: &impl Memory,
    mut init: impl FnMut(Precision) -> Training,
    mut tell: impl FnMut(Event) -> io::Result<()>,
) -> io::Result<()> {
    let start = Instant::now();
    let mut ready = job.in_turn.clone();
    for (number, &way) in job.alone.iter().enumerate() {
        if ready.len() > 1 && start.elapsed().as_secs_f64() > BY_ITSELF * job.seconds {
            tell(Event::LeftOut(job.alone[number..].to_vec()))?;
            break;
        }
        tell(Event::Begins(way))?;
        memory.release();
        let before = memory.in_use();
        match alone(way, init(way), memory, before) {
            Ok(found) => tell(found)?,
            Err(why) => return tell(failed(way, why)),
        }
        ready.push(way);
        // Layered devices release dropped tensors a little later.
        thread::sleep(Duration::from_millis(200));
    }

    let mut trainings = Vec::new();
    for way in ready {
        tell(Event::Begins(way))?;
        memory.release();
        let mut training = init(way);
        (0..WARM_UP).for_each(|_| training.step());
        if let Err(why) = training.check() {
            return tell(failed(way, why));
        }
        trainings.push((way, training));
    }
    let mut rounds = 0;
    while rounds < job.rounds && (rounds == 0 || start.elapsed().as_secs_f64() < job.seconds) {
        let mut round = Vec::new();
        // Each round begins with another way.
        for turn in 0..trainings.len() {
            let next = (turn + rounds) % trainings.len();
            let (way, training) = &mut trainings[next];
            tell(Event::Begins(*way))?;
            memory.release();
            training.step();
            let start = Instant::now();
            (0..IN_TURN).for_each(|_| training.step());
            round.push((*way, (start.elapsed() / IN_TURN).as_secs_f64()));
            if let Err(why) = training.check() {
                return tell(failed(*way, why));
            }
        }
        tell(Event::Round(round))?;
        rounds += 1;
    }
    Ok(())
}

fn alone(
    way: Precision,
    mut training: Training,
    memory: &impl Memory,
    before: u64,
) -> Result<Event, NoTraining> {
    (0..WARM_UP).for_each(|_| training.step());
    training.check()?;
    let seconds = (0..ALONE).map(|_| {
        let start = Instant::now();
        training.step();
        start.elapsed()
    });
    let seconds = seconds.map(|time: Duration| time.as_secs_f64()).collect();
    let peak = peak_memory(memory, WATCHED, || training.step());
    training.check()?;
    Ok(Event::Alone {
        way,
        seconds,
        bytes: peak.bytes.saturating_sub(before),
        polls: peak.polls,
    })
}

fn failed(way: Precision, why: NoTraining) -> Event {
    Event::Failed {
        way,
        why: why.to_string(),
    }
}
