//! Models of which only a part is trained, averaged during backward as after it.

use burn::{
    module::{Module, Param},
    optim::{GradientsParams, SgdConfig, momentum::MomentumConfig},
    tensor::{Device, Tensor},
};
use burn_ddp::{Ddp, DdpConfig, DdpError, ProcessGroup};

use crate::{
    net::contents,
    overlapped::{layered, results},
};

#[derive(Module, Debug)]
struct Parts {
    frozen: Param<Tensor<1>>,
    first: Param<Tensor<1>>,
    unused: Param<Tensor<1>>,
    last: Param<Tensor<1>>,
}

/// The parameters after some steps.
fn train(
    group: &ProcessGroup,
    device: &Device,
    make: impl FnOnce(&Parts) -> Result<Ddp, DdpError>,
) -> Result<Vec<f32>, DdpError> {
    let full = |value: f32| Param::from_tensor(Tensor::<1>::full([3], value, device));
    let rank = group.rank() as f32;
    let model = Parts {
        frozen: full(0.5 + rank).set_require_grad(false),
        first: full(0.25 + rank),
        unused: full(7.0 + rank),
        last: full(-0.5 - rank),
    };
    let mut ddp = make(&model)?;
    let mut model = ddp.broadcast_parameters(model)?;
    let momentum = MomentumConfig::new().with_momentum(0.9);
    let mut optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
    for step in 0..5 {
        let factor = 1.0 + rank + step as f32;
        let hidden = model.frozen.val() * model.first.val().mul_scalar(factor);
        // See `Overlap` for the factor.
        let last = model.last.val().mul_scalar(1.0);
        let loss = (hidden + last).powi_scalar(2).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model)?;
        assert_eq!(gradients.len(), 2);
        model = optimizer.step(0.01, model, gradients);
    }
    Ok(contents(&model))
}

/// Trains with and without overlap.
pub(crate) fn when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    let config = DdpConfig::new().bucket_bytes(12).first_bucket_bytes(12);
    let plain = train(group, &Device::flex().autodiff(), |model| {
        Ddp::new(group, config.clone(), model)
    })?;
    let (device, overlap) = layered(group, config)?;
    let overlapped = train(group, &device, |model| {
        Ddp::overlapped(group, overlap, model)
    })?;
    assert_eq!(overlapped, plain);
    // Those of rank 0, moved where they are trained.
    assert_eq!((plain[0], plain[6]), (0.5, 7.0));
    assert_ne!((plain[3], plain[9]), (0.25, -0.5));
    Ok(())
}

#[test]
fn what_is_not_trained_is_in_nobodys_way() {
    for (success, output) in results("overlapped partly", 3) {
        assert!(success, "{output}");
        assert!(!output.contains("LOG"), "{output}");
    }
}
