//! Some ranks call by NCCL and others through the host. NCCL itself is not involved: the ranks meet before it.

use std::time::Duration;

use super::*;
use crate::{LocalGroup, local::tests::on_ranks};

/// Runs `body` on two ranks, once within the process and once over TCP.
fn pairs<R: Send>(body: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().join("master").display());
    let connected = on_ranks(LocalGroup::new(2), |group| {
        let builder = ProcessGroup::builder().timeout(Duration::from_secs(60));
        builder.connect(&url, group.rank(), 2).unwrap()
    });
    let both = [LocalGroup::new(2), connected];
    both.map(|groups| on_ranks(groups, &body))
        .into_iter()
        .flatten()
        .collect()
}

/// Checks that the errors of all ranks name both calls.
fn check(errors: Vec<DdpError>, by_nccl: &str, by_host: &str) {
    for error in errors {
        let DdpError::Diverged {
            call, other_call, ..
        } = &error
        else {
            panic!("{error}");
        };
        let mut calls = [call.to_string(), other_call.to_string()];
        calls.sort();
        assert_eq!(calls, [by_host, by_nccl], "{error}");
    }
}

#[test]
fn a_call_by_nccl_is_another_than_one_through_the_host() {
    let what = (CallKind::AllReduce, ReduceOp::Sum, 100_000, 0);
    let errors = pairs(|group| {
        let result = match group.rank() {
            // Does what a tensor on the NCCL device would do.
            0 => group.run(
                what,
                ElementType::F32,
                |call| call.by_nccl().barrier(),
                || (),
            ),
            // Does what a tensor on another device would do.
            _ => group.all_reduce(&mut vec![0f32; 100_000], ReduceOp::Sum),
        };
        result.unwrap_err()
    });
    let call = "all_reduce(sum, f32 x 100000)";
    check(errors, &format!("{call} by NCCL #0"), &format!("{call} #0"));
}

#[test]
fn so_is_a_message() {
    let errors = pairs(|group| match group.rank() {
        0 => {
            let call = group.message_call(ElementType::F32, 1000, 1, false);
            let (_turn, call) = call.unwrap();
            call.by_nccl().receive::<u8>(&mut [], 1).unwrap_err()
        }
        _ => {
            let sent = group.send(&[0f32; 1000], 0);
            // The message may have been on its way before the other rank read it.
            sent.and_then(|()| group.barrier()).unwrap_err()
        }
    });
    check(
        errors,
        "send/recv(f32 x 1000) by NCCL #0",
        "send/recv(f32 x 1000) #0",
    );
}
