//! A NaN of any rank wins a minimum and a maximum, whichever way they are found.

use burn_ddp::{Element, ProcessGroup, ReduceOp};
use half::{bf16, f16};

use crate::ranks::{locally, over_tcp};

/// A NaN at one place of one rank, in data of any size, for which the algorithms differ.
fn a_nan_wins<T: Element>(
    group: &ProcessGroup,
    nan: T,
    is_nan: impl Fn(T) -> bool,
    number: impl Fn(usize) -> T,
) {
    let ranks = group.world_size();
    for len in [1, 10_000, 100_000] {
        for bad in 0..ranks {
            let place = len * bad / ranks;
            for op in [ReduceOp::Min, ReduceOp::Max] {
                let mut data = vec![number(group.rank()); len];
                if group.rank() == bad {
                    data[place] = nan;
                }
                group.all_reduce(&mut data, op).unwrap();
                let expected = number(if op == ReduceOp::Min { 0 } else { ranks - 1 });
                for (at, value) in data.into_iter().enumerate() {
                    let is_right = match at == place {
                        true => is_nan(value),
                        false => value == expected,
                    };
                    assert!(is_right, "{op} of {len}, rank {bad}, at {at}: {value:?}");
                }
            }
        }
    }
}

#[test]
fn a_nan_of_any_rank_wins() {
    let body = |group: ProcessGroup| {
        let half = |rank: usize| f16::from_f32(rank as f32);
        let brain = |rank: usize| bf16::from_f32(rank as f32);
        a_nan_wins(&group, f32::NAN, f32::is_nan, |rank| rank as f32);
        a_nan_wins(&group, -f64::NAN, f64::is_nan, |rank| rank as f64);
        a_nan_wins(&group, f16::NAN, f16::is_nan, half);
        a_nan_wins(&group, bf16::NAN, bf16::is_nan, brain);
    };
    over_tcp(2, 1, body);
    locally(3, body);
    over_tcp(5, 1, body);
}
