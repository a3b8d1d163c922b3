//! Every collective against a result worked out by hand, over types, sizes, ranks and transports.

use burn_ddp::{Element, ElementType, LocalGroup, ProcessGroup, ReduceOp};
use half::{bf16, f16};

use crate::suite::ranks::{locally, over_tcp};

/// Sizes around the limits where one algorithm takes over from another.
const SIZES: [usize; 8] = [0, 1, 3, 31, 1000, 8191, 40_000, 300_001];

/// Small whole numbers: exact in every type, whatever the order of the operations. (So are the products of
/// some: their odd parts are small. Integers wrap around.)
pub(crate) trait Sample: Element {
    fn sample(rank: usize, index: usize) -> Self;
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
}

macro_rules! samples {
    ($($t:ty, $from:expr, $to:expr);* $(;)?) => {$(
        impl Sample for $t {
            fn sample(rank: usize, index: usize) -> Self {
                Self::from_f64(((rank * 7 + index * 3) % 5 + 1) as f64)
            }
            fn from_f64(value: f64) -> Self { ($from)(value) }
            fn to_f64(self) -> f64 { ($to)(self) }
        }
    )*};
}

samples! {
    u8, |v| v as u64 as u8, |v| v as f64;
    i8, |v| v as i64 as i8, |v| v as f64;
    u16, |v| v as u64 as u16, |v| v as f64;
    i16, |v| v as i64 as i16, |v| v as f64;
    u32, |v| v as u64 as u32, |v| v as f64;
    i32, |v| v as i64 as i32, |v| v as f64;
    u64, |v| v as u64, |v| v as f64;
    i64, |v| v as i64, |v| v as f64;
    f32, |v| v as f32, |v| v as f64;
    f64, |v| v, |v| v;
    f16, f16::from_f64, f16::to_f64;
    bf16, bf16::from_f64, bf16::to_f64;
}

fn samples<T: Sample>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| T::sample(rank, index)).collect()
}

/// What the reduction must give, worked out in `f64`.
pub(crate) fn combine(op: ReduceOp, values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let ranks = values.len() as f64;
    match op {
        ReduceOp::Sum => values.sum::<f64>(),
        ReduceOp::Mean => values.sum::<f64>() / ranks,
        ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
        ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
        ReduceOp::Product => values.product(),
    }
}

fn reduced<T: Sample>(op: ReduceOp, ranks: usize, len: usize) -> Vec<T> {
    let fold = |index: usize| {
        let values = (0..ranks).map(|rank| T::sample(rank, index).to_f64());
        T::from_f64(combine(op, values))
    };
    (0..len).map(fold).collect()
}

fn check_reductions<T: Sample>(group: &ProcessGroup, sizes: &[usize]) {
    let (rank, ranks) = (group.rank(), group.world_size());
    for &len in sizes {
        for op in [
            ReduceOp::Sum,
            ReduceOp::Mean,
            ReduceOp::Min,
            ReduceOp::Max,
            ReduceOp::Product,
        ] {
            let mut data = samples::<T>(rank, len);
            let is_float = matches!(
                T::TYPE,
                ElementType::F16 | ElementType::BF16 | ElementType::F32 | ElementType::F64
            );
            if op == ReduceOp::Mean && !is_float {
                assert!(group.reduce_scatter(&data[..0], op).is_err());
                continue;
            }
            let expected = reduced::<T>(op, ranks, len);
            group.all_reduce(&mut data, op).unwrap();
            // A mean of f32 is a division of an exact sum: correctly rounded from f64 as well.
            assert_eq!(data, expected, "{op} of {len} {}", T::TYPE);

            let mut data = samples::<T>(rank, len);
            let root = len % ranks;
            group.reduce(&mut data, op, root).unwrap();
            match rank == root {
                true => assert_eq!(data, expected),
                false => assert_eq!(data, samples::<T>(rank, len), "others keep theirs"),
            }

            let whole = len / ranks * ranks;
            let part = group
                .reduce_scatter(&samples::<T>(rank, whole), op)
                .unwrap();
            let width = whole / ranks;
            assert_eq!(
                part,
                reduced::<T>(op, ranks, whole)[rank * width..][..width]
            );
        }
    }
}

fn check_moves<T: Sample>(group: &ProcessGroup, sizes: &[usize]) {
    let (rank, ranks) = (group.rank(), group.world_size());
    for &len in sizes {
        for root in 0..ranks {
            let mut data = samples::<T>(rank, len);
            group.broadcast(&mut data, root).unwrap();
            assert_eq!(data, samples::<T>(root, len));
        }
        let all = group.all_gather(&samples::<T>(rank, len)).unwrap();
        let expected: Vec<T> = (0..ranks)
            .flat_map(|rank| samples::<T>(rank, len))
            .collect();
        assert_eq!(all, expected);

        let uneven = group
            .all_gather_uneven(&samples::<T>(rank, len * rank))
            .unwrap();
        let expected: Vec<Vec<T>> = (0..ranks).map(|rank| samples(rank, len * rank)).collect();
        assert_eq!(uneven, expected);

        let mine: Vec<T> = (0..ranks)
            .flat_map(|to| samples::<T>(rank * ranks + to, len))
            .collect();
        let theirs = group.all_to_all(&mine).unwrap();
        let expected: Vec<T> = (0..ranks)
            .flat_map(|from| samples::<T>(from * ranks + rank, len))
            .collect();
        assert_eq!(theirs, expected);

        // A message around the ring; rank 0 starts it.
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let mut data = samples::<T>(0, len);
        if rank != 0 {
            data.fill(T::sample(3, 0));
            group.recv(&mut data, previous).unwrap();
        }
        if next != 0 {
            group.send(&data, next).unwrap();
        }
        assert_eq!(data, samples::<T>(0, len));
    }
    let bytes = group
        .broadcast_bytes(&vec![rank as u8; rank * 5], ranks - 1)
        .unwrap();
    assert_eq!(bytes, vec![ranks as u8 - 1; (ranks - 1) * 5]);
    let all = group.all_gather_bytes(&vec![rank as u8; rank]).unwrap();
    assert_eq!(
        all,
        (0..ranks)
            .map(|rank| vec![rank as u8; rank])
            .collect::<Vec<_>>()
    );
    group.barrier().unwrap();
}

fn check_all(group: ProcessGroup) {
    check_reductions::<f32>(&group, &SIZES);
    check_moves::<f32>(&group, &SIZES);
    check_types(&group, &[0, 1, 31, 40_000]);
}

/// All types but `f32`.
fn check_types(group: &ProcessGroup, few: &[usize]) {
    check_reductions::<f64>(group, few);
    check_reductions::<f16>(group, few);
    check_reductions::<bf16>(group, few);
    check_reductions::<u8>(group, few);
    check_reductions::<i8>(group, few);
    check_reductions::<u16>(group, few);
    check_reductions::<i16>(group, few);
    check_reductions::<u32>(group, few);
    check_reductions::<i32>(group, few);
    check_reductions::<u64>(group, few);
    check_reductions::<i64>(group, few);
    check_moves::<f64>(group, few);
    check_moves::<f16>(group, few);
    check_moves::<bf16>(group, few);
    check_moves::<u8>(group, few);
    check_moves::<i8>(group, few);
    check_moves::<u16>(group, few);
    check_moves::<i16>(group, few);
    check_moves::<u32>(group, few);
    check_moves::<i32>(group, few);
    check_moves::<u64>(group, few);
    check_moves::<i64>(group, few);
}

#[test]
fn collectives_over_tcp() {
    for world_size in 1..=4 {
        over_tcp(world_size, 1, check_all);
    }
}

#[test]
fn collectives_of_many_ranks() {
    for world_size in [5, 6, 7, 8] {
        over_tcp(world_size, 1, |group| {
            check_reductions::<f32>(&group, &[0, 1, 31, 8191, 70_001]);
            check_reductions::<bf16>(&group, &[1, 70_001]);
            check_moves::<f32>(&group, &[1, 31, 20_000]);
            check_types(&group, &[0, 1, 31]);
        });
    }
    // Enough ranks for the trees.
    over_tcp(18, 1, |group| {
        check_reductions::<f32>(&group, &[1, 31, 1000]);
        check_reductions::<f16>(&group, &[31]);
        check_moves::<i32>(&group, &[1, 31]);
    });
}

#[test]
fn collectives_between_threads() {
    for world_size in 1..=4 {
        locally(world_size, check_all);
    }
}

#[test]
fn several_sockets_carry_large_payloads() {
    over_tcp(2, 3, |group| {
        check_reductions::<f32>(&group, &[1, 300_001, 2_500_000]);
        check_moves::<bf16>(&group, &[1, 300_001]);
    });
}

#[test]
fn sums_of_16_bit_floats_are_rounded_once() {
    // 256 + 1 + 1 + ... in bf16 would stay at 256; in f32 it does not.
    for len in [5, 100_000] {
        let results = over_tcp(4, 1, |group| {
            let value = if group.rank() == 0 { 256.0 } else { 1.0 };
            let mut data = vec![bf16::from_f32(value); 4 * len];
            let part = group.reduce_scatter(&data, ReduceOp::Sum).unwrap();
            let mut at_root = data.clone();
            group.reduce(&mut at_root, ReduceOp::Sum, 0).unwrap();
            at_root.truncate(if group.is_main() { 4 * len } else { 0 });
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            [data, part, at_root]
        });
        // Rounded to the nearest, of 256, 258 and 260 in steps of two, and to the even one.
        let sum = bf16::from_f32(259.0);
        for data in results.into_iter().flatten() {
            assert!(data.iter().all(|value| *value == sum), "{sum}");
        }
    }
}

#[test]
fn products_and_wrapping_sums() {
    over_tcp(3, 1, |group| {
        let rank = group.rank() as i32;
        let mut data = [rank + 2, -1];
        group.all_reduce(&mut data, ReduceOp::Product).unwrap();
        assert_eq!(data, [24, -1]);
        let mut data = [200u8];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [88]);
    });
}

#[test]
fn a_duplicate_works_beside_its_original() {
    fn both(group: ProcessGroup) {
        let copy = group.duplicate().unwrap();
        assert_eq!(
            (copy.rank(), copy.world_size()),
            (group.rank(), group.world_size())
        );
        std::thread::scope(|scope| {
            for (group, value) in [(&group, 1.0), (&copy, 2.0)] {
                scope.spawn(move || {
                    for step in 0..50 {
                        let mut data = vec![value; 1 + step * 50];
                        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                        assert!(data.iter().all(|it| *it == 3.0 * value));
                    }
                });
            }
        });
    }
    over_tcp(3, 1, both);
    locally(3, both);
}

#[test]
fn a_group_of_one_needs_nobody() {
    let group = ProcessGroup::single();
    check_all(group.clone());
    assert!(group.is_main());
    assert!(group.duplicate().is_ok());
    assert!(group.all_reduce_any(true).unwrap());
    let stats = group.stats();
    assert!(stats.calls > 0 && stats.bytes_reduced > 0);
}

#[test]
fn counters_count() {
    let groups = LocalGroup::new(2);
    std::thread::scope(|scope| {
        for group in &groups {
            scope.spawn(|| group.all_reduce(&mut [0f64; 10], ReduceOp::Sum).unwrap());
        }
    });
    assert_eq!(groups[0].stats().bytes_reduced, 80);
    assert_eq!(groups[1].stats().calls, 1);
}
