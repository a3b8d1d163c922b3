//! A single rank makes every call, on an NVIDIA GPU.

use std::{path::Path, time::Duration};

use burn::tensor::{DType, Device, Float, Int, Shape, Tensor};

use super::*;
use crate::{
    Call, CallKind, ElementType, ReduceOp, TensorOp,
    call::tests::barrier,
    nccl::{
        Errand, Resident, Source, faults::tests::Knowing, offer, on_wire, open, run,
        tensor_from_cube, tensor_to_cube,
    },
    transport::{Deadline, Transport},
};

fn collective(transport: &dyn Transport) -> Collective<'_> {
    Collective {
        transport,
        rank: 0,
        world_size: 1,
        call: Call {
            kind: CallKind::Backend,
            dtype: ElementType::F32,
            ..barrier()
        },
        deadline: Deadline::after(Duration::from_secs(60)),
    }
}

#[test]
fn one_rank_makes_every_call() {
    if !Path::new("/dev/nvidiactl").exists() {
        eprintln!("skipped: no NVIDIA GPU");
        return;
    }
    match offer(0) {
        Ok((gpu, version)) => eprintln!("NCCL {version} on {gpu}"),
        Err(error @ NcclError::NotFound { .. }) => {
            eprintln!("skipped: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    }
    let device = Device::cuda(0);
    let call = collective(&Knowing(0));
    let link = open(&call, 0).unwrap();
    let mean = ReduceOp::Mean;
    let ops = [
        TensorOp::AllReduce(ReduceOp::Sum),
        TensorOp::Reduce { op: mean, root: 0 },
        TensorOp::Broadcast { root: 0 },
        TensorOp::AllGather,
        TensorOp::ReduceScatter(ReduceOp::Max),
        TensorOp::AllToAll,
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        for op in ops {
            // The input has been submitted but not awaited, and is not contiguous. The output is used at once.
            let ones = Tensor::<2>::ones([1024, 1024], (&device, DType::F32));
            let scale = Tensor::<1, Int>::arange(0..1024, &device)
                .float()
                .reshape([1, 1024]);
            let made = ones.clone().matmul(ones) / 1024.0 * scale;
            let made = made.swap_dims(0, 1).slice([0..64, 0..32]).cast(dtype);
            let expected: Vec<f64> = (0..64 * 32)
                .map(|index| 2.0 * (index / 32) as f64)
                .collect();

            // For two of the operations, room for the results is allocated together with the sources.
            let along = matches!(op, TensorOp::AllReduce(_) | TensorOp::AllToAll);
            let room = |shape: &Shape| along.then(|| shape.clone());
            let sources = Source::all(vec![tensor_to_cube(made).unwrap()], room).unwrap();
            let shapes = sources.iter().map(Resident::shape).collect();
            let types = match dtype {
                DType::F32 => ElementType::F32,
                DType::F16 => ElementType::F16,
                DType::BF16 => ElementType::BF16,
                _ => ElementType::F64,
            };
            let wire = on_wire(types, true).unwrap();
            let lens = [vec![64 * 32]];
            let errand = Errand::All(op);
            let results = run(&link, &call, errand, wire, sources, &lens, shapes);
            let result: Tensor<2, Float> =
                tensor_from_cube(results.unwrap().pop().unwrap().into_tensor());
            let found: Vec<f64> = (result * 2.0).into_data().iter().collect();
            assert_eq!(found, expected, "{op:?} of {dtype:?}");
        }
    }
}
