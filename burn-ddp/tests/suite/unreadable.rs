//! Tensors that cannot be read: all ranks are told so, and why.

use burn::{
    module::Param,
    optim::GradientsParams,
    tensor::{Bytes, DType, Device, Tensor, TensorData},
};
use burn_ddp::{Ddp, DdpConfig, DdpError, ProcessGroup, ReduceOp, TensorOp, Values};

use crate::suite::ranks::locally;

/// Three numbers of a file that is not there, which is noticed when they are first used, as it is noticed of CubeCL's devices that
/// they fail.
fn unreadable() -> TensorData {
    let bytes = Bytes::from_file("/nowhere/to/be/found", 12, 0);
    TensorData::from_bytes(bytes, [3], DType::F32)
}

type Call = fn(&ProcessGroup, Tensor<1>) -> Result<(), DdpError>;

#[test]
fn all_ranks_are_told_why_a_tensor_could_not_be_read() {
    let calls: [Call; 3] = [
        |group, tensor| {
            let sum = TensorOp::AllReduce(ReduceOp::Sum);
            group.collective(sum, tensor).map(drop)
        },
        |group, tensor| match group.rank() {
            0 => group.recv_tensor(tensor, 1).map(drop),
            _ => group.send_tensor(tensor, 0),
        },
        |group, tensor| {
            let ones = Tensor::<1>::ones([3], &Device::flex().autodiff());
            let model = [Param::from_tensor(ones)];
            let mut ddp = Ddp::new(group, DdpConfig::new(), &model)?;
            let mut gradients = GradientsParams::new();
            gradients.register(model[0].id, tensor);
            ddp.reduce_gradients(gradients, &model).map(drop)
        },
    ];
    for call in calls {
        let errors = locally(2, |group| {
            let data = match group.rank() {
                1 => unreadable(),
                _ => TensorData::from([0f32; 3]),
            };
            let tensor = Tensor::from_data(data, (&Device::flex(), DType::F32));
            call(&group, tensor).unwrap_err()
        });
        for error in errors {
            let DdpError::Aborted { rank: 1, reason } = &error else {
                panic!("{error}");
            };
            assert!(reason.starts_with("reading a tensor: "), "{reason}");
            assert!(reason.contains("No such file"), "{reason}");
        }
    }
}

#[test]
fn values_that_cannot_be_read_are_of_a_type_that_could_be() {
    let error = Values::from_data(unreadable()).unwrap_err();
    let DdpError::Device(problem) = &error else {
        panic!("{error}");
    };
    assert!(problem.contains("No such file"), "{problem}");
}
