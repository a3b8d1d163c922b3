//! What goes wrong with NCCL, and which errors the ranks get.

use super::*;
use crate::{NcclError, nccl::model::Trouble};

/// The error of every rank when something goes wrong in the second call, the number of NCCL launches since the
/// first, and the ranks that aborted their communicator. Checks that a later call returns the same error, that
/// every rank that launched calls in vain aborted its communicator, and that no communicator is left.
fn faults(
    timeout: Duration,
    second: impl Fn(&Rank, &Model) -> Result<Vec<f32>, DdpError> + Sync,
) -> (Vec<DdpError>, usize, Vec<usize>) {
    let (faults, model) = linked(3, timeout, |rank, model| {
        assert_eq!(rank.sum(&[1.0]).unwrap(), [3.0]);
        rank.group.barrier().unwrap();
        let fault = second(rank, model).unwrap_err();
        assert_eq!(rank.sum(&[1.0]).unwrap_err().to_string(), fault.to_string());
        fault
    });
    let (launches, aborted) = (model.launches() - 3, model.aborted());
    assert!(aborted.len() >= launches, "{aborted:?} of {launches}");
    (faults, launches, aborted)
}

const SHORT: Duration = Duration::from_millis(600);

#[test]
fn nccl_is_entered_by_all_ranks_or_none() {
    type Second = fn(&Rank) -> Result<Vec<f32>, DdpError>;
    let mismatches: [Second; 2] = [
        |rank| rank.sum(&vec![1.0; 2 + rank.group.rank() / 2]),
        |rank| match rank.group.rank() {
            2 => rank.group.all_gather(&[1f32]),
            _ => rank.sum(&[1.0]),
        },
    ];
    for mismatch in mismatches {
        let (faults, launches, aborted) = faults(LONG, |rank, _| mismatch(rank));
        assert_eq!((launches, aborted), (0, vec![]));
        for fault in faults {
            assert!(matches!(fault, DdpError::Diverged { .. }), "{fault}");
        }
    }
    // A rank that comes too late.
    let (faults, launches, aborted) = faults(SHORT, |rank, _| match rank.group.rank() {
        1 => {
            thread::sleep(2 * SHORT);
            rank.sum(&[1.0])
        }
        _ => rank.sum(&[1.0]),
    });
    assert_eq!((launches, aborted), (0, vec![]));
    for fault in faults {
        assert!(
            matches!(&fault, DdpError::Timeout { ranks, .. } if ranks == &[1]),
            "{fault}"
        );
    }
}

#[test]
fn tensors_of_other_shapes_do_not_enter_nccl() {
    // The total number of elements is equal: of two tensors, of one tensor, and of a message.
    type Second = fn(&Rank) -> Result<Vec<f32>, DdpError>;
    let mismatches: [(Second, &str); 3] = [
        (
            |rank| {
                let lens = if rank.group.rank() == 1 {
                    [20, 10]
                } else {
                    [10, 20]
                };
                let blocks = lens.map(|len| rank.block([len], &vec![1f32; len]));
                let sum = TensorOp::AllReduce(ReduceOp::Sum);
                Ok(rank.call::<f32>(sum, blocks.into())?[0].data())
            },
            "over [10] [20], but rank 1 called all_reduce(sum, f32 x 30) by NCCL #3 over [20] [10]",
        ),
        (
            |rank| {
                let shape = if rank.group.rank() == 1 {
                    [4, 3, 2]
                } else {
                    [2, 2, 3]
                };
                let block = rank.block(shape, &vec![1f32; shape.iter().product()]);
                Ok(rank.call::<f32>(TensorOp::AllGather, vec![block])?[0].data())
            },
            "over [_, 2, 3], but rank 1 called all_gather(f32 x 6) by NCCL #3 over [_, 3, 2]",
        ),
        (
            |rank| {
                let message = |shape: [usize; 2], peer, sends| {
                    let block = rank.block(shape, &[1f32; 6]);
                    let group = &rank.group;
                    group.message_by_nccl(block, ElementType::F32, peer, sends, &rank.link)
                };
                match rank.group.rank() {
                    0 => message([2, 3], 1, true).map(|block| block.data()),
                    1 => message([3, 2], 0, false).map(|block| block.data()),
                    _ => rank.group.barrier().map(|()| Vec::new()),
                }
            },
            "over [3, 2], but rank 0 called send/recv(f32 x 6) by NCCL #0 over [2, 3]",
        ),
    ];
    for (mismatch, expected) in mismatches {
        let (faults, launches, aborted) = faults(LONG, |rank, _| mismatch(rank));
        assert_eq!((launches, aborted), (0, vec![]));
        for fault in faults {
            assert!(fault.to_string().ends_with(expected), "{fault}");
        }
    }
}

#[test]
fn a_device_that_hangs_ends_the_call_on_all_ranks() {
    let (faults, launches, aborted) = faults(SHORT, |rank, model| {
        model.trouble(1, Trouble::Hangs);
        rank.group.barrier()?;
        rank.sum(&[1.0])
    });
    assert_eq!((launches, aborted), (3, vec![0, 1, 2]));
    for fault in faults {
        let DdpError::Timeout { why, .. } = &fault else {
            panic!("{fault}")
        };
        assert!(why.contains("NCCL was at work"), "{why}");
    }
}

#[test]
fn an_error_of_one_ranks_nccl_reaches_all_and_all_that_is_pending() {
    let (faults, _, aborted) = faults(LONG, |rank, model| {
        model.trouble(2, Trouble::Breaks);
        rank.group.barrier()?;
        let op = TensorOp::AllReduce(ReduceOp::Sum);
        let submit = |_| rank.call_async::<f32>(op, rank.block([1], &[1f32]));
        let pending: Vec<_> = (0..3).map(submit).collect();
        let faults: Vec<String> = pending
            .into_iter()
            .map(|pending| pending.wait().unwrap_err().to_string())
            .collect();
        assert_eq!(faults[0], faults[1]);
        assert_eq!(faults[0], faults[2]);
        rank.sum(&[1.0])
    });
    // Another rank may learn of the fault before it enters NCCL.
    assert!(aborted.contains(&2), "{aborted:?}");
    for fault in faults {
        let DdpError::NcclFailed {
            rank: 2, problem, ..
        } = &fault
        else {
            panic!("{fault}")
        };
        assert!(
            problem.contains("network error") && problem.contains("Connection reset"),
            "{problem}"
        );
    }
}

#[test]
fn a_call_that_nccl_does_not_take_fails_on_all_ranks() {
    let (faults, launches, aborted) = faults(LONG, |rank, model| {
        model.trouble(1, Trouble::Refuses);
        rank.group.barrier()?;
        rank.sum(&[1.0])
    });
    assert!(launches <= 2 && aborted.contains(&1), "{aborted:?}");
    for fault in faults {
        let DdpError::NcclFailed {
            rank: 1, problem, ..
        } = &fault
        else {
            panic!("{fault}")
        };
        assert!(problem.contains("invalid usage"), "{problem}");
    }
}

/// NCCL may notice first that a rank is gone, and does not say which. The control plane knows a moment later.
#[test]
fn a_rank_that_nccl_loses_is_named_by_the_control_plane() {
    let (faults, ..) = faults(LONG, |rank, model| {
        model.trouble(0, Trouble::Breaks);
        model.trouble(1, Trouble::Breaks);
        model.trouble(2, Trouble::Hangs);
        rank.group.barrier()?;
        let group = rank.group.clone();
        let lost = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            (group.rank() == 2).then(|| group.abort("gone"))
        });
        let result = rank.sum(&[1.0]);
        lost.join().unwrap();
        result
    });
    for fault in faults {
        assert!(
            matches!(&fault, DdpError::Aborted { rank: 2, .. }),
            "{fault}"
        );
    }
}

#[test]
fn a_rank_that_gives_up_while_nccl_works_ends_the_call() {
    let (faults, ..) = faults(LONG, |rank, model| {
        model.trouble(0, Trouble::Hangs);
        rank.group.barrier()?;
        let group = rank.group.clone();
        let quitter = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            (group.rank() == 1).then(|| group.abort("no more money"))
        });
        let result = rank.sum(&[1.0]);
        quitter.join().unwrap();
        result
    });
    for fault in faults {
        assert!(
            matches!(&fault, DdpError::Aborted { rank: 1, .. }),
            "{fault}"
        );
    }
}

#[test]
fn communicators_that_cannot_meet_are_given_up() {
    // Two ranks on one device, which NCCL refuses.
    let model = Model::new();
    for fault in ranks(3, LONG, |group| {
        open(&group, &model, group.rank() / 2)
            .map(drop)
            .unwrap_err()
    }) {
        let DdpError::NcclFailed {
            rank: 0 | 1,
            problem,
            ..
        } = &fault
        else {
            panic!("{fault}")
        };
        assert!(
            problem.contains("invalid usage (Duplicate GPU detected"),
            "{problem}"
        );
    }
    assert_eq!((model.alive(), model.aborted()), (0, vec![0, 1, 2]));

    // Rank 0 cannot create an identity: this is not a fault, and all ranks learn why.
    let reason = NcclError::Driver {
        problem: "no sockets left".into(),
    };
    for error in ranks(2, LONG, |group| {
        let what = (CallKind::Backend, ReduceOp::Sum, 0, 0);
        let open = |call: Collective<'_>| Ok(Model::no_link(&call, reason.clone()));
        let error = group
            .run(what, ElementType::U8, open, || unreachable!())
            .unwrap();
        group.barrier().unwrap();
        error
    }) {
        assert!(matches!(&error, DdpError::Nccl { rank: 0, reason: theirs } if *theirs == reason));
    }

    // A rank that shares the identity but goes no further.
    let model = Model::new();
    let faults = ranks(3, SHORT, |group| {
        let what = (CallKind::Backend, ReduceOp::Sum, 0, 0);
        match group.rank() {
            1 => {
                let share = |call: Collective<'_>| call.all_gather_uneven::<u8>(&[]).map(drop);
                group.run(what, ElementType::U8, share, || ()).unwrap();
                thread::sleep(2 * SHORT);
                group.barrier().unwrap_err()
            }
            _ => open(&group, &model, group.rank()).map(drop).unwrap_err(),
        }
    });
    for fault in faults {
        let DdpError::Timeout { ranks, why, .. } = &fault else {
            panic!("{fault}")
        };
        assert!(
            ranks.contains(&1) && why.contains("NCCL was at work"),
            "{fault}"
        );
    }
    assert_eq!((model.alive(), model.aborted()), (0, vec![0, 2]));
}
