//! Several optimizers and losses, accumulation, clipping, parameter groups.

use super::loss_scaler_support::{Readbacks, gradients, loss, problem, values};
use burn::{
    grad_clipping::GradientClippingConfig,
    module::ParamGroup,
    nn::Linear,
    optim::{
        AdamConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig,
        momentum::MomentumConfig,
    },
    tensor::{Device, Tensor},
};
use burn_amp::{LossScaler, LossScalerConfig, ScaledStep};

fn scaler() -> LossScaler {
    let config = LossScalerConfig::new()
        .with_init_scale(1024.0)
        .with_growth_interval(1);
    config.init().unwrap()
}

fn momentum() -> SgdConfig {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new()))
}

/// Two models, a loss each, one backward pass over both: where one overflows, the other steps, and
/// the scale they share backs off once.
#[test]
fn each_optimizer_skips_by_itself() {
    let device = Device::flex().autodiff();
    let (mut a, x) = problem(&device);
    let (mut b, _) = problem(&device);
    let (mut control, _) = problem(&device);
    let (mut optim_a, mut optim_b) = (momentum().init(), AdamConfig::new().init());
    let mut control_optim = AdamConfig::new().init();
    let mut scaler = scaler();
    let mut scales = Vec::new();
    for overflow in [false, true, false] {
        let before = values(&a);
        let losses = scaler.scale(loss(&a, &x, overflow)) + scaler.scale(loss(&b, &x, false));
        let mut grads = losses.backward();
        let grads_a = GradientsParams::from_module(&mut grads, &a);
        let grads_b = GradientsParams::from_module(&mut grads, &b);
        let (step_a, step_b): (ScaledStep, ScaledStep);
        (a, step_a) = scaler.unscale(grads_a, &a).step(&mut optim_a, 0.1, a);
        (b, step_b) = scaler.unscale(grads_b, &b).step(&mut optim_b, 0.1, b);
        scaler.update_after([&step_a, &step_b]).unwrap();

        assert_eq!(step_a.overflow.is_some(), overflow);
        assert!(step_b.overflow.is_none());
        assert_eq!(values(&a) == before, overflow);
        let grads = gradients(loss(&control, &x, false), &control);
        control = control_optim.step(0.1, control, grads);
        assert_eq!(values(&b), values(&control));
        scales.push(scaler.current_scale());
    }
    assert_eq!(scales, [2048.0, 1024.0, 2048.0]);
}

/// Train with and without scaling; `gradients_of` gives the gradients of the loss times a factor.
fn agrees_with_unscaled(
    optimizer: impl Fn() -> ModuleOptimizer,
    gradients_of: impl Fn(&Linear, &Tensor<2>, &dyn Fn(Tensor<1>) -> Tensor<1>) -> GradientsParams,
) {
    let device = Device::flex().autodiff();
    let (mut scaled, x) = problem(&device);
    let (mut control, _) = problem(&device);
    let start = values(&control);
    let (mut optim, mut control_optim) = (optimizer(), optimizer());
    let mut scaler = scaler();
    for _ in 0..4 {
        let grads = gradients_of(&control, &x, &|loss| loss);
        control = control_optim.step(0.1, control, grads);
        let grads = gradients_of(&scaled, &x, &|loss| scaler.scale(loss));
        scaled = scaler.step(&mut optim, 0.1, scaled, grads).0;
        // Powers of two change no bit of the mantissa.
        assert_eq!(values(&scaled), values(&control));
    }
    assert_ne!(values(&control), start);
}

#[test]
fn clipping_comes_after_unscaling() {
    for clipping in [
        GradientClippingConfig::Norm(0.05),
        GradientClippingConfig::Value(0.01),
    ] {
        let optimizer = || {
            momentum()
                .with_gradient_clipping(Some(clipping.clone()))
                .init()
        };
        agrees_with_unscaled(optimizer, |model, x, scale| {
            gradients(scale(loss(model, x, false)), model)
        });
    }
}

/// By the norm of all gradients together, which Burn's clipping does not do.
#[test]
fn unscaled_gradients_can_be_clipped_by_hand() {
    let device = Device::flex().autodiff();
    let (model, x) = problem(&device);
    let bias = model.bias.as_ref().unwrap().id;
    let clip = |mut grads: GradientsParams| {
        let weight = grads.remove::<2>(model.weight.id).unwrap();
        let of_bias = grads.remove::<1>(bias).unwrap();
        let norm = (weight.clone().square().sum() + of_bias.clone().square().sum()).sqrt();
        let factor = norm.recip().mul_scalar(0.5).clamp_max(1.0);
        grads.register(model.weight.id, weight * factor.clone().reshape([1, 1]));
        grads.register(bias, of_bias * factor);
        grads
    };
    let clipped = clip(gradients(loss(&model, &x, false), &model));
    let expected = momentum().init().step(1.0, model.clone(), clipped);
    let scaler = scaler();
    let scaled = gradients(scaler.scale(loss(&model, &x, false)), &model);
    let unscaled = scaler.unscale(scaled, &model).map(clip);
    let (stepped, step) = unscaled.step(&mut momentum().init(), 1.0, model.clone());
    assert!(step.overflow.is_none());
    assert_eq!(values(&stepped), values(&expected));
    let moved = values(&model).into_iter().zip(values(&stepped));
    let norm = moved
        .map(|(from, to)| (from - to).powi(2))
        .sum::<f32>()
        .sqrt();
    assert!((norm - 0.5).abs() < 1e-5, "{norm}");
}

fn accumulated(model: &Linear, losses: impl IntoIterator<Item = Tensor<1>>) -> GradientsParams {
    let mut accumulator = GradientsAccumulator::new();
    for loss in losses {
        accumulator.accumulate(model, gradients(loss, model));
    }
    accumulator.grads()
}

#[test]
fn gradients_accumulate_scaled() {
    agrees_with_unscaled(
        || AdamConfig::new().init(),
        |model, x, scale| {
            let parts = [1.0, 0.5].map(|by| loss(model, &x.clone().mul_scalar(by), false));
            accumulated(model, parts.map(scale))
        },
    );
}

/// An overflow in one part is in the sum, which is checked once.
#[test]
fn accumulated_gradients_are_checked_at_the_boundary() {
    let (readbacks, device) = Readbacks::device();
    let (model, x) = problem(&device);
    let before = values(&model);
    let mut scaler = scaler();
    readbacks.take();
    let parts = [false, true, false].map(|overflow| scaler.scale(loss(&model, &x, overflow)));
    let grads = accumulated(&model, parts);
    let (model, step) = scaler.step(&mut momentum().init(), 0.1, model, grads);
    assert_eq!(readbacks.take(), 1);
    assert!(step.overflow.is_some());
    assert_eq!((scaler.state().steps, scaler.current_scale()), (1, 512.0));
    assert_eq!(values(&model), before);
}

#[test]
fn parameter_groups_step_and_skip_together() {
    let optimizer = || {
        let adam = AdamConfig::new().build();
        momentum()
            .init()
            .with_group(ParamGroup::from_predicate("bias"), adam, None)
    };
    agrees_with_unscaled(optimizer, |model, x, scale| {
        gradients(scale(loss(model, x, false)), model)
    });

    let device = Device::flex().autodiff();
    let (model, x) = problem(&device);
    let mut optim = optimizer();
    let mut scaler = scaler();
    let grads = gradients(scaler.scale(loss(&model, &x, false)), &model);
    let (model, _) = scaler.step(&mut optim, 0.1, model, grads);
    let (before, state) = (values(&model), optim.to_record().into_bytes().unwrap());
    let grads = gradients(scaler.scale(loss(&model, &x, true)), &model);
    let (model, step) = scaler.step(&mut optim, 0.1, model, grads);
    assert!(step.overflow.is_some());
    assert_eq!(values(&model), before);
    // The order of a record is that of a hash map.
    let again = optim.to_record().into_bytes().unwrap();
    assert_eq!(sorted(&again), sorted(&state));
}

fn sorted(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.sort_unstable();
    bytes
}
