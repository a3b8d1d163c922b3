//! One step: scaled, unscaled, checked, taken or skipped.

use super::loss_scaler_support::{Readbacks, gradients, loss, problem, values};
use burn::{
    nn::LinearConfig,
    optim::{AdamConfig, GradientsParams, SgdConfig},
    tensor::{DType, Device, FloatDType, Tensor},
};
use burn_amp::{LossScaler, LossScalerConfig, LossScalerError, Overflow};

/// As PyTorch tests it: a control without scaling and a scaled model, an infinity at one step.
#[test]
fn an_overflow_skips_the_step_and_nothing_else() {
    let device = Device::flex().autodiff();
    let (control, x) = problem(&device);
    let mut scaled = control.clone();
    let mut control = control;
    let (mut control_optim, mut optim) = (AdamConfig::new().init(), AdamConfig::new().init());
    let config = LossScalerConfig::new()
        .with_init_scale(1024.0)
        .with_growth_interval(2);
    let mut scaler = config.init().unwrap();
    let mut seen = Vec::new();
    for step in 0..5 {
        let overflow = step == 2;
        if !overflow {
            let grads = gradients(loss(&control, &x, false), &control);
            control = control_optim.step(0.05, control, grads);
        }
        let before = values(&scaled);
        let grads = gradients(scaler.scale(loss(&scaled, &x, overflow)), &scaled);
        let status;
        (scaled, status) = scaler.step(&mut optim, 0.05, scaled, grads);
        assert_eq!(status.overflow.is_some(), overflow);
        if let Some(overflow) = status.overflow {
            assert_eq!(overflow.parameters, ["weight", "bias"]);
            assert!(overflow.to_string().contains("weight, bias"), "{overflow}");
            assert_eq!(values(&scaled), before);
        }
        seen.push(scaler.current_scale());
    }
    assert_eq!(seen, [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]);
    assert_eq!(values(&scaled), values(&control));
    assert_eq!((scaler.state().steps, scaler.state().skipped), (5, 1));
}

#[test]
fn unscaled_gradients_are_those_of_the_loss() {
    let device = Device::flex().autodiff();
    let (model, x) = problem(&device);
    let scaler = LossScalerConfig::new()
        .with_init_scale(4096.0)
        .init()
        .unwrap();
    let plain = gradients(loss(&model, &x, false), &model);
    let plain = plain.get::<2>(model.weight.id).unwrap();
    let scaled = gradients(scaler.scale(loss(&model, &x, false)), &model);
    let unscaled = scaler.unscale(scaled, &model);
    assert!(unscaled.overflow().is_none());
    // A power of two changes no bit of the mantissa.
    let grad = unscaled.grads().get::<2>(model.weight.id).unwrap();
    assert_eq!(grad.into_data(), plain.into_data());
}

/// A gradient of 2^-26 is nothing in fp16 and something with a scale of 2^16.
#[test]
fn scaling_saves_gradients_from_underflow() {
    let device = burn_amp::Autocast::fp16()
        .device(Device::flex())
        .unwrap()
        .autodiff();
    let grad = |scaler: &LossScaler| {
        let model = LinearConfig::new(2, 1).with_bias(false).init(&device);
        let x = Tensor::<2>::ones([1, 2], &device);
        let loss = model.forward(x).mul_scalar(2f32.powi(-26)).sum();
        let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
        let unscaled = scaler.unscale(grads, &model);
        unscaled
            .grads()
            .get::<2>(model.weight.id)
            .unwrap()
            .into_data()
            .try_to_vec::<f32>()
            .unwrap()
    };
    let scaler = LossScalerConfig::new().init().unwrap();
    let off = LossScalerConfig::new().with_enabled(false).init().unwrap();
    assert_eq!(grad(&off), [0.0, 0.0]);
    assert_eq!(grad(&scaler), [2f32.powi(-26); 2]);
}

/// Gradients of a linear layer with one element out of order in its bias.
fn bias_gradient(bad: f32, device: &Device) -> (burn::nn::Linear, GradientsParams) {
    let (model, _) = problem(device);
    let device = device.clone().inner();
    let mut grads = GradientsParams::new();
    grads.register(model.weight.id, Tensor::<2>::ones([3, 2], &device));
    let bias = Tensor::<1>::from_floats([1.0, bad], &device);
    grads.register(model.bias.as_ref().unwrap().id, bias);
    (model, grads)
}

#[test]
fn the_parameters_that_overflowed_are_named() {
    let scaler = LossScalerConfig::new().init().unwrap();
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let (model, grads) = bias_gradient(bad, &Device::flex().autodiff());
        let unscaled = scaler.unscale(grads, &model);
        assert_eq!(unscaled.overflow().unwrap().parameters, ["bias"]);
        assert_eq!(unscaled.into_parts().0.len(), 0);
    }
    // The largest number is none.
    let (model, grads) = bias_gradient(f32::MAX, &Device::flex().autodiff());
    assert!(scaler.unscale(grads, &model).overflow().is_none());
    let many = Overflow {
        parameters: ["a", "b", "c", "d", "e", "f"].map(String::from).into(),
    };
    assert_eq!(
        many.to_string(),
        "the gradients of a, b, c, d overflowed and those of 2 more parameters"
    );
}

/// PyTorch's scale can fall to 0, where it makes every gradient NaN and steps all the same.
#[test]
fn a_scale_without_an_inverse_is_an_overflow() {
    let mut scaler = LossScalerConfig::new().init().unwrap();
    for _ in 0..200 {
        scaler.update(true);
    }
    assert_eq!(scaler.current_scale(), 0.0);
    let device = Device::flex().autodiff();
    let (model, x) = problem(&device);
    let before = values(&model);
    let grads = gradients(scaler.scale(loss(&model, &x, false)), &model);
    let (model, step) = scaler.step(&mut SgdConfig::new().init(), 0.1, model, grads);
    assert!(step.overflow.is_some());
    assert_eq!(values(&model), before);
}

#[test]
fn the_host_waits_once_a_step() {
    let (readbacks, device) = Readbacks::device();
    let (mut model, x) = problem(&device);
    let mut optim = AdamConfig::new().init();
    let mut scaler = LossScalerConfig::new().init().unwrap();
    for overflow in [false, true, false] {
        readbacks.take();
        let grads = gradients(scaler.scale(loss(&model, &x, overflow)), &model);
        let step;
        (model, step) = scaler.step(&mut optim, 0.1, model, grads);
        assert_eq!(step.overflow.is_some(), overflow);
        assert_eq!(readbacks.take(), 1);
    }
    // Disabled, not even then.
    let off = LossScalerConfig::new().with_enabled(false).init().unwrap();
    let grads = gradients(off.scale(loss(&model, &x, true)), &model);
    assert!(off.unscale(grads, &model).overflow().is_none());
    device.sync().unwrap();
    assert_eq!(readbacks.take(), 0);
}

/// A model whose layers are on two devices.
#[test]
fn gradients_may_be_on_several_devices() {
    let (_, there) = Readbacks::device();
    let scaler = LossScalerConfig::new().with_init_scale(4.0).init().unwrap();
    for bad in [1.0, f32::NAN] {
        let (a, mut grads) = bias_gradient(1.0, &Device::flex().autodiff());
        let (b, mut more) = bias_gradient(bad, &there);
        grads.register(b.weight.id, more.remove::<2>(b.weight.id).unwrap());
        let bias = b.bias.as_ref().unwrap().id;
        grads.register(bias, more.remove::<1>(bias).unwrap());
        let (b_weight, both) = (b.weight.id, vec![a, b]);
        let unscaled = scaler.unscale(grads, &both);
        let names = unscaled.overflow().map(|found| found.parameters.clone());
        assert_eq!(names, bad.is_nan().then(|| vec!["1.bias".to_string()]));
        let weight = unscaled.grads().get::<2>(b_weight).unwrap();
        assert_eq!(weight.device(), there.clone().inner());
        assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [0.25; 6]);
    }
}

/// Divided in f32 and rounded once, as PyTorch divides them; it refuses those of f16.
#[test]
fn gradients_of_other_dtypes() {
    let device = Device::flex();
    let grad = [1.0, 3.140625, -7e4];
    let scaler = LossScalerConfig::new().with_init_scale(3.0).init().unwrap();
    let unscale = |dtype: DType| {
        let (model, _) = problem(&device.clone().autodiff());
        let mut grads = GradientsParams::new();
        let bias = model.bias.as_ref().unwrap().id;
        grads.register(bias, Tensor::<1>::from_floats(grad, &device).cast(dtype));
        let unscaled = scaler.unscale(grads, &model);
        assert!(unscaled.overflow().is_none());
        let grad = unscaled.grads().get::<1>(bias).unwrap();
        assert_eq!(grad.dtype(), dtype);
        grad.cast(FloatDType::F32).into_data()
    };
    let by_hand = |dtype: DType| {
        let stored = Tensor::<1>::from_floats(grad, &device).cast(dtype);
        let third = stored.cast(FloatDType::F32).mul_scalar(1.0f32 / 3.0);
        third.cast(dtype).cast(FloatDType::F32).into_data()
    };
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        assert_eq!(unscale(dtype), by_hand(dtype), "{dtype:?}");
    }
    let refused = std::panic::catch_unwind(|| unscale(DType::F16)).unwrap_err();
    let message = refused.downcast_ref::<String>().unwrap();
    assert!(message.contains("gradient of bias is f16"), "{message}");
}

#[test]
fn an_update_wants_the_steps_of_its_scale() {
    let (model, grads) = bias_gradient(f32::NAN, &Device::flex().autodiff());
    let mut scaler = LossScalerConfig::new().with_init_scale(8.0).init().unwrap();
    let nothing = scaler.update_after([]).unwrap_err();
    assert_eq!(nothing, LossScalerError::NothingChecked);
    let (_, step) = scaler.unscale(grads, &model).into_parts();
    assert_eq!((step.scale, scaler.current_scale()), (8.0, 8.0));
    scaler.update_after([&step]).unwrap();
    assert_eq!(scaler.current_scale(), 4.0);
    let stale = scaler.update_after([&step]).unwrap_err();
    assert_eq!(
        stale,
        LossScalerError::Stale {
            step: 1,
            scale: 8.0,
            next: 2,
            current: 4.0
        }
    );
    assert!(stale.to_string().contains("the loss scale 8"), "{stale}");
    assert_eq!(scaler.state().steps, 1);
}

/// PyTorch's `update(new_scale)` sets the scale and does nothing else.
#[test]
fn setting_the_scale_stands_in_place_of_an_update() {
    let device = Device::flex().autodiff();
    let (model, grads) = bias_gradient(1.0, &device);
    let config = LossScalerConfig::new().with_init_scale(8.0);
    let (mut scaler, mut on_device) = (config.init().unwrap(), config.init_on(&device).unwrap());
    scaler.update(false);
    on_device.update(Tensor::from_data([false], &device));
    let (_, step) = scaler.unscale(grads, &model).into_parts();
    scaler.set_scale(2.0).unwrap();
    on_device.set_scale(2.0).unwrap();
    assert_eq!(
        (scaler.current_scale(), scaler.state().growth_tracker),
        (2.0, 1)
    );
    assert_eq!(&on_device.state(), scaler.state());
    let both = scaler.update_after([&step]).unwrap_err();
    let (step, scale, current) = (2, 8.0, 2.0);
    assert_eq!(
        both,
        LossScalerError::SetSince {
            step,
            scale,
            current
        }
    );
    assert!(both.to_string().contains("set to 2"), "{both}");
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        for error in [scaler.set_scale(scale), on_device.set_scale(scale)] {
            let what = "scale";
            assert!(matches!(error, Err(LossScalerError::Invalid { what: of, .. }) if of == what));
        }
    }
}

/// PyTorch refuses an update after no new step, also where the scale stays as it is.
#[test]
fn a_step_counts_once() {
    let (model, grads) = bias_gradient(1.0, &Device::flex().autodiff());
    let mut scaler = LossScalerConfig::new().init().unwrap();
    let (_, step) = scaler.unscale(grads, &model).into_parts();
    scaler.update_after([&step]).unwrap();
    assert_eq!(scaler.current_scale(), step.scale);
    let stale = scaler.update_after([&step]).unwrap_err();
    assert!(
        matches!(
            stale,
            LossScalerError::Stale {
                step: 1,
                next: 2,
                ..
            }
        ),
        "{stale}"
    );
    assert_eq!(scaler.state().growth_tracker, 1);
}

/// PyTorch's `clip_grad_norm_`: all gradients times `max_norm / (norm + 1e-6)`, if that is below 1.
#[test]
fn gradients_are_clipped_by_the_norm_of_all() {
    let device = Device::flex().autodiff();
    let (model, x) = problem(&device);
    let config = LossScalerConfig::new().with_init_scale(256.0);
    let (host, on_device) = (config.init().unwrap(), config.init_on(&device).unwrap());
    let flat = |grads: &GradientsParams| {
        let weight = grads.get::<2>(model.weight.id).unwrap().into_data();
        let bias = grads.get::<1>(model.bias.as_ref().unwrap().id).unwrap();
        let all = [weight, bias.into_data()];
        all.iter()
            .flat_map(|data| data.iter::<f64>())
            .collect::<Vec<_>>()
    };
    let plain = flat(&gradients(loss(&model, &x, false), &model));
    let norm = plain.iter().map(|value| value * value).sum::<f64>().sqrt();
    for max_norm in [0.25 * norm, 4.0 * norm] {
        let factor = (max_norm / (norm + 1e-6)).min(1.0);
        let expected = plain.iter().map(|value| value * factor);
        let scaled = |loss| gradients(loss, &model);
        let grads = scaled(host.scale(loss(&model, &x, false)));
        let (clipped, found) = host.unscale(grads, &model).clip_norm(&model, max_norm);
        let grads = scaled(on_device.scale(loss(&model, &x, false)));
        let (there, found_there) = on_device.unscale(grads, &model).clip_norm(&model, max_norm);
        let found_there: f32 = found_there.unwrap().into_scalar();
        assert!((found / norm - 1.0).abs() < 1e-6);
        assert!((f64::from(found_there) / norm - 1.0).abs() < 1e-6);
        let mut kept = None;
        let there = there.map(|grads| {
            kept = Some(flat(&grads));
            grads
        });
        drop(there);
        for found in [flat(clipped.grads()), kept.unwrap()] {
            for (found, expected) in found.iter().zip(expected.clone()) {
                assert!(
                    (found - expected).abs() <= 1e-6 * expected.abs(),
                    "{max_norm}"
                );
            }
        }
    }
}

/// Their norm is NaN. That of gradients which overflowed is not finite in any case.
#[test]
fn gradients_of_a_step_that_is_skipped_are_not_clipped() {
    let device = Device::flex().autodiff();
    let scaler = LossScalerConfig::new().with_init_scale(4.0).init().unwrap();
    for bad in [f32::INFINITY, f32::NAN] {
        let (model, grads) = bias_gradient(bad, &device);
        let (clipped, norm) = scaler.unscale(grads, &model).clip_norm(&model, 0.125);
        assert!(clipped.overflow().is_some() && norm.is_nan(), "{norm}");
    }
    // Another rank's gradients overflowed.
    let (model, grads) = bias_gradient(1.0, &device);
    let unscaled = scaler.unscale(grads, &model).agree(true);
    let (clipped, norm) = unscaled.clip_norm(&model, 0.125);
    assert!(clipped.overflow().is_some() && norm.is_nan(), "{norm}");
    let weight = clipped.grads().get::<2>(model.weight.id).unwrap();
    assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [0.25; 6]);
}
