//! Calls with tensors, through the host, against results worked out by hand; and which way is chosen.

use std::fmt::Debug;

use burn::tensor::{
    DType, Device, Int, Shape, Tensor, TensorData,
    kind::{Autodiff, Numeric},
};
use burn_ddp::{Backend, DdpError, LocalGroup, NcclError, ProcessGroup, ReduceOp, TensorOp};

use crate::suite::{
    collectives::combine,
    ranks::{connected, locally, over_tcp, together},
};

/// Small whole numbers, exact in every type, whatever the order of the operations.
fn number(rank: usize, index: usize) -> f64 {
    ((rank * 7 + index * 3) % 5 + 1) as f64
}

fn numbers(rank: usize, len: usize) -> Vec<f64> {
    (0..len).map(|index| number(rank, index)).collect()
}

fn reduced(op: ReduceOp, ranks: usize, len: usize) -> Vec<f64> {
    let fold = |index| combine(op, (0..ranks).map(|rank| number(rank, index)));
    (0..len).map(fold).collect()
}

/// A tensor of a type on a device.
pub(crate) struct Maker<'a> {
    pub(crate) device: &'a Device,
    pub(crate) dtype: DType,
}

impl Maker<'_> {
    fn make<const D: usize, K: Numeric>(
        &self,
        values: Vec<f64>,
        shape: [usize; D],
    ) -> Tensor<D, K> {
        let data = TensorData::new(values, shape).convert_dtype(self.dtype);
        Tensor::from_data(data, (self.device, self.dtype))
    }

    #[track_caller]
    fn check<const D: usize, K: Numeric>(
        &self,
        result: Tensor<D, K>,
        expected: Vec<f64>,
        shape: [usize; D],
        what: impl Debug,
    ) {
        assert_eq!(result.dtype(), self.dtype, "{what:?}");
        assert_eq!(result.shape(), Shape::new(shape), "{what:?}");
        assert_eq!(&result.device(), self.device, "{what:?}");
        // As the type holds them.
        let expected = TensorData::new(expected, shape).convert_dtype(self.dtype);
        let (found, expected): (Vec<f64>, Vec<f64>) = (
            result.into_data().iter().collect(),
            expected.iter().collect(),
        );
        assert_eq!(found, expected, "{what:?}");
    }
}

/// Every call, over tensors with `rows` rows for each rank.
pub(crate) fn check_calls<K: Numeric + Autodiff + 'static>(
    group: &ProcessGroup,
    make: &Maker<'_>,
    rows: usize,
) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let (height, root) = (rows * ranks, rows % ranks);
    let len = height * 3;
    let own = || make.make::<2, K>(numbers(rank, len), [height, 3]);
    let mut ops = vec![
        ReduceOp::Sum,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
    ];
    match make.dtype.is_float() {
        true => ops.push(ReduceOp::Mean),
        false => {
            let mean = group.collective(TensorOp::AllReduce(ReduceOp::Mean), own());
            assert!(matches!(mean, Err(DdpError::InvalidArgument(_))));
        }
    }
    for op in ops {
        let expected = reduced(op, ranks, len);
        let call = TensorOp::AllReduce(op);
        let result = group.collective(call, own()).unwrap();
        make.check(result, expected.clone(), [height, 3], call);

        let call = TensorOp::Reduce { op, root };
        let result = group.collective(call, own()).unwrap();
        let mine = if rank == root {
            expected.clone()
        } else {
            numbers(rank, len)
        };
        make.check(result, mine, [height, 3], call);

        let call = TensorOp::ReduceScatter(op);
        let result = group.collective(call, own()).unwrap();
        let part = rank * rows * 3..(rank + 1) * rows * 3;
        make.check(result, expected[part].to_vec(), [rows, 3], call);
    }
    let call = TensorOp::Broadcast { root };
    let result = group.collective(call, own()).unwrap();
    make.check(result, numbers(root, len), [height, 3], call);

    let all: Vec<f64> = (0..ranks).flat_map(|rank| numbers(rank, len)).collect();
    let result = group.collective(TensorOp::AllGather, own()).unwrap();
    make.check(result, all, [ranks * height, 3], "even all-gather");

    let uneven: Vec<f64> = (0..ranks)
        .flat_map(|rank| numbers(rank, rank * rows * 3))
        .collect();
    let ours = make.make::<2, K>(numbers(rank, rank * rows * 3), [rank * rows, 3]);
    let result = group.collective(TensorOp::AllGather, ours).unwrap();
    let total = (0..ranks).sum::<usize>() * rows;
    make.check(result, uneven, [total, 3], "uneven all-gather");

    let exchanged: Vec<f64> = (0..ranks)
        .flat_map(|from| numbers(from, len)[rank * rows * 3..(rank + 1) * rows * 3].to_vec())
        .collect();
    let result = group.collective(TensorOp::AllToAll, own()).unwrap();
    make.check(result, exchanged, [height, 3], "all-to-all");

    // Asynchronous, in the order of submission.
    let sum = TensorOp::AllReduce(ReduceOp::Sum);
    let first = group.collective_async(sum, own()).unwrap();
    let second = group.collective_async(TensorOp::AllGather, own()).unwrap();
    let all: Vec<f64> = (0..ranks).flat_map(|rank| numbers(rank, len)).collect();
    make.check(second.wait().unwrap(), all, [ranks * height, 3], "second");
    let expected = reduced(ReduceOp::Sum, ranks, len);
    make.check(
        first.wait().unwrap(),
        expected.clone(),
        [height, 3],
        "first",
    );

    // Several at once.
    let results = group.collective_many(sum, vec![own(), own()]).unwrap();
    assert_eq!(results.len(), 2);
    for result in results {
        make.check(result, expected.clone(), [height, 3], "one of several");
    }

    if ranks > 1 {
        match rank {
            0 => group.send_tensor(own(), ranks - 1).unwrap(),
            last if last == ranks - 1 => {
                let result = group.recv_tensor(own(), 0).unwrap();
                make.check(result, numbers(0, len), [height, 3], "message");
            }
            _ => {}
        }
    }
    group.barrier().unwrap();
}

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
const INTS: [DType; 8] = [
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
];

pub(crate) fn check_types(group: &ProcessGroup, device: &Device) {
    for dtype in FLOATS {
        check_calls::<burn::tensor::Float>(group, &Maker { device, dtype }, 5);
    }
    for dtype in INTS
        .into_iter()
        .filter(|dtype| device.supports_dtype(*dtype))
    {
        check_calls::<Int>(group, &Maker { device, dtype }, 2);
    }
    // Nothing at all, and more than a network's packet.
    for rows in [0, 5_000] {
        let dtype = DType::F32;
        check_calls::<burn::tensor::Float>(group, &Maker { device, dtype }, rows);
    }
}

#[test]
fn tensors_of_all_types_go_through_the_host() {
    let device = Device::flex();
    let check = |group: ProcessGroup| {
        assert_eq!(group.tensor_backend(&device).unwrap(), Backend::Host);
        check_types(&group, &device);
    };
    over_tcp(2, 1, check);
    locally(3, check);
    check(ProcessGroup::single());
}

#[test]
fn results_have_no_history() {
    let device = Device::flex().autodiff();
    locally(2, |group| {
        let tensor = Tensor::<1>::ones([2], &device).require_grad() * 2.0;
        let result = group.collective(TensorOp::Broadcast { root: 1 }, tensor);
        assert!(!result.unwrap().device().is_autodiff());
    });
}

#[test]
fn wrong_tensors_are_refused_and_do_no_harm() {
    locally(2, |group| {
        let device = Device::flex();
        let tensor = |rows: usize| Tensor::<2>::ones([rows, 2], &device);
        let refused = |op, tensor| {
            let result = group.collective(op, tensor);
            assert!(
                matches!(result, Err(DdpError::InvalidArgument(_))),
                "{op:?}"
            );
        };
        refused(TensorOp::Broadcast { root: 2 }, tensor(2));
        refused(TensorOp::AllToAll, tensor(3));
        refused(TensorOp::ReduceScatter(ReduceOp::Sum), tensor(1));
        refused(TensorOp::AllGather, Tensor::ones([2, 0], &device));
        let sum = TensorOp::AllReduce(ReduceOp::Sum);
        let mixed = vec![tensor(1), tensor(1).cast(DType::F64)];
        assert!(group.collective_many(sum, mixed).is_err());
        let nothing: Vec<Tensor<2>> = Vec::new();
        assert!(group.collective_many(sum, nothing).unwrap().is_empty());
        let result = group.collective(sum, tensor(1)).unwrap();
        assert_eq!(result.into_data().try_to_vec::<f32>().unwrap(), [2.0; 2]);
    });
}

#[test]
fn messages_need_nothing_settled_where_nccl_is_out_of_the_question() {
    let device = Device::flex();
    let exchange = |group: &ProcessGroup| {
        let tensor = Tensor::<1>::full([2], group.rank() as f32, &device);
        match group.rank() {
            0 => group.send_tensor(tensor, 1).map(|()| 0.0),
            _ => {
                let received = group.recv_tensor(tensor + 7.0, 0)?;
                Ok(received.into_data().iter::<f32>().sum())
            }
        }
    };
    asking(&[Backend::Auto; 2], |group| {
        assert_eq!(exchange(&group).unwrap(), 0.0);
        group.tensor_backend(&device).unwrap();
        assert_eq!(exchange(&group).unwrap(), 0.0);
    });
    // Where NCCL was asked for, the ranks have to say first that they cannot have it.
    asking(&[Backend::Nccl; 2], |group| {
        let error = exchange(&group).unwrap_err();
        assert!(error.to_string().contains("call tensor_backend"), "{error}");
    });
}

/// Runs `body` on the ranks of groups that ask for backends.
fn asking<R: Send>(asked: &[Backend], body: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let builder = |rank: usize| ProcessGroup::builder().backend(asked[rank]);
    connected(asked.len(), builder, body)
}

#[test]
fn nccl_is_refused_on_all_ranks_where_one_has_no_gpu() {
    let refused = |group: ProcessGroup| {
        let tensor = Tensor::<1>::ones([1], &Device::flex());
        let sum = TensorOp::AllReduce(ReduceOp::Sum);
        let error = group.collective(sum, tensor).unwrap_err();
        assert!(error.is_setup());
        let DdpError::Nccl { rank: 0, reason } = &error else {
            panic!("{error}");
        };
        match cfg!(feature = "nccl") {
            true => assert!(matches!(reason, NcclError::NotOnCuda { .. }), "{error}"),
            false => assert_eq!(*reason, NcclError::NotCompiledIn),
        }
        // The group itself is as good as before, and says the same again.
        group.barrier().unwrap();
        assert!(matches!(
            group.tensor_backend(&Device::flex()),
            Err(DdpError::Nccl { .. })
        ));
    };
    asking(&[Backend::Nccl, Backend::Nccl], refused);
    together(LocalGroup::with_backend(2, Backend::Nccl), refused);
}

#[test]
fn ranks_ask_for_one_backend() {
    let errors = asking(&[Backend::Host, Backend::Auto], |group| {
        group
            .tensor_backend(&Device::flex())
            .unwrap_err()
            .to_string()
    });
    for error in errors {
        assert!(
            error.contains("`auto`") && error.contains("`host`"),
            "{error}"
        );
    }
}

#[cfg(feature = "cpu")]
#[test]
fn the_tensors_of_a_call_are_on_one_device() {
    let on = |device: Device| Tensor::<1>::zeros([2], &device);
    let op = TensorOp::AllReduce(ReduceOp::Sum);
    let tensors = vec![on(Device::flex()), on(Device::cpu())];
    let error = ProcessGroup::single()
        .collective_many(op, tensors)
        .unwrap_err();
    assert!(error.to_string().contains("expected one device"), "{error}");
    // Autodiff is no other device.
    let tensors = vec![on(Device::flex()), on(Device::flex().autodiff())];
    assert!(ProcessGroup::single().collective_many(op, tensors).is_ok());
}
