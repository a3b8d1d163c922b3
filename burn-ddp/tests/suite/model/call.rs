//! Makes the call of a step, and checks its result.

use burn::tensor::{Device, Tensor, TensorData};
use burn_ddp::{DdpError, Pending, ProcessGroup, ReduceOp, TensorOp};

use super::{
    program::{Step, What},
    values::{Value, draw, is_reduced, mix},
};

/// The bytes of the arrays or tensors that a call returns.
pub(crate) type Bytes = Vec<Vec<u8>>;

/// The result of a call, once it is waited for.
pub(crate) type Waiting = Box<dyn FnOnce() -> Result<Bytes, DdpError>>;

fn bytes<T: Value>(all: Vec<Vec<T>>) -> Bytes {
    let each = all.iter().map(|it| bytemuck::cast_slice(it).to_vec());
    each.collect()
}

fn now<T: Value>(result: Result<Vec<Vec<T>>, DdpError>) -> Waiting {
    let result = result.map(bytes);
    Box::new(move || result)
}

fn later<R: 'static, T: Value>(
    pending: Pending<R>,
    all: impl FnOnce(R) -> Vec<Vec<T>> + 'static,
) -> Waiting {
    Box::new(move || pending.wait().map(|result| bytes(all(result))))
}

/// What a rank passes.
fn input<T: Value>(step: &Step, rank: usize, ranks: usize, tensor: usize) -> Vec<T> {
    let seed = mix(step.seed ^ mix((rank * 8 + tensor) as u64));
    draw(seed, step.rows(rank, ranks) * step.width(), step.any)
}

/// What a rank says to `all_reduce_any`.
fn says(step: &Step, rank: usize) -> bool {
    (step.seed >> rank) % 8 < 3
}

/// Makes the call.
pub(crate) fn make<T: Value>(group: &ProcessGroup, step: &Step, asynchronous: bool) -> Waiting {
    match step.tensors {
        0 => make_of_slices::<T>(group, step, asynchronous),
        _ => make_of_tensors::<T>(group, step, asynchronous),
    }
}

fn make_of_slices<T: Value>(group: &ProcessGroup, step: &Step, asynchronous: bool) -> Waiting {
    let (rank, ranks) = (group.rank(), group.world_size());
    let (op, root) = (step.op, step.root % ranks);
    let mut data: Vec<T> = input(step, rank, ranks, 0);
    let one = |data: Vec<T>| vec![data];
    match (step.what, asynchronous) {
        (What::Barrier, false) => now::<T>(group.barrier().map(|()| Vec::new())),
        (What::Barrier, true) => later::<_, T>(group.barrier_async(), |()| Vec::new()),
        (What::AllReduce, false) => now(group.all_reduce(&mut data, op).map(|()| one(data))),
        (What::AllReduce, true) => later(group.all_reduce_async(data, op), one),
        (What::Reduce, false) => now(group.reduce(&mut data, op, root).map(|()| one(data))),
        (What::Reduce, true) => later(group.reduce_async(data, op, root), one),
        (What::Broadcast, false) => now(group.broadcast(&mut data, root).map(|()| one(data))),
        (What::Broadcast, true) => later(group.broadcast_async(data, root), one),
        (What::AllGather, false) => now(group.all_gather(&data).map(one)),
        (What::AllGather, true) => later(group.all_gather_async(data), one),
        (What::AllGatherUneven, false) => now(group.all_gather_uneven(&data)),
        (What::AllGatherUneven, true) => later(group.all_gather_uneven_async(data), |all| all),
        (What::ReduceScatter, false) => now(group.reduce_scatter(&data, op).map(one)),
        (What::ReduceScatter, true) => later(group.reduce_scatter_async(data, op), one),
        (What::AllToAll, false) => now(group.all_to_all(&data).map(one)),
        (What::AllToAll, true) => later(group.all_to_all_async(data), one),
        (What::Any, _) => {
            let any = group.all_reduce_any(says(step, rank));
            now(any.map(|any| vec![vec![u8::from(any)]]))
        }
        (What::Bytes, _) => {
            let all = group.broadcast_bytes(bytemuck::cast_slice(&data), root);
            now(all.map(|all| vec![all]))
        }
        (What::Message, _) => {
            let (from, to) = step.ends(ranks);
            let nothing = |()| Vec::<Vec<T>>::new();
            match (rank == from, rank == to, asynchronous) {
                (true, _, false) => now(group.send(&data, to).map(nothing)),
                (true, _, true) => later(group.send_async(data, to), nothing),
                (_, true, false) => now(group.recv(&mut data, from).map(|()| one(data))),
                (_, true, true) => later(group.recv_async(data, from), one),
                _ => now(Ok(nothing(()))),
            }
        }
        (What::Exchange, _) => {
            let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let mut into = data.clone();
            match asynchronous {
                false => {
                    let exchanged = group.send_recv(&data, to, &mut into, from);
                    now(exchanged.map(|()| one(into)))
                }
                true => later(group.send_recv_async(data, to, into, from), one),
            }
        }
        (What::Duplicate | What::Subgroup | What::Drop, _) => {
            unreachable!("these are no calls over data")
        }
    }
}

fn elements<T: Value>(tensor: Tensor<2, T::Kind>) -> Vec<T> {
    tensor
        .into_data()
        .try_into_vec()
        .expect("elements of this type")
}

/// Ops that take no tensors are made over slices.
fn make_of_tensors<T: Value>(group: &ProcessGroup, step: &Step, asynchronous: bool) -> Waiting {
    let (rank, ranks) = (group.rank(), group.world_size());
    let root = step.root % ranks;
    let tensor = |index: usize| {
        let shape = [step.rows(rank, ranks), step.width()];
        let data = TensorData::new(input::<T>(step, rank, ranks, index), shape);
        Tensor::<2, T::Kind>::from_data(data, (&Device::flex(), T::dtype()))
    };
    let op = match step.what {
        What::AllReduce => TensorOp::AllReduce(step.op),
        What::Reduce => TensorOp::Reduce { op: step.op, root },
        What::Broadcast => TensorOp::Broadcast { root },
        What::AllGather | What::AllGatherUneven => TensorOp::AllGather,
        What::ReduceScatter => TensorOp::ReduceScatter(step.op),
        What::AllToAll => TensorOp::AllToAll,
        What::Message => return make_of_a_message::<T>(group, step, tensor(0), asynchronous),
        _ => return make_of_slices::<T>(group, step, asynchronous),
    };
    let one = |tensor| vec![elements::<T>(tensor)];
    match (step.tensors, asynchronous) {
        (1, false) => now(group.collective(op, tensor(0)).map(one)),
        (1, true) => match group.collective_async(op, tensor(0)) {
            Ok(pending) => later(pending, one),
            Err(error) => now::<T>(Err(error)),
        },
        (several, _) => {
            let all = group.collective_many(op, (0..several).map(tensor).collect());
            now(all.map(|all| all.into_iter().map(elements::<T>).collect()))
        }
    }
}

fn make_of_a_message<T: Value>(
    group: &ProcessGroup,
    step: &Step,
    tensor: Tensor<2, T::Kind>,
    asynchronous: bool,
) -> Waiting {
    let rank = group.rank();
    let (from, to) = step.ends(group.world_size());
    let nothing = |()| Vec::<Vec<T>>::new();
    let one = |tensor| vec![elements::<T>(tensor)];
    match (rank == from, rank == to, asynchronous) {
        (true, _, false) => now(group.send_tensor(tensor, to).map(nothing)),
        (true, _, true) => match group.send_tensor_async(tensor, to) {
            Ok(pending) => later(pending, nothing),
            Err(error) => now::<T>(Err(error)),
        },
        (_, true, false) => now(group.recv_tensor(tensor, from).map(one)),
        (_, true, true) => match group.recv_tensor_async(tensor, from) {
            Ok(pending) => later(pending, one),
            Err(error) => now::<T>(Err(error)),
        },
        _ => now(Ok(nothing(()))),
    }
}

/// Checks what a rank got.
pub(crate) fn check<T: Value>(step: &Step, rank: usize, ranks: usize, found: &Bytes) {
    let root = step.root % ranks;
    let several = step.tensors.max(1);
    let of = |rank: usize, tensor: usize| input::<T>(step, rank, ranks, tensor);
    let part = |rank: usize, tensor: usize, of_rank: usize| {
        let all = of(rank, tensor);
        let width = all.len() / ranks;
        all[of_rank * width..][..width].to_vec()
    };
    let over_ranks = |row: &dyn Fn(usize) -> Vec<T>| (0..ranks).map(row).collect::<Vec<_>>();
    let each = |expected: &dyn Fn(usize) -> Vec<T>| {
        let all: Vec<Vec<T>> = (0..several).map(expected).collect();
        assert!(
            *found == bytes(all),
            "{step:?}: rank {rank} got another result"
        );
    };
    let reduced = |rows: &dyn Fn(usize) -> Vec<Vec<T>>| {
        assert_eq!(found.len(), several, "{step:?}");
        for (tensor, found) in found.iter().enumerate() {
            is_reduction(step, &rows(tensor), found);
        }
    };
    match step.what {
        What::AllReduce => reduced(&|tensor| over_ranks(&|it| of(it, tensor))),
        What::Reduce if rank == root => reduced(&|tensor| over_ranks(&|it| of(it, tensor))),
        What::Reduce => each(&|tensor| of(rank, tensor)),
        What::ReduceScatter => reduced(&|tensor| over_ranks(&|it| part(it, tensor, rank))),
        What::Broadcast => each(&|tensor| of(root, tensor)),
        What::AllGatherUneven if step.tensors == 0 => {
            let all = over_ranks(&|it| of(it, 0));
            assert!(
                *found == bytes(all),
                "{step:?}: rank {rank} got another result"
            );
        }
        What::AllGather | What::AllGatherUneven => {
            each(&|tensor| over_ranks(&|it| of(it, tensor)).concat())
        }
        What::AllToAll => each(&|tensor| over_ranks(&|it| part(it, tensor, rank)).concat()),
        What::Any => {
            let any = (0..ranks).any(|rank| says(step, rank));
            assert_eq!(*found, [[u8::from(any)]], "{step:?}");
        }
        What::Bytes => assert_eq!(*found, bytes(vec![of(root, 0)]), "{step:?}"),
        What::Message if rank == step.ends(ranks).1 => {
            assert_eq!(*found, bytes(vec![of(step.ends(ranks).0, 0)]), "{step:?}");
        }
        What::Exchange => {
            let previous = (rank + ranks - 1) % ranks;
            assert_eq!(*found, bytes(vec![of(previous, 0)]), "{step:?}");
        }
        What::Barrier | What::Message | What::Duplicate | What::Subgroup | What::Drop => {
            assert!(found.is_empty(), "{step:?}");
        }
    }
}

fn is_reduction<T: Value>(step: &Step, rows: &[Vec<T>], found: &[u8]) {
    let found: Vec<T> = bytemuck::pod_collect_to_vec(found);
    assert_eq!(found.len(), rows[0].len(), "{step:?}");
    for (index, found) in found.into_iter().enumerate() {
        let parts: Vec<T> = rows.iter().map(|row| row[index]).collect();
        let right = match rows.len() {
            // A single rank's data stay as they are.
            1 => bytemuck::bytes_of(&found) == bytemuck::bytes_of(&parts[0]),
            _ => is_reduced(found, step.op, &parts, step.any),
        };
        assert!(right, "{step:?}: {found:?} of {parts:?} at {index}");
    }
}

/// Whether all ranks of a communicator must have the same bits.
pub(crate) fn is_alike(step: &Step) -> bool {
    step.what == What::AllReduce
}

/// The operator after one that integers have too.
pub(crate) fn other(op: ReduceOp) -> ReduceOp {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => ReduceOp::Max,
        ReduceOp::Max => ReduceOp::Min,
        ReduceOp::Min => ReduceOp::Product,
        ReduceOp::Product => ReduceOp::Sum,
    }
}
