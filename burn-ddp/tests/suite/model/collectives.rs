//! Random calls over random communicators, synchronous or not: each rank gets what the call says.

use std::{thread, time::Duration};

use burn_ddp::{DdpError, ProcessGroup};
use proptest::prelude::*;

use super::{
    call::{Bytes, Waiting, check, is_alike, make},
    config,
    program::{NEVER, Planned, Program, Step, What, programs},
    values::typed,
    watched,
};
use crate::suite::ranks::{locally, over_tcp};

/// What became of each step on a rank. `None` if it has no part in the step, or did not wait for it.
pub(crate) type Ends = Vec<Option<Result<Bytes, DdpError>>>;

/// What a rank does in a step.
pub(crate) enum Act {
    /// What all do, or something else.
    Make(Box<Step>),
    Nothing,
    Leave,
}

/// Runs a rank of each number.
pub(crate) fn ranks<R: Send>(program: &Program, body: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let body = |group: ProcessGroup| {
        // A call that hangs should be named before the watch ends the case.
        let limited = group.with_timeout(Duration::from_secs(60));
        drop(group);
        body(limited)
    };
    match program.sockets {
        0 => locally(program.ranks, body),
        sockets => over_tcp(program.ranks, sockets, body),
    }
}

/// Goes through the steps of one rank.
pub(crate) fn play(
    group: ProcessGroup,
    plan: &[Planned],
    act: impl Fn(usize, &Step, &ProcessGroup) -> Act,
) -> Ends {
    let rank = group.rank();
    let mut groups = vec![Some(group)];
    let mut ends: Ends = plan.iter().map(|_| None).collect();
    let mut waiting: Vec<(usize, usize, Waiting)> = Vec::new();
    for (number, planned) in plan.iter().enumerate() {
        if let Some((new, _)) = planned.made {
            groups.resize(new + 1, None);
        }
        // After a fault, some were never made.
        let group = groups[planned.on].clone();
        if let Some(group) = group.filter(|_| planned.place(rank).is_some()) {
            thread::sleep(Duration::from_millis(planned.step.pauses[rank]));
            let step = match act(number, &planned.step, &group) {
                Act::Make(step) => step,
                Act::Nothing => continue,
                Act::Leave => return ends,
            };
            let new = match step.what {
                What::Duplicate => Some(group.duplicate().map(Some)),
                What::Subgroup => Some(group.subgroup(&step.list(group.world_size()))),
                _ => None,
            };
            match new {
                Some(new) => {
                    let new = new.map(|new| {
                        if let Some((at, _)) = planned.made {
                            groups[at] = new;
                        }
                        Vec::new()
                    });
                    ends[number] = Some(new);
                }
                None if step.what == What::Drop => groups[planned.on] = None,
                None => {
                    let due = step.waits[rank];
                    let end = typed!(step.dtype, T => make::<T>(&group, &step, due.is_some()));
                    waiting.push((number + due.unwrap_or(0), number, end));
                }
            }
        }
        let (due, later) = waiting.into_iter().partition(|it| it.0 <= number);
        waiting = later;
        for (_, made, wait) in due {
            ends[made] = Some(wait());
        }
    }
    // The last first, and some never.
    for (due, made, wait) in waiting.into_iter().rev() {
        if due - made < NEVER {
            ends[made] = Some(wait());
        }
    }
    ends
}

/// Checks what the members of a communicator got in a step, by rank.
pub(crate) fn check_step(planned: &Planned, ends: &[Ends], number: usize) {
    let Planned { step, members, .. } = planned;
    let mut alike = None;
    for (place, member) in members.iter().enumerate() {
        let Some(Ok(found)) = &ends[*member][number] else {
            continue;
        };
        typed!(step.dtype, T => check::<T>(step, place, members.len(), found));
        if is_alike(step) {
            assert!(
                *alike.get_or_insert(found) == found,
                "{step:?}: the ranks' bits differ"
            );
        }
    }
}

fn run(program: &Program) {
    let plan = program.plan();
    let ends = ranks(program, |group| {
        play(group, &plan, |_, step, _| Act::Make(step.clone().into()))
    });
    for (number, planned) in plan.iter().enumerate() {
        for end in ends.iter().filter_map(|ends| ends[number].as_ref()) {
            assert!(end.is_ok(), "step {number}, {:?}: {end:?}", planned.step);
        }
        check_step(planned, &ends, number);
    }
}

proptest! {
    #![proptest_config(config(60))]
    #[test]
    fn calls_do_what_they_say(program in programs(1..6)) {
        watched(&program, run);
    }
}
