//! Ranks that panic, whatever still holds the group.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::Duration,
};

use burn::{
    nn::BatchNormConfig,
    tensor::{Device, Tensor},
};
use burn_ddp::{ProcessGroup, ReduceOp, SyncBatchNorm};

use crate::suite::ranks::{impatiently, locally, meeting_place, over_tcp, start};

#[test]
fn a_panicking_rank_is_named() {
    let (_folder, url) = meeting_place();
    let results: Vec<_> = start("panic", 2, &url, 30.0)
        .into_iter()
        .map(|rank| rank.finish(Duration::from_secs(20)))
        .collect();
    assert!(
        results[0].1.contains("rank 1 aborted: it panicked"),
        "{}",
        results[0].1
    );
}

/// A call that is under way keeps the communicator, but it is not the program that does.
#[test]
fn a_rank_that_panics_while_a_call_is_under_way_is_named() {
    let body = |group: ProcessGroup| {
        if group.rank() == 1 {
            let panicking = catch_unwind(AssertUnwindSafe(move || {
                let _pending = group.all_reduce_async(vec![1f32; 10], ReduceOp::Sum);
                panic!("on purpose");
            }));
            return panicking.err().map(|_| String::new());
        }
        thread::sleep(Duration::from_millis(300));
        let reduced = group.all_reduce(&mut [1f32; 10], ReduceOp::Sum);
        let told = reduced.and_then(|()| group.barrier()).unwrap_err();
        Some(told.to_string())
    };
    for told in [over_tcp(2, 1, body), locally(2, body)] {
        assert_eq!(told[0].as_deref(), Some("rank 1 aborted: it panicked"));
    }
}

/// Nor is what forward keeps for backward.
#[test]
fn a_rank_that_panics_before_backward_is_named() {
    let body = |group: ProcessGroup| {
        let device = Device::flex().autodiff();
        let norm = SyncBatchNorm::new(&BatchNormConfig::new(2).init(&device), &group);
        let output = norm.forward(Tensor::<2>::ones([4, 2], &device));
        let told = match group.rank() {
            1 => {
                let panicking = catch_unwind(AssertUnwindSafe(move || {
                    let _both = (norm, group);
                    panic!("on purpose");
                }));
                panicking.err().map(|_| String::new())
            }
            _ => Some(group.barrier().unwrap_err().to_string()),
        };
        drop(output);
        told
    };
    let told = impatiently(2, body);
    assert_eq!(told[0].as_deref(), Some("rank 1 aborted: it panicked"));
}
