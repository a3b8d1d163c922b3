//! Every collective with ten million elements, against results worked out by hand.

use burn_ddp::{Element, ProcessGroup, ReduceOp};
use half::bf16;

use crate::suite::ranks::over_tcp;

/// No multiple of any number of ranks up to 8.
const LEN: usize = 10_000_019;

/// A rank's element; they recur, so that what must come out is a table of five.
fn sample(rank: usize, index: usize) -> usize {
    (rank * 7 + index * 3) % 5 + 1
}

/// A type, with what a small whole number is in it: bytes wrap around, floats of 16 bits are rounded.
trait Number: Element {
    fn of(value: usize) -> Self;
}

impl Number for u8 {
    fn of(value: usize) -> Self {
        value as Self
    }
}

impl Number for bf16 {
    fn of(value: usize) -> Self {
        Self::from_f32(value as f32)
    }
}

impl Number for f32 {
    fn of(value: usize) -> Self {
        value as Self
    }
}

fn samples<T: Number>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| T::of(sample(rank, index))).collect()
}

/// Checks that element `at + index` of some larger whole is `of` that index modulo 5.
fn check<T: Number>(data: &[T], at: usize, of: impl Fn(usize) -> usize) {
    let table: [T; 5] = std::array::from_fn(|index| T::of(of(index)));
    let wrong = (0..data.len()).find(|index| data[*index] != table[(at + index) % 5]);
    assert_eq!(wrong, None);
}

fn reduced(op: ReduceOp, ranks: usize, index: usize) -> usize {
    let values = (0..ranks).map(|rank| sample(rank, index));
    match op {
        ReduceOp::Product => values.product(),
        ReduceOp::Max => values.fold(0, usize::max),
        _ => values.sum(),
    }
}

fn check_sums(group: ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let mut data = samples::<f32>(rank, LEN);
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    check(&data, 0, |index| reduced(ReduceOp::Sum, ranks, index));
    drop(data);
    check_group::<u8>(group);
}

fn check_products<T: Number>(group: ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let mut data = samples::<T>(rank, LEN);
    group.all_reduce(&mut data, ReduceOp::Product).unwrap();
    check(&data, 0, |index| reduced(ReduceOp::Product, ranks, index));
    drop(data);
    check_group::<T>(group);
}

fn check_group<T: Number>(group: ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let own = samples::<T>(rank, LEN);
    let mut data = own.clone();
    group.reduce(&mut data, ReduceOp::Max, ranks - 1).unwrap();
    let highest = |index: usize| reduced(ReduceOp::Max, ranks, index);
    match rank == ranks - 1 {
        true => check(&data, 0, highest),
        false => assert!(data == own),
    }
    group.broadcast(&mut data, ranks / 2).unwrap();
    // From the last rank, what the reduction left there.
    match ranks / 2 == ranks - 1 {
        true => check(&data, 0, highest),
        false => check(&data, 0, |index| sample(ranks / 2, index)),
    }

    let width = LEN / ranks;
    let part = group
        .reduce_scatter(&own[..width * ranks], ReduceOp::Sum)
        .unwrap();
    check(&part, rank * width, |index| {
        reduced(ReduceOp::Sum, ranks, index)
    });
    let all = group.all_gather(&own[..width]).unwrap();
    for (from, row) in all.chunks_exact(width).enumerate() {
        check(row, 0, |index| sample(from, index));
    }
    let uneven = group.all_gather_uneven(&own[..width - rank]).unwrap();
    for (from, row) in uneven.iter().enumerate() {
        assert_eq!(row.len(), width - from);
        check(row, 0, |index| sample(from, index));
    }
    let theirs = group.all_to_all(&own[..width * ranks]).unwrap();
    for (from, row) in theirs.chunks_exact(width).enumerate() {
        check(row, rank * width, |index| sample(from, index));
    }
    // Two by two.
    let (first, partner) = (rank.is_multiple_of(2), rank ^ 1);
    if partner < ranks {
        let mut data = vec![T::zeroed(); LEN];
        if first {
            group.send(&own, partner).unwrap();
        }
        group.recv(&mut data, partner).unwrap();
        if !first {
            group.send(&own, partner).unwrap();
        }
        check(&data, 0, |index| sample(partner, index));
    }
}

#[test]
fn ten_million_elements() {
    for world_size in 1..=8 {
        over_tcp(world_size, 1, check_sums);
    }
    over_tcp(3, 1, check_products::<f32>);
    over_tcp(2, 1, check_products::<bf16>);
}
