//! A parameter that stands in two places of a module has one gradient.

use burn::{
    module::{Module, Param, ParamId},
    optim::GradientsParams,
    tensor::{Device, Tensor},
};
use burn_amp::LossScalerConfig;

#[derive(Module, Debug)]
struct Tied {
    embedding: Param<Tensor<1>>,
    output: Param<Tensor<1>>,
}

fn tied(gradient: [f32; 2]) -> (Tied, GradientsParams) {
    let device = Device::flex();
    let weight = Param::initialized(ParamId::new(), Tensor::<1>::zeros([2], &device));
    let mut grads = GradientsParams::new();
    grads.register(weight.id, Tensor::<1>::from_floats(gradient, &device));
    let tied = Tied {
        embedding: weight.clone(),
        output: weight,
    };
    (tied, grads)
}

fn values(grads: &GradientsParams, model: &Tied) -> Vec<f32> {
    let grad = grads.get::<1>(model.output.id).unwrap();
    grad.into_data().try_to_vec().unwrap()
}

#[test]
fn it_is_unscaled_clipped_and_named_once() {
    let config = LossScalerConfig::new().with_init_scale(4.0);
    let (scaler, on_device) = (
        config.init().unwrap(),
        config.init_on(&Device::flex()).unwrap(),
    );
    // 4 times the gradient, whose norm is 5.
    let scaled = || tied([12.0, 16.0]);

    let (model, grads) = scaled();
    let unscaled = scaler.unscale(grads, &model);
    assert_eq!(values(unscaled.grads(), &model), [3.0, 4.0]);
    // From 5 to 1.
    let (clipped, norm) = unscaled.clip_norm(&model, 1.0);
    assert_eq!(norm, 5.0);
    for (found, expected) in values(clipped.grads(), &model).iter().zip([0.6, 0.8]) {
        assert!((found - expected).abs() < 1e-6, "{found}");
    }

    let (model, grads) = scaled();
    let (clipped, norm) = on_device.unscale(grads, &model).clip_norm(&model, 1.0);
    let norm: f32 = norm.unwrap().into_scalar();
    assert!((norm - 5.0).abs() < 1e-5, "{norm}");
    let _ = clipped.map(|grads| {
        for (found, expected) in values(&grads, &model).iter().zip([0.6, 0.8]) {
            assert!((found - expected).abs() < 1e-6, "{found}");
        }
        grads
    });

    let (model, grads) = tied([f32::NAN, 1.0]);
    let unscaled = scaler.unscale(grads, &model);
    assert_eq!(unscaled.overflow().unwrap().parameters, ["embedding"]);
}
