//! The scale itself: against PyTorch's and DeepSpeed's.

use super::loss_scaler_support::traces;
use burn::tensor::Device;
use burn_amp::{LossScaler, LossScalerConfig, LossScalerError};

#[test]
fn it_follows_pytorchs_grad_scaler_step_for_step() {
    for trace in traces() {
        let mut scaler = trace.config().init().unwrap();
        for (overflow, expected) in trace.overflow.iter().zip(&trace.scale_and_tracker) {
            scaler.update(*overflow);
            let state = scaler.state();
            assert_eq!((state.scale, state.growth_tracker), *expected);
        }
    }
}

#[test]
fn the_defaults_are_pytorchs() {
    let config = LossScalerConfig::new();
    assert_eq!(config.init_scale, 65536.0);
    assert_eq!((config.growth_factor, config.backoff_factor), (2.0, 0.5));
    assert_eq!(config.growth_interval, 2000);
    assert!(config.enabled && config.dynamic && config.min_scale.is_none());
}

fn scales(mut scaler: LossScaler, overflows: &[bool]) -> Vec<f32> {
    let next = |overflow: &bool| {
        scaler.update(*overflow);
        scaler.current_scale()
    };
    overflows.iter().map(next).collect()
}

/// DeepSpeed with hysteresis 3 from 2^8: 2^8, 2^8, 2^7, 2^6.
#[test]
fn hysteresis_is_deepspeeds() {
    let config = LossScalerConfig::new()
        .with_init_scale(256.0)
        .with_hysteresis(3);
    let scaler = config.init().unwrap();
    assert_eq!(scales(scaler, &[true; 4]), [256.0, 256.0, 128.0, 64.0]);
    let scaler = config.with_consecutive_hysteresis(true).init().unwrap();
    let overflows = [true, true, false, true, true, true];
    assert_eq!(
        scales(scaler, &overflows),
        [256.0, 256.0, 256.0, 256.0, 256.0, 128.0]
    );
}

#[test]
fn the_scale_stays_within_its_bounds() {
    let config = LossScalerConfig::new()
        .with_init_scale(4.0)
        .with_growth_interval(1)
        .with_min_scale(Some(1.0))
        .with_max_scale(Some(8.0));
    assert_eq!(
        scales(config.init().unwrap(), &[true; 4]),
        [2.0, 1.0, 1.0, 1.0]
    );
    assert_eq!(scales(config.init().unwrap(), &[false; 3]), [8.0, 8.0, 8.0]);
    // Without bounds it stops below infinity, as PyTorch's does.
    let huge = LossScalerConfig::new()
        .with_init_scale(2f64.powi(127))
        .with_growth_interval(1);
    assert_eq!(scales(huge.init().unwrap(), &[false]), [2f32.powi(127)]);
}

#[test]
fn static_and_disabled_scales_do_not_change() {
    let config = LossScalerConfig::new().with_init_scale(8.0);
    let fixed = config.clone().with_dynamic(false).init().unwrap();
    assert_eq!(scales(fixed, &[true, false, true]), [8.0; 3]);
    let disabled = config.with_enabled(false).init().unwrap();
    assert_eq!(scales(disabled, &[true; 2]), [1.0; 2]);
}

#[test]
fn nonsense_is_refused() {
    let config = LossScalerConfig::new;
    for (config, what) in [
        (config().with_init_scale(0.0), "init_scale"),
        (config().with_init_scale(f64::NAN), "init_scale"),
        // Nothing in f32.
        (config().with_init_scale(1e-60), "init_scale"),
        (config().with_growth_factor(f64::INFINITY), "growth_factor"),
        (config().with_growth_factor(1.0), "growth_factor"),
        (config().with_backoff_factor(1.0), "backoff_factor"),
        (config().with_backoff_factor(0.0), "backoff_factor"),
        (config().with_growth_interval(0), "growth_interval"),
        (config().with_hysteresis(0), "hysteresis"),
        (
            config().with_min_scale(Some(2.0)).with_max_scale(Some(1.0)),
            "min_scale",
        ),
    ] {
        let error = config.init().unwrap_err();
        let LossScalerError::Invalid { what: found, .. } = error else {
            panic!("another error");
        };
        assert_eq!(found, what);
        let on_device = config.init_on(&Device::flex()).unwrap_err();
        assert_eq!(on_device.to_string(), error.to_string());
    }
    let mut scaler = config().init().unwrap();
    assert!(scaler.set_scale(f32::INFINITY).is_err());
    scaler.set_scale(2.0).unwrap();
    assert_eq!(scaler.current_scale(), 2.0);
}
