//! Gradients of several types.

use burn::{
    module::{Module, Param},
    optim::GradientsParams,
    tensor::{FloatDType, Tensor},
};
use burn_ddp::{Ddp, DdpConfig, DdpError, ProcessGroup};

use super::layered;
use crate::suite::ranks::all_succeed;

#[derive(Module, Debug)]
struct Many {
    parameters: Vec<Param<Tensor<1>>>,
}

/// Parameters of two types in turn.
pub(super) fn types_when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, DdpConfig::new())?;
    let parameter = |index: usize| {
        let dtype = [FloatDType::F32, FloatDType::BF16][index % 2];
        Param::from_tensor(Tensor::<1>::ones([3], &device).cast(dtype))
    };
    let model = Many {
        parameters: (0..10).map(parameter).collect(),
    };
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    for step in 0..2 {
        let terms = model.parameters.iter().enumerate().map(|(index, it)| {
            let factor = (index + step + 2 * group.rank()) as f32;
            it.val().mul_scalar(factor).cast(FloatDType::F32).sum()
        });
        let loss = terms.reduce(|a, b| a + b).unwrap();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model)?;
        for (index, it) in model.parameters.iter().enumerate() {
            let gradient = gradients.get::<1>(it.id).unwrap();
            assert_eq!(gradient.dtype(), it.val().dtype());
            let values: Vec<f32> = gradient.into_data().iter::<f32>().collect();
            assert_eq!(values, [(index + step + 1) as f32; 3]);
        }
        // 5 gradients of 12 bytes and 5 of 6.
        let timeline = ddp.timeline().unwrap();
        let mut bytes: Vec<usize> = timeline.buckets.iter().map(|it| it.bytes).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, [30, 60]);
    }
    Ok(())
}

#[test]
fn overlapped_types_have_a_bucket_each() {
    all_succeed("overlapped types", 2);
}
