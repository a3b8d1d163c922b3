//! Ranks that leave a group while others stay.

use std::{thread, time::Duration};

use burn_ddp::{CallKind, DdpError, ProcessGroup, ReduceOp};

use crate::suite::ranks::{locally, meeting_place, over_tcp, start};

/// As a served device does that has one.
#[test]
fn an_amax_reducer_that_is_never_dropped_is_no_death() {
    let (_folder, url) = meeting_place();
    for rank in start("amaxes kept", 2, &url, 30.0) {
        let output = rank.succeed(60);
        assert!(output.contains("RESULT ok"), "{output}");
    }
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let (_folder, url) = meeting_place();
    let results: Vec<_> = start("leave", 3, &url, 30.0)
        .into_iter()
        .map(|rank| rank.finish(Duration::from_secs(20)))
        .collect();
    assert!(results[1].0);
    for index in [0, 2] {
        let output = &results[index].1;
        assert!(
            output.contains("rank 1 left the group after 0 calls, but barrier #0"),
            "{output}"
        );
    }
}

/// To the others it is as dead as one that was killed, and they say what else it may be.
#[test]
fn a_rank_that_exits_with_a_handle_counts_as_dead_and_the_error_says_why() {
    let (_folder, url) = meeting_place();
    let ranks = start("static", 2, &url, 30.0);
    let results: Vec<_> = ranks
        .into_iter()
        .map(|rank| rank.finish(Duration::from_secs(20)))
        .collect();
    let output = &results[0].1;
    assert!(output.contains("rank 1 died"), "{output}");
    assert!(
        output.contains("`process::exit`, or a handle in a `static`"),
        "{output}"
    );
}

/// As after loops of unequal lengths over a communicator, beside which the job goes on.
#[test]
fn a_rank_that_drops_a_communicator_has_left_it_and_is_not_dead() {
    let body = |group: ProcessGroup| {
        let copy = group.duplicate().unwrap();
        let members = [2, 1, 0];
        let some = group.subgroup(&members).unwrap().unwrap();
        let calls = if group.rank() == 1 { 2 } else { 9 };
        let mut sums = (0..calls).map(|_| some.all_reduce(&mut [1f32; 10], ReduceOp::Sum));
        let ended = sums.find_map(Result::err);
        drop(some);
        // The other ranks tell the one that is alive what has become of the job.
        let error = ended.unwrap_or_else(|| copy.barrier().unwrap_err());
        assert_eq!(group.barrier().unwrap_err().to_string(), error.to_string());
        error
    };
    for error in [over_tcp(3, 2, body), locally(3, body)].concat() {
        let DdpError::RankLeft { rank, calls, call } = error else {
            panic!("{error}");
        };
        assert_eq!((rank, calls, call.sequence), (1, 2, 2));
        assert_eq!(call.kind, CallKind::AllReduce);
    }
}

#[test]
fn a_communicator_may_be_dropped_while_others_are_still_in_their_last_call() {
    let body = |group: ProcessGroup| {
        for round in 0..30 {
            let copy = group.duplicate().unwrap();
            if round % group.world_size() == group.rank() {
                thread::sleep(Duration::from_millis(3));
            }
            let mut sum = vec![1f32; 1 + 1000 * round];
            copy.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            drop(copy);
            assert!(sum.iter().all(|it| *it == 3.0));
        }
        group.barrier().unwrap();
    };
    over_tcp(3, 1, body);
    locally(3, body);
}
