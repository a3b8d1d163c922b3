//! Random programs in which one rank does something else: the others end in time, are told which rank it was, and get no wrong
//! result.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Mutex,
};

use burn::tensor::{DType, Device, Tensor};
use burn_ddp::{DdpError, ProcessGroup, ReduceOp, TensorOp};
use proptest::prelude::*;

use super::{
    call::other,
    collectives::{Act, Ends, check_step, play, ranks},
    config,
    program::{MOST, NEVER, Planned, Program, Size, Step, TYPES, What, programs, step},
    watched,
};

/// What goes wrong on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    /// It makes another call.
    OtherCall,
    /// The same over more elements.
    More,
    Type,
    Op,
    Root,
    /// A slice instead of a tensor, or the other way round.
    Form,
    /// As many elements in another shape.
    Shape,
    /// A call with arguments that cannot work.
    Argument(usize),
    Panic,
    Leave,
    Abort,
}

fn wrongs() -> impl Strategy<Value = Wrong> {
    prop_oneof![
        Just(Wrong::OtherCall),
        Just(Wrong::More),
        Just(Wrong::Type),
        Just(Wrong::Op),
        Just(Wrong::Root),
        Just(Wrong::Form),
        Just(Wrong::Shape),
        (0usize..9).prop_map(Wrong::Argument),
        Just(Wrong::Panic),
        Just(Wrong::Leave),
        Just(Wrong::Abort),
    ]
}

/// A program of at least two ranks, one of which goes wrong at a step.
#[derive(Clone, Debug)]
struct Case {
    program: Program,
    rank: usize,
    at: usize,
    wrong: Wrong,
}

fn cases() -> impl Strategy<Value = Case> {
    let last = step();
    (programs(2..6), 0usize..5, 0usize..25, wrongs(), last).prop_map(
        |(mut program, rank, at, wrong, last)| {
            // No communicator ends before the fault is found out.
            for step in &mut program.steps {
                if step.what == What::Drop {
                    step.what = What::Barrier;
                }
            }
            program.steps.extend((0..=MOST).map(|back| Step {
                on: MOST - back,
                what: What::Barrier,
                waits: vec![None; 5],
                ..last.clone()
            }));
            Case {
                rank: rank % program.ranks,
                program,
                at,
                wrong,
            }
        },
    )
}

/// The step with something else in its place, if that is another call.
fn changed(step: &Step, wrong: Wrong, ranks: usize) -> Step {
    use What::{
        AllGather, AllReduce, AllToAll, Any, Barrier, Broadcast, Bytes, Exchange, Message, Reduce,
        ReduceScatter,
    };
    let what = step.what;
    let mut step = step.clone();
    let has_data = matches!(
        what,
        AllReduce | Reduce | Broadcast | AllGather | ReduceScatter | AllToAll | Message | Exchange
    );
    let rows = step.rows(0, ranks);
    match wrong {
        Wrong::More if has_data && what != AllGather => {
            step.size = Size::Few(rows * step.width() + ranks * step.width())
        }
        Wrong::Type if has_data => {
            let at = TYPES.iter().position(|it| *it == step.dtype).unwrap();
            // Elements of another size may be as many, or not.
            step.size = Size::Few(rows * step.width());
            step.dtype = TYPES[(at + 1) % TYPES.len()];
            step.op = if step.op == ReduceOp::Mean {
                ReduceOp::Sum
            } else {
                step.op
            };
            step.any = false;
        }
        Wrong::Op if matches!(what, AllReduce | Reduce | ReduceScatter) => step.op = other(step.op),
        Wrong::Root if matches!(what, Reduce | Broadcast | Bytes) => step.root += 1,
        Wrong::Form if has_data && what != Exchange => {
            step.size = Size::Few(rows * step.width());
            step.tensors = match step.tensors {
                0 => 1,
                _ => 0,
            };
            step.width = 1;
        }
        Wrong::Shape
            if matches!(what, AllReduce | Reduce | Broadcast)
                && step.tensors > 0
                && rows != step.width =>
        {
            let width = step.width;
            step.size = Size::Few(width * rows);
            step.width = rows.max(1);
        }
        // As many messages as the other rank expects.
        _ if matches!(what, Message | Exchange) => {
            return changed(&step, Wrong::More, ranks);
        }
        _ => {
            step.what = if what == Any { Barrier } else { Any };
        }
    }
    step
}

/// A call that cannot work.
fn refused(group: &ProcessGroup, which: usize) -> Result<(), DdpError> {
    let ranks = group.world_size();
    let device = Device::flex();
    let tensor = Tensor::<2>::ones([ranks, 32], &device);
    let sum = TensorOp::AllReduce(ReduceOp::Sum);
    match which {
        0 => group.all_reduce(&mut [1i32], ReduceOp::Mean),
        1 => group.broadcast(&mut [1u8], ranks),
        2 => group
            .reduce_scatter_async(vec![1f32; ranks + 1], ReduceOp::Sum)
            .wait()
            .map(drop),
        3 => group
            .collective_many(sum, Vec::<Tensor<1>>::new())
            .map(drop),
        4 => {
            let other = tensor.clone().cast(DType::F64);
            group.collective_many(sum, vec![tensor, other]).map(drop)
        }
        5 => group.subgroup(&[0, 0]).map(drop),
        6 => group.subgroup(&[ranks]).map(drop),
        7 => {
            let scheme = device.settings().quantization.scheme;
            group
                .collective_async(sum, tensor.quantize_dynamic(&scheme))?
                .wait()
                .map(drop)
        }
        _ => group
            .collective(TensorOp::AllToAll, Tensor::<1>::ones([ranks + 1], &device))
            .map(drop),
    }
}

/// The step at which the rank goes wrong: from the given one on, in which others take part.
fn place(case: &Case, plan: &[Planned]) -> Option<usize> {
    let fits = |planned: &&Planned| {
        let may_be_replaced = match case.wrong {
            // The message itself would be missing.
            Wrong::Argument(_) => !matches!(planned.step.what, What::Message | What::Exchange),
            Wrong::Panic | Wrong::Leave | Wrong::Abort => true,
            _ => {
                planned.step.what != What::Message || {
                    let place = planned.place(case.rank);
                    let (from, to) = planned.step.ends(planned.members.len());
                    place == Some(from) || place == Some(to)
                }
            }
        };
        planned.place(case.rank).is_some() && planned.members.len() > 1 && may_be_replaced
    };
    let numbers = (case.at..plan.len()).chain(0..case.at.min(plan.len()));
    numbers.into_iter().find(|number| fits(&&plan[*number]))
}

/// Every call that shows the fault is waited for before the last steps, in which it comes out.
fn meet_before_the_end(plan: &mut [Planned], at: usize) {
    let before = plan.len() - MOST - 2;
    for (number, planned) in plan.iter_mut().enumerate() {
        for wait in planned.step.waits.iter_mut().flatten() {
            if *wait < NEVER || number == at {
                *wait = (*wait).min(before.saturating_sub(number));
            }
        }
    }
}

fn is_expected(error: &DdpError, case: &Case) -> bool {
    let odd = case.rank;
    match (case.wrong, error) {
        (Wrong::Panic, DdpError::Aborted { rank, reason }) => {
            *rank == odd && reason == "it panicked"
        }
        (Wrong::Abort, DdpError::Aborted { rank, reason }) => {
            *rank == odd && reason == "on purpose"
        }
        (Wrong::Leave, DdpError::RankLeft { rank, .. }) => *rank == odd,
        (Wrong::Panic | Wrong::Abort | Wrong::Leave, _) => false,
        (_, DdpError::Diverged { rank, other, .. }) => *rank == odd || *other == odd,
        _ => false,
    }
}

fn run(case: &Case) {
    let mut plan = case.program.plan();
    let at = place(case, &plan).expect("the last step has all ranks");
    meet_before_the_end(&mut plan, at);
    let refusal = Mutex::new(None);
    let act = |rank: usize, number: usize, step: &Step, group: &ProcessGroup| {
        if (rank, number) != (case.rank, at) {
            return Act::Make(step.clone().into());
        }
        match case.wrong {
            Wrong::Panic => panic!("on purpose"),
            Wrong::Leave => Act::Leave,
            Wrong::Abort => {
                group.abort("on purpose");
                Act::Nothing
            }
            Wrong::Argument(which) => {
                *refusal.lock().unwrap() = Some(refused(group, which));
                Act::Nothing
            }
            wrong => Act::Make(changed(step, wrong, group.world_size()).into()),
        }
    };
    let ends: Vec<Ends> = ranks(&case.program, |group| {
        let (rank, plan) = (group.rank(), &plan);
        let played = catch_unwind(AssertUnwindSafe(move || {
            play(group, plan, |number, step, group| {
                act(rank, number, step, group)
            })
        }));
        played.unwrap_or_else(|_| plan.iter().map(|_| None).collect())
    });
    for (number, planned) in plan.iter().enumerate() {
        // The odd rank's results are its own affair from then on.
        let mut ends = ends.clone();
        if number >= at {
            ends[case.rank].iter_mut().for_each(|end| *end = None);
        }
        check_step(planned, &ends, number);
    }
    let mut told = Vec::new();
    for (rank, ends) in ends.iter().enumerate() {
        let of_rank = ends.iter().flatten();
        let faults: Vec<&DdpError> = of_rank.filter_map(|end| end.as_ref().err()).collect();
        for fault in &faults {
            assert!(
                is_expected(fault, case),
                "rank {rank}, wrong at {at}: {fault}"
            );
            assert_eq!(
                fault.to_string(),
                faults[0].to_string(),
                "one fault ends the job"
            );
        }
        match rank == case.rank {
            true => {}
            false => told.push(faults.first().expect("the last step fails").to_string()),
        }
    }
    if case.program.sockets == 0 {
        assert!(
            told.iter().all(|it| *it == told[0]),
            "all are told the same: {told:?}"
        );
    }
    if let Some(refusal) = refusal.into_inner().unwrap() {
        let refusal = refusal.expect_err("it cannot work");
        let fits = matches!(refusal, DdpError::InvalidArgument(_)) || is_expected(&refusal, case);
        assert!(fits, "{refusal}");
    }
}

proptest! {
    #![proptest_config(config(60))]
    #[test]
    fn the_rank_that_goes_wrong_is_named(case in cases()) {
        watched(&case, run);
    }
}
