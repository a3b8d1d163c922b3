//! The process that measures.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use super::{Event, Job};
use crate::{Memory, NoTraining, Precision, Training, peak_memory};

/// Steps before anything is measured, in which kernels are compiled and tuned.
const WARM_UP: usize = 5;
/// Steps of a way by itself: timed, then watched for their memory.
const ALONE: usize = 3;
const WATCHED: usize = 8;
/// Steps of a way in one round, after one in which it gets its memory back.
const IN_TURN: u32 = 2;

/// Does a job: trains by what `init` makes for each way, on a device with this memory, and hands what is found to `tell`.
/// First each way by itself, then all of them in turn.
///
/// Memory that is free is given back before each turn, for what six ways hold together may be more than there is.
///
/// # Errors
/// What `tell` fails with, which ends the job, as does a way that [trains nothing](Event::Failed).
pub fn measure(
    job: &Job,
    memory: &impl Memory,
    mut init: impl FnMut(Precision) -> Training,
    mut tell: impl FnMut(Event) -> io::Result<()>,
) -> io::Result<()> {
    let start = Instant::now();
    for &way in &job.alone {
        tell(Event::Begins(way))?;
        memory.release();
        let before = memory.in_use();
        match alone(way, init(way), memory, before) {
            Ok(found) => tell(found)?,
            Err(why) => return tell(failed(way, why)),
        }
        // Layered devices hear a little later of what was dropped.
        thread::sleep(Duration::from_millis(200));
    }

    let ways = job.in_turn.iter().chain(&job.alone);
    let mut trainings = Vec::new();
    for &way in ways {
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
        // Another one goes first each time: none always comes after the same.
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
