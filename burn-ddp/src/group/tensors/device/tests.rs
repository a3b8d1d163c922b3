//! Calls by a model of NCCL in host memory, between threads with a device each.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::*;
use crate::{
    Backend, CallKind, Element, LocalGroup, Pending,
    local::tests::on_ranks,
    nccl::model::{Block, Model},
};

mod faults;

/// A rank with its own device.
#[derive(Clone)]
struct Rank {
    group: ProcessGroup,
    link: Arc<Link>,
}

fn open(group: &ProcessGroup, model: &Model, device: usize) -> Result<Arc<Link>, DdpError> {
    let what = (CallKind::Backend, ReduceOp::Sum, 0, 0);
    let open = |call: Collective<'_>| model.link(&call, device);
    group
        .run(what, ElementType::U8, open, || {
            unreachable!("there are several ranks")
        })
        .map(Arc::new)
}

/// Runs code on each rank and returns the results.
fn ranks<R: Send>(
    number: usize,
    timeout: Duration,
    code: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let groups = LocalGroup::with_settings(number, Backend::Nccl, timeout);
    on_ranks(groups, code)
}

const LONG: Duration = Duration::from_secs(60);

/// A communicator ends with the last call that uses it, which may still be running on its thread.
fn all_end(model: &Model) {
    let start = Instant::now();
    while model.alive() > 0 {
        assert!(start.elapsed() < LONG, "a communicator was not ended");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The same with a link. Checks that no communicator is left afterwards.
fn linked<R: Send>(
    number: usize,
    timeout: Duration,
    code: impl Fn(&Rank, &Model) -> R + Sync,
) -> (Vec<R>, Model) {
    let model = Model::new();
    let results = ranks(number, timeout, |group| {
        let device = 3 + group.rank();
        let link = open(&group, &model, device).unwrap();
        code(&Rank { group, link }, &model)
    });
    all_end(&model);
    (results, model)
}

impl Rank {
    fn block<T: Element>(&self, shape: impl Into<Shape>, data: &[T]) -> Block {
        Block::new(self.link.ordinal(), shape, data)
    }

    fn call<T: Element>(&self, op: TensorOp, blocks: Vec<Block>) -> Result<Vec<Block>, DdpError> {
        let place = self.group.inner.order.take();
        self.group.by_nccl(place, op, &self.link, blocks, T::TYPE)
    }

    /// As [`ProcessGroup::collective_async`] does.
    fn call_async<T: Element>(&self, op: TensorOp, block: Block) -> Pending<Vec<T>> {
        let (rank, place) = (self.clone(), self.group.inner.order.take());
        self.group.inner.worker.submit(move || {
            let results = rank
                .group
                .by_nccl(place, op, &rank.link, vec![block], T::TYPE)?;
            Ok(results[0].data())
        })
    }

    fn sum(&self, values: &[f32]) -> Result<Vec<f32>, DdpError> {
        let op = TensorOp::AllReduce(ReduceOp::Sum);
        Ok(self.call::<f32>(op, vec![self.block([values.len()], values)])?[0].data())
    }
}

/// Every call on a tensor of whole numbers, small enough for every type, by NCCL and through the host.
fn every_call<T: Element + From<u8>>(rank: &Rank, reduces: bool) {
    let (group, ranks) = (&rank.group, rank.group.world_size());
    for rows in [0, 1, 3] {
        let len = 2 * rows * ranks;
        let number = |index: usize| T::from((1 + (index + 2 * group.rank()) % 3) as u8);
        let own: Vec<T> = (0..len).map(number).collect();
        let block = || rank.block([len / 2, 2], &own);
        let by_nccl = |op: TensorOp| {
            let block = block();
            let (shape, before) = (block.shape(), block.address());
            let results = rank.call::<T>(op, vec![block]).unwrap();
            // Memory that is allocated before the call has the shape of the result.
            if let Some(room) = op.room(&shape, group.rank(), ranks) {
                assert_eq!(room, results[0].shape(), "{op:?}");
                assert_ne!(results[0].address(), before, "{op:?}");
            } else if op != TensorOp::AllGather {
                assert_eq!(results[0].address(), before, "{op:?}");
            }
            (results[0].shape()[0], results[0].data::<T>())
        };
        let root = ranks - 1;

        let mut broadcast = own.clone();
        group.broadcast(&mut broadcast, root).unwrap();
        assert_eq!(by_nccl(TensorOp::Broadcast { root }), (len / 2, broadcast));
        assert_eq!(
            by_nccl(TensorOp::AllToAll),
            (len / 2, group.all_to_all(&own).unwrap())
        );
        // Rank r contributes r rows and the last rank all; one of the ranks may contribute none.
        let mine = if group.rank() == root {
            len
        } else {
            2 * group.rank().min(len / 2)
        };
        let uneven = rank.block([mine / 2, 2], &own[..mine]);
        let gathered = rank.call::<T>(TensorOp::AllGather, vec![uneven]).unwrap();
        let expected = group.all_gather_uneven(&own[..mine]).unwrap().concat();
        assert_eq!(gathered[0].data::<T>(), expected);
        let expected = group.all_gather(&own).unwrap();
        assert_eq!(by_nccl(TensorOp::AllGather), (expected.len() / 2, expected));
        if !reduces {
            continue;
        }
        let means = T::IS_FLOAT.then_some(ReduceOp::Mean);
        let ops = [
            ReduceOp::Sum,
            ReduceOp::Product,
            ReduceOp::Min,
            ReduceOp::Max,
        ];
        for op in ops.into_iter().chain(means) {
            let mut all = own.clone();
            group.all_reduce(&mut all, op).unwrap();
            assert_eq!(by_nccl(TensorOp::AllReduce(op)), (len / 2, all), "{op:?}");
            let mut reduced = own.clone();
            group.reduce(&mut reduced, op, root).unwrap();
            let expected = if group.rank() == root {
                reduced
            } else {
                own.clone()
            };
            assert_eq!(by_nccl(TensorOp::Reduce { op, root }).1, expected, "{op:?}");
            let part = group.reduce_scatter(&own, op).unwrap();
            assert_eq!(
                by_nccl(TensorOp::ReduceScatter(op)),
                (part.len() / 2, part),
                "{op:?}"
            );
        }
    }
}

#[test]
fn every_call_of_every_type_does_what_it_does_through_the_host() {
    for number in [1, 2, 3, 5] {
        linked(number, LONG, |rank, _| {
            every_call::<f32>(rank, true);
            every_call::<f64>(rank, true);
            every_call::<half::f16>(rank, true);
            every_call::<half::bf16>(rank, true);
            every_call::<i32>(rank, true);
            every_call::<i64>(rank, true);
            every_call::<u8>(rank, true);
            every_call::<u32>(rank, true);
            every_call::<u64>(rank, true);
            // Types that NCCL does not know travel as bytes.
            every_call::<i16>(rank, false);
            every_call::<u16>(rank, false);
        });
    }
}

#[test]
fn several_tensors_are_one_group() {
    let (_, model) = linked(3, LONG, |rank, _| {
        let number = rank.group.rank() as f32;
        let blocks = vec![
            rank.block([2], &[number; 2]),
            rank.block([0], &[0f32; 0]),
            rank.block([1, 3], &[1f32; 3]),
        ];
        let sums = rank
            .call::<f32>(TensorOp::AllReduce(ReduceOp::Sum), blocks)
            .unwrap();
        let data: Vec<Vec<f32>> = sums.iter().map(Block::data).collect();
        assert_eq!(data, [vec![3.0; 2], vec![], vec![3.0; 3]]);
    });
    assert_eq!(model.launches(), 3);
}

#[test]
fn asynchronous_calls_wait_for_their_inputs_and_keep_their_order() {
    linked(2, LONG, |rank, _| {
        let pending: Vec<_> = [40, 1, 20, 0]
            .into_iter()
            .enumerate()
            .map(|(number, delay)| {
                let data = vec![(number + rank.group.rank()) as f32; 5];
                let after = Duration::from_millis(delay * (1 + rank.group.rank() as u64));
                let block = Block::later(rank.link.ordinal(), [5], data, after);
                rank.call_async::<f32>(TensorOp::AllReduce(ReduceOp::Sum), block)
            })
            .collect();
        // A synchronous call comes after them.
        assert_eq!(rank.sum(&[2.0]).unwrap(), [4.0]);
        for (number, sum) in pending.into_iter().enumerate() {
            assert_eq!(sum.wait().unwrap(), [2.0 * number as f32 + 1.0; 5]);
        }
        // Nobody waits for this call; its memory must live until the call is over.
        drop(rank.call_async::<f32>(TensorOp::AllGather, rank.block([1], &[1f32])));
        rank.group.barrier().unwrap();
    });
}

#[test]
fn messages_go_between_two_ranks_in_both_directions() {
    linked(3, LONG, |rank, _| {
        let me = rank.group.rank();
        let message = |data: &[i16], peer, sends| {
            let (group, block) = (&rank.group, rank.block([data.len()], data));
            let result = group.message_by_nccl(block, ElementType::I16, peer, sends, &rank.link);
            result.unwrap().data::<i16>()
        };
        for turn in 0..3 {
            let sent = [7 + turn, me as i16];
            match me {
                0 => {
                    message(&sent, 2, true);
                    assert_eq!(message(&[0; 2], 2, false), [7 + turn, 2]);
                }
                2 => {
                    assert_eq!(message(&[0; 2], 0, false), [7 + turn, 0]);
                    message(&sent, 0, true);
                }
                _ => {}
            }
        }
        assert_eq!(rank.sum(&[1.0]).unwrap(), [3.0]);
    });
}

#[test]
fn communicators_of_some_ranks_stand_beside_that_of_all() {
    let (models, all) = ([Model::new(), Model::new()], Model::new());
    ranks(4, LONG, |group| {
        let device = group.rank();
        let link = open(&group, &all, device).unwrap();
        let half = group.rank() % 2;
        let mut parts = [[0, 2], [3, 1]].map(|members| group.subgroup(&members).unwrap());
        let part = parts[half].take().expect("it is in its own half");
        let part = Rank {
            link: open(&part, &models[half], device).unwrap(),
            group: part,
        };
        let whole = Rank { group, link };
        for turn in 0..5 {
            let value = [(whole.group.rank() + turn) as f32];
            assert_eq!(whole.sum(&value).unwrap(), [6.0 + 4.0 * turn as f32]);
            assert_eq!(
                part.sum(&value).unwrap(),
                [[2.0, 4.0][half] + 2.0 * turn as f32]
            );
        }
    });
    for model in [&models[0], &models[1], &all] {
        all_end(model);
    }
}
