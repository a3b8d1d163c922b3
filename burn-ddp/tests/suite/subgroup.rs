//! Subgroups: their ranks, their collectives, and what happens to the others.

use burn_ddp::{DdpError, ProcessGroup, ReduceOp};

use crate::suite::ranks::{locally, over_tcp};

/// Runs the same over TCP and in one process.
fn both(world_size: usize, body: impl Fn(ProcessGroup) + Sync) {
    over_tcp(world_size, 2, &body);
    locally(world_size, &body);
}

/// The sum of what all members pass, as one of them sees it.
fn sum(group: &ProcessGroup, value: usize, len: usize) -> f32 {
    let mut data = vec![value as f32; len];
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert!(data.iter().all(|it| *it == data[0]));
    data[0]
}

#[test]
fn ranks_that_counted_differently_do_not_reuse_a_number() {
    locally(4, |group| {
        let low = group.subgroup(&[0, 1]).unwrap();
        let high = group.subgroup(&[2, 3]).unwrap();
        let _high: Vec<_> = high
            .iter()
            .flat_map(|high| (0..3).map(|_| high.duplicate().unwrap()))
            .collect();
        // Its number is one that ranks 0 and 1 have not come to yet.
        let copy = group.duplicate().unwrap();
        let low: Vec<_> = low
            .iter()
            .flat_map(|low| (0..4).map(|_| low.duplicate().unwrap()))
            .collect();
        // All at once, so that calls with the same number would meet.
        for _ in 0..20 {
            let whole = copy.all_reduce_async(vec![1u32; 3], ReduceOp::Sum);
            let pairs: Vec<_> = low
                .iter()
                .map(|low| low.all_reduce_async(vec![1u32; 5], ReduceOp::Sum))
                .collect();
            assert_eq!(whole.wait().unwrap(), [4; 3]);
            for pair in pairs {
                assert_eq!(pair.wait().unwrap(), [2; 5]);
            }
        }
    });
}

/// Each half counts its communicators for itself, and comes to the same numbers.
#[test]
fn communicators_of_other_ranks_may_have_the_same_number() {
    both(4, |group| {
        let halves = [
            group.subgroup(&[0, 1]).unwrap(),
            group.subgroup(&[2, 3]).unwrap(),
        ];
        let half = halves.into_iter().flatten().next().unwrap();
        let own = half.duplicate().unwrap();
        let rank = group.rank();
        // Calls that would not fit one another.
        assert_eq!(sum(&own, rank, 4 + rank / 2), [1.0, 5.0][rank / 2]);
        // One of each half leaves; what the others still have to say to each other comes through.
        let stays = (rank % 2 == 1).then(|| own.clone());
        if stays.is_none() {
            own.send(&[rank as u32], 1).unwrap();
        }
        drop(own);
        group.barrier().unwrap();
        if let Some(own) = stays {
            let mut received = [9u32];
            own.recv(&mut received, 0).unwrap();
            assert_eq!(received, [rank as u32 - 1]);
        }
    });
}

#[test]
fn one_rank_is_a_group() {
    both(2, |group| {
        let alone = group.subgroup(&[1]).unwrap();
        assert_eq!(alone.is_some(), group.rank() == 1);
        if let Some(alone) = alone {
            assert_eq!((alone.rank(), alone.world_size()), (0, 1));
            assert_eq!(alone.local_rank(), group.local_rank());
            assert_eq!(sum(&alone, 4, 3), 4.0);
        }
    });
    let single = ProcessGroup::single();
    assert_eq!(single.subgroup(&[0]).unwrap().unwrap().world_size(), 1);
}

#[test]
fn a_communicator_may_be_dropped_as_soon_as_it_is_there() {
    let body = |group: ProcessGroup| {
        for round in 0..20 {
            // The others may still be connecting.
            drop(group.duplicate().unwrap());
            if round % 5 == 0 {
                group.barrier().unwrap();
            }
        }
        group.barrier().unwrap();
    };
    over_tcp(3, 2, body);
    locally(3, body);
}

#[test]
fn lists_that_differ_are_noticed() {
    over_tcp(3, 1, |group| {
        let list = if group.rank() == 1 { [0, 2] } else { [2, 0] };
        let error = group.subgroup(&list).unwrap_err();
        assert!(matches!(error, DdpError::Diverged { .. }), "{error}");
        assert!(error.to_string().contains("subgroup(2 ranks"), "{error}");
    });
}

#[test]
fn faults_name_ranks_of_the_job() {
    for error in over_tcp(3, 1, |group| {
        let subgroup = group.subgroup(&[2, 1]).unwrap();
        // Nobody is making the subgroup any more when rank 2 aborts.
        let here = group.barrier();
        match (group.rank(), subgroup) {
            (2, Some(subgroup)) => here.map(|()| subgroup.abort("on purpose")).unwrap(),
            (_, Some(subgroup)) => here.and_then(|()| subgroup.barrier()).unwrap_err(),
            (_, None) => here.and_then(|()| group.barrier()).unwrap_err(),
        }
    }) {
        assert!(
            matches!(error, DdpError::Aborted { rank: 2, .. }),
            "{error}"
        );
    }
    let errors = over_tcp(3, 1, |group| {
        let subgroup = group.subgroup(&[2, 1]).unwrap();
        match group.rank() {
            1 => subgroup.unwrap().barrier().err(),
            // Rank 0 must not leave while the others still need its part of the job.
            0 => group.barrier().err(),
            _ => None,
        }
    });
    let error = errors[1].as_ref().unwrap();
    assert!(
        matches!(error, DdpError::RankLeft { rank: 2, .. }),
        "{error}"
    );
}
