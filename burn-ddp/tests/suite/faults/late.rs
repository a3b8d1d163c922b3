//! Ranks that come late to a call.

use std::{thread, time::Duration};

use burn_ddp::{CallKind, DdpError, ProcessGroup, ReduceOp};

use crate::suite::ranks::{impatiently, locally, meeting_place, over_tcp, start};

#[test]
fn a_late_rank_is_named_before_the_limit_ends_the_job() {
    let (_folder, url) = meeting_place();
    // It is 5 s late, and a fifth of the limit is 3.
    let ranks = start("late", 2, &url, 15.0);
    let outputs: Vec<String> = ranks.into_iter().map(|rank| rank.succeed(60)).collect();
    let warnings = |output: &str| -> Vec<String> {
        let lines = output.lines().filter(|line| line.contains("LOG WARN"));
        lines.map(String::from).collect()
    };
    let [warning] = &warnings(&outputs[0])[..] else {
        panic!("{}", outputs[0]);
    };
    for said in [
        "barrier",
        "ranks [1]",
        "of 15s",
        "not in this call yet",
        "BURN_DDP_TIMEOUT",
    ] {
        assert!(warning.contains(said), "{warning}");
    }
    assert_eq!(warnings(&outputs[1]), [""; 0]);
}

#[test]
fn a_late_rank_is_told_from_a_dead_one() {
    let body = |group: ProcessGroup| {
        if group.rank() == 1 {
            thread::sleep(Duration::from_millis(2500));
        }
        group.barrier().unwrap_err()
    };
    for error in impatiently(3, body) {
        let DdpError::Timeout {
            ranks, call, why, ..
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!((ranks.as_slice(), call.kind), (&[1][..], CallKind::Barrier));
        assert!(why.contains("not in this call yet"), "{why}");
        assert!(why.contains("`ProcessGroup::with_timeout`"), "{why}");
    }
}

/// As where a rank that only sends is a call ahead of the others.
#[test]
fn a_rank_that_waits_for_a_late_one_is_not_blamed_alone() {
    let body = |group: ProcessGroup| {
        let mut data = [1f32];
        if group.rank() == 0 {
            thread::sleep(Duration::from_millis(2500));
        }
        // Rank 1 waits for rank 0 here, and rank 2 for rank 1 in the next call.
        let reduced = group.reduce(&mut data, ReduceOp::Sum, 1);
        let limit = Duration::from_secs(if group.rank() == 2 { 1 } else { 60 });
        let limited = group.with_timeout(limit);
        let copied = reduced.and_then(|()| limited.broadcast(&mut data, 1));
        copied.unwrap_err()
    };
    for error in [over_tcp(3, 1, body), locally(3, body)].concat() {
        let DdpError::Timeout { ranks, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(ranks, &[0, 1], "{error}");
    }
}
