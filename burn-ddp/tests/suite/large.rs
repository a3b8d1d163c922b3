//! Every collective with ten million elements, against results worked out by hand.

use burn_ddp::{ProcessGroup, ReduceOp};

use crate::ranks::over_tcp;

/// No multiple of any number of ranks up to 8.
const LEN: usize = 10_000_019;

/// A rank's element; they recur, so that what must come out is a table of five.
fn sample(rank: usize, index: usize) -> usize {
    (rank * 7 + index * 3) % 5 + 1
}

fn samples<T>(rank: usize, len: usize, of: impl Fn(usize) -> T) -> Vec<T> {
    (0..len).map(|index| of(sample(rank, index))).collect()
}

fn bytes(rank: usize, len: usize) -> Vec<u8> {
    samples(rank, len, |value| value as u8)
}

/// Checks that element `at + index` of some larger whole is `of` that index modulo 5.
fn check<T: PartialEq + Copy>(data: &[T], at: usize, of: impl Fn(usize) -> T) {
    let table: [T; 5] = std::array::from_fn(of);
    let wrong = (0..data.len()).find(|index| data[*index] != table[(at + index) % 5]);
    assert_eq!(wrong, None);
}

fn sum(ranks: usize, index: usize) -> usize {
    (0..ranks).map(|rank| sample(rank, index)).sum()
}

fn check_group(group: ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let mut data = samples(rank, LEN, |value| value as f32);
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    check(&data, 0, |index| sum(ranks, index) as f32);
    drop(data);

    let own = bytes(rank, LEN);
    let mut data = own.clone();
    group.reduce(&mut data, ReduceOp::Max, ranks - 1).unwrap();
    let highest = |index: usize| {
        (0..ranks)
            .map(|rank| sample(rank, index) as u8)
            .max()
            .unwrap()
    };
    match rank == ranks - 1 {
        true => check(&data, 0, highest),
        false => assert!(data == own),
    }
    group.broadcast(&mut data, ranks / 2).unwrap();
    // From the last rank, what the reduction left there.
    match ranks / 2 == ranks - 1 {
        true => check(&data, 0, highest),
        false => check(&data, 0, |index| sample(ranks / 2, index) as u8),
    }

    let width = LEN / ranks;
    let part = group
        .reduce_scatter(&own[..width * ranks], ReduceOp::Sum)
        .unwrap();
    check(&part, rank * width, |index| sum(ranks, index) as u8);
    let all = group.all_gather(&own[..width]).unwrap();
    for (from, row) in all.chunks_exact(width).enumerate() {
        check(row, 0, |index| sample(from, index) as u8);
    }
    let uneven = group.all_gather_uneven(&own[..width - rank]).unwrap();
    for (from, row) in uneven.iter().enumerate() {
        assert_eq!(row.len(), width - from);
        check(row, 0, |index| sample(from, index) as u8);
    }
    let theirs = group.all_to_all(&own[..width * ranks]).unwrap();
    for (from, row) in theirs.chunks_exact(width).enumerate() {
        check(row, rank * width, |index| sample(from, index) as u8);
    }
    // Two by two.
    let (first, partner) = (rank.is_multiple_of(2), rank ^ 1);
    if partner < ranks {
        let mut data = vec![0; LEN];
        if first {
            group.send(&own, partner).unwrap();
        }
        group.recv(&mut data, partner).unwrap();
        if !first {
            group.send(&own, partner).unwrap();
        }
        check(&data, 0, |index| sample(partner, index) as u8);
    }
}

#[test]
fn ten_million_elements() {
    for world_size in 1..=8 {
        over_tcp(world_size, 1, check_group);
    }
}
