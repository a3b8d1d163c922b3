//! Steps with the gradients of another module: PyTorch's scaler raises "No inf checks were recorded".

use super::{
    logged::logged,
    loss_scaler_device_optimizers::mixture,
    loss_scaler_support::{gradients, loss, problem, values},
};
use burn::{
    nn::Linear,
    optim::{GradientsParams, MultiGradientsParams, SgdConfig},
    tensor::{Bool, Device, Tensor},
};
use burn_amp::{
    DeviceOptimizer, DeviceSgdConfig, LossScalerConfig, LossScalerError, SharedLossScaler,
};

/// Every step that counts would double the scale.
fn eager() -> LossScalerConfig {
    LossScalerConfig::new().with_growth_interval(1)
}

/// A module, and gradients of another.
fn wrong() -> (Linear, GradientsParams) {
    let device = Device::flex().autodiff();
    let (model, _) = problem(&device);
    let (other, x) = problem(&device);
    (model, gradients(loss(&other, &x, false), &other))
}

fn assert_warned_once(warned: &[String]) {
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(warned[0].contains("none of the 2 gradients"), "{warned:?}");
}

#[test]
fn a_step_without_gradients_changes_nothing_and_warns_once() {
    let mut scaler = eager().init().unwrap();
    let (fresh, history) = (scaler.state().clone(), scaler.history().clone());
    let mut optim = SgdConfig::new().init();
    let warned = logged(|| {
        for _ in 0..3 {
            let (model, grads) = wrong();
            let before = values(&model);
            let (model, step) = scaler.step(&mut optim, 0.1, model, grads);
            assert!(step.overflow.is_none() && !step.checked);
            assert_eq!(values(&model), before);
        }
    });
    assert_warned_once(&warned);
    assert_eq!((scaler.state(), scaler.history()), (&fresh, &history));
}

#[test]
fn nor_does_one_inside_a_learner() {
    let scaler = SharedLossScaler::from(eager().init().unwrap());
    let fresh = scaler.with(|scaler| scaler.state().clone());
    let device = Device::flex().autodiff();
    let warned = logged(|| {
        let (model, _) = wrong();
        let (other, x) = problem(&device);
        let (grads, step) = scaler.gradients(loss(&other, &x, false), &model);
        assert!(grads.is_empty() && step.overflow.is_none());
        let (model, grads) = wrong();
        let grads = vec![(grads, device.clone().inner())];
        let grads = MultiGradientsParams { grads };
        let _ = scaler.step_multi(&mut SgdConfig::new().init(), 0.1, model, grads);
    });
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert_eq!(scaler.with(|scaler| scaler.state().clone()), fresh);
}

/// Of a model whose gradients are sharded.
#[test]
fn a_device_without_gradients_is_worth_no_warning() {
    let scaler = SharedLossScaler::from(eager().init().unwrap());
    let device = Device::flex().autodiff();
    let (model, x) = problem(&device);
    let grads = gradients(scaler.scale(loss(&model, &x, false)), &model);
    let parts = [GradientsParams::new(), grads].map(|grads| (grads, device.clone().inner()));
    let grads = MultiGradientsParams {
        grads: parts.into(),
    };
    let warned = logged(|| {
        let (_, step) = scaler.step_multi(&mut SgdConfig::new().init(), 0.1, model, grads);
        assert!(step.checked && step.overflow.is_none());
    });
    assert!(warned.is_empty(), "{warned:?}");
}

#[test]
fn an_update_wants_something_that_was_checked() {
    let mut scaler = eager().init().unwrap();
    let unchecked = || {
        let (model, grads) = wrong();
        scaler.unscale(grads, &model)
    };
    let (alone, agreed) = (unchecked(), unchecked().agree(false));
    let (_, alone) = alone.into_parts();
    let (_, agreed) = agreed.into_parts();
    let error = scaler.update_after([&alone]).unwrap_err();
    assert_eq!(error, LossScalerError::NothingChecked);
    assert_eq!(scaler.state().steps, 0);

    // Beside the step of another optimizer, and where ranks with gradients agreed.
    let (model, _) = problem(&Device::flex().autodiff());
    let (right, x) = problem(&Device::flex().autodiff());
    let grads = gradients(scaler.scale(loss(&right, &x, false)), &right);
    let (_, checked) = scaler.unscale(grads, &right).into_parts();
    scaler.update_after([&alone, &checked]).unwrap();
    assert_eq!(scaler.current_scale(), 2.0 * 65536.0);
    let mut scaler = eager().init().unwrap();
    scaler.update_after([&agreed]).unwrap();
    assert_eq!(scaler.current_scale(), 2.0 * 65536.0);

    // A disabled scaler checks nothing, and there is nothing to say about it.
    let mut off = eager().with_enabled(false).init().unwrap();
    let warned = logged(|| {
        let (_, step) = off.unscale(GradientsParams::new(), &model).into_parts();
        off.update_after([&step]).unwrap();
    });
    assert_eq!(warned, [""; 0]);
}

#[test]
fn nor_does_the_device_count_it() {
    let device = Device::flex();
    let mut scaler = eager().init_on(&device).unwrap();
    let fresh = scaler.state();
    let warned = logged(|| {
        for _ in 0..3 {
            let (model, grads) = wrong();
            let before = values(&model);
            let model = scaler.step(&mut mixture(), 0.1, model, grads);
            assert_eq!(values(&model), before);
        }
    });
    assert_warned_once(&warned);
    assert_eq!(scaler.state(), fresh);

    let (model, grads) = wrong();
    let unscaled = scaler.unscale(grads, &model);
    assert!(!unscaled.checked());
    assert!(!unscaled.overflow().into_scalar::<bool>());
    let no_rank = Tensor::<1, Bool>::from_data([false], &device);
    assert!(unscaled.agree(no_rank).checked());
}

/// The gradients of a whole model, unscaled with a part of it: the rest is scaled still, and nobody looked at it.
#[test]
fn gradients_of_other_parameters_are_left_out() {
    let device = Device::flex().autodiff();
    let (part, x) = problem(&device);
    let (other, _) = problem(&device);
    let whole = [part.clone(), other];
    let before = whole.each_ref().map(values);
    let scaler = eager().init().unwrap();
    let on_device = eager().init_on(&device).unwrap();
    let gradients = || {
        // What is left out has overflowed, besides.
        let sum = loss(&whole[0], &x, false) + loss(&whole[1], &x, true);
        GradientsParams::from_grads(scaler.scale(sum).backward(), &whole)
    };
    let expected = scaler.unscale(
        GradientsParams::from_grads(scaler.scale(loss(&part, &x, false)).backward(), &part),
        &part,
    );
    let expected = expected.step(&mut SgdConfig::new().init(), 0.1, part.clone());
    let expected = [values(&expected.0), before[1].clone()];
    let warned = logged(|| {
        for _ in 0..2 {
            let unscaled = scaler.unscale(gradients(), &part);
            assert!(unscaled.overflow().is_none());
            assert_eq!(unscaled.grads().len(), 2);
            let (stepped, step) = unscaled.step(&mut SgdConfig::new().init(), 0.1, whole.clone());
            assert!(step.checked);
            assert_eq!(stepped.each_ref().map(values), expected);
        }
    });
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(
        warned[0].contains("2 gradients are of parameters that the module"),
        "{warned:?}"
    );

    let mut sgd = DeviceOptimizer::from(DeviceSgdConfig::new().build());
    let warned = logged(|| {
        let unscaled = on_device.unscale(gradients(), &part);
        assert!(!unscaled.overflow().into_scalar::<bool>());
        let stepped = unscaled.step(&mut sgd, 0.1, whole.clone());
        assert_eq!(stepped.each_ref().map(values), expected);
    });
    assert_eq!(warned.len(), 1, "{warned:?}");
}
