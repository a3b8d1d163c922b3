//! Executes planned calls over ranks that are simulated in memory.

use super::*;
use crate::{ElementType, ReduceOp, nccl::wire::on_wire};
use proptest::prelude::*;

/// The addresses in a rank's memory where its own elements and its result start.
const FROM: u64 = 24;
const INTO: u64 = 8_000;

/// The memories of all ranks. The calls do with `i32`s and bytes what NCCL's documentation says.
struct World {
    memories: Vec<Vec<u8>>,
    wire: Wire,
}

impl World {
    fn read(&self, rank: usize, at: u64, count: usize) -> Vec<u8> {
        self.memories[rank][at as usize..][..count * self.wire.size].to_vec()
    }

    fn write(&mut self, rank: usize, at: u64, bytes: &[u8]) {
        assert_ne!(at, 0, "nothing is written through a null pointer");
        self.memories[rank][at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn sum(&self, parts: &[Vec<u8>]) -> Vec<u8> {
        assert_eq!(self.wire.code, 2, "the test adds i32s only");
        let number =
            |part: &Vec<u8>, at: usize| i32::from_le_bytes(part[at..at + 4].try_into().unwrap());
        (0..parts[0].len())
            .step_by(4)
            .flat_map(|at| {
                parts
                    .iter()
                    .map(|part| number(part, at))
                    .sum::<i32>()
                    .to_le_bytes()
            })
            .collect()
    }

    /// Executes call number `index` of all ranks.
    fn step(&mut self, calls: &[Vec<Move>], index: usize) {
        let ranks = calls.len();
        for rank in 0..ranks {
            let sources = |world: &Self| -> Vec<Vec<u8>> {
                (0..ranks)
                    .map(|rank| match calls[rank][index] {
                        Move::AllReduce { from, count, .. }
                        | Move::Reduce { from, count, .. }
                        | Move::AllGather { from, count, .. }
                        | Move::Broadcast { from, count, .. } => world.read(rank, from, count),
                        Move::ReduceScatter { from, count, .. } => {
                            world.read(rank, from, count * ranks)
                        }
                        other => panic!("{other:?} is not made by all ranks"),
                    })
                    .collect()
            };
            match calls[rank][index] {
                Move::AllReduce { into, op: 0, .. } => {
                    let sum = self.sum(&sources(self));
                    self.write(rank, into, &sum);
                }
                Move::Reduce {
                    into, root, op: 0, ..
                } if root == rank => {
                    let sum = self.sum(&sources(self));
                    self.write(rank, into, &sum);
                }
                Move::Reduce { into, .. } => assert_eq!(into, 0),
                Move::Broadcast { into, root, .. } => {
                    let data = sources(self)[root].clone();
                    self.write(rank, into, &data);
                }
                Move::AllGather { into, .. } => {
                    let data = sources(self).concat();
                    self.write(rank, into, &data);
                }
                Move::ReduceScatter {
                    into, count, op: 0, ..
                } => {
                    let sum = self.sum(&sources(self));
                    let part = count * self.wire.size;
                    self.write(rank, into, &sum[rank * part..][..part]);
                }
                Move::Send { from, count, peer } => {
                    let data = self.read(rank, from, count);
                    // Sends and receives between two ranks match in order. Here there is one of each.
                    let into = calls[peer].iter().find_map(|call| match call {
                        Move::Receive {
                            into,
                            count: theirs,
                            peer,
                        } if *peer == rank => {
                            assert_eq!(*theirs, count);
                            Some(*into)
                        }
                        _ => None,
                    });
                    self.write(peer, into.expect("a receive for each send"), &data);
                }
                Move::Receive { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// The `result` bytes that each rank has at `INTO` after a call for which rank `r` has `values[r]` at `FROM`.
fn run(op: TensorOp, dtype: ElementType, values: &[Vec<u8>], result: usize) -> Vec<Vec<u8>> {
    let reduces = !matches!(
        op,
        TensorOp::AllGather | TensorOp::AllToAll | TensorOp::Broadcast { .. }
    );
    let wire = on_wire(dtype, reduces).unwrap();
    let lens: Vec<usize> = values
        .iter()
        .map(|values| values.len() / (wire.size * wire.items))
        .collect();
    let mut world = World {
        memories: vec![vec![0; 40_000]; values.len()],
        wire,
    };
    for (rank, values) in values.iter().enumerate() {
        world.write(rank, FROM, values);
    }
    let calls: Vec<Vec<Move>> = (0..values.len())
        .map(|rank| {
            let share = Share {
                rank,
                lens: &lens,
                from: FROM,
                into: INTO,
                wire,
            };
            moves(Errand::All(op), &share)
        })
        .collect();
    assert!(calls.iter().all(|theirs| theirs.len() == calls[0].len()));
    for index in 0..calls[0].len() {
        world.step(&calls, index);
    }
    world
        .memories
        .iter()
        .map(|memory| memory[INTO as usize..][..result].to_vec())
        .collect()
}

fn samples(rank: usize, len: usize) -> Vec<u8> {
    (0..len as i32)
        .flat_map(|index| (index * 31 + rank as i32 * 7 - 50).to_le_bytes())
        .collect()
}

proptest! {
    #[test]
    fn any_lengths_are_gathered_in_the_ranks_order(
        lens in prop::collection::vec(0usize..20, 1..6),
        shorts in any::<bool>(),
    ) {
        // The same bytes are two `i16`s or one `i32`.
        let dtype = if shorts { ElementType::I16 } else { ElementType::I32 };
        let values: Vec<Vec<u8>> = lens.iter().enumerate().map(|(rank, len)| samples(rank, *len)).collect();
        let all = values.concat();
        for result in run(TensorOp::AllGather, dtype, &values, all.len()) {
            prop_assert_eq!(&result, &all);
        }
    }

    #[test]
    fn reductions_and_exchanges_do_what_they_say(ranks in 1usize..6, part in 0usize..9, root in 0usize..6) {
        let (root, len) = (root % ranks, part * ranks);
        let values: Vec<Vec<u8>> = (0..ranks).map(|rank| samples(rank, len)).collect();
        let bytes = 4 * part;
        let number = |rank: usize, index: usize| i32::from_le_bytes(values[rank][4 * index..][..4].try_into().unwrap());
        let sum: Vec<u8> = (0..len)
            .flat_map(|index| (0..ranks).map(|rank| number(rank, index)).sum::<i32>().to_le_bytes())
            .collect();
        let i32s = ElementType::I32;
        for result in run(TensorOp::AllReduce(ReduceOp::Sum), i32s, &values, 4 * len) {
            prop_assert_eq!(&result, &sum);
        }
        let reduced = run(TensorOp::Reduce { op: ReduceOp::Sum, root }, i32s, &values, 4 * len);
        for (rank, result) in reduced.iter().enumerate() {
            prop_assert_eq!(result, &if rank == root { sum.clone() } else { vec![0; 4 * len] });
        }
        for result in run(TensorOp::Broadcast { root }, i32s, &values, 4 * len) {
            prop_assert_eq!(&result, &values[root]);
        }
        let scattered = run(TensorOp::ReduceScatter(ReduceOp::Sum), i32s, &values, bytes);
        for (rank, result) in scattered.iter().enumerate() {
            prop_assert_eq!(&result[..], &sum[rank * bytes..][..bytes]);
        }
        let exchanged = run(TensorOp::AllToAll, i32s, &values, 4 * len);
        for (rank, result) in exchanged.iter().enumerate() {
            let expected: Vec<u8> = (0..ranks).flat_map(|from| values[from][rank * bytes..][..bytes].to_vec()).collect();
            prop_assert_eq!(result, &expected);
        }
    }
}

#[test]
fn messages_go_from_one_rank_to_another() {
    let share = Share {
        rank: 1,
        lens: &[3; 4],
        from: FROM,
        into: INTO,
        wire: on_wire(ElementType::I16, false).unwrap(),
    };
    let send = Move::Send {
        from: FROM,
        count: 6,
        peer: 3,
    };
    let receive = Move::Receive {
        into: INTO,
        count: 6,
        peer: 0,
    };
    assert_eq!(moves(Errand::Send { to: 3 }, &share), [send]);
    assert_eq!(moves(Errand::Receive { from: 0 }, &share), [receive]);
    let nothing = Share {
        lens: &[0; 4],
        ..share
    };
    assert_eq!(moves(Errand::Send { to: 3 }, &nothing), []);
}
