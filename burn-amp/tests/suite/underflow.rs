//! fp16 with and without loss scaling, on a training made to underflow.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    store::ModuleRecord,
    tensor::{Device, Tensor, TensorData},
};
use burn_amp::{Autocast, LossScalerConfig};

/// The loss is weighed by 2^-24 and the learning rate makes up for it: in f32 nothing changes, in
/// fp16, which holds nothing below 2^-24, every gradient on its way to a weight is zero.
const LOSS_WEIGHT: f64 = 1.0 / 16_777_216.0;
const STEPS: usize = 30;

fn wave<const D: usize>(shape: [usize; D], scale: f32, device: &Device) -> Tensor<D> {
    let value = |place| (place as f32 * 0.7).sin() * scale;
    let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Two layers learn a linear map; the mean squared error before and after every step.
fn losses(device: Device, first: &Linear, scaled: bool) -> Vec<f32> {
    let device = device.autodiff();
    let record = first.clone().into_record().into_bytes().unwrap();
    let record = ModuleRecord::from_bytes(record).unwrap();
    let config = LinearConfig::new(4, 2).with_bias(false);
    let mut model = config.init(&device).load_record(record);
    let mut optim = SgdConfig::new().init();
    let config = LossScalerConfig::new().with_enabled(scaled);
    let mut scaler = config.init().unwrap();
    let x = wave([16, 4], 1.0, &device);
    let targets = x.clone().matmul(wave([4, 2], 0.5, &device)).detach();

    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let loss = (model.forward(x.clone()) - targets.clone()).square().mean();
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = scaler.scale(loss * LOSS_WEIGHT).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        let step;
        (model, step) = scaler.step(&mut optim, 0.5 / LOSS_WEIGHT, model, grads);
        assert!(step.overflow.is_none());
    }
    losses
}

#[test]
fn fp16_learns_nothing_without_loss_scaling_and_as_f32_with_it() {
    let plain = Device::flex();
    let first = LinearConfig::new(4, 2).with_bias(false).init(&plain);
    let fp16 = || Autocast::fp16().device(plain.clone()).unwrap();

    let exact = losses(plain.clone(), &first, false);
    assert!(exact[STEPS - 1] < 0.2 * exact[0], "f32 learns: {exact:?}");

    let unscaled = losses(fp16(), &first, false);
    assert_eq!(unscaled, [unscaled[0]; STEPS], "nothing moves");

    let scaled = losses(fp16(), &first, true);
    for (scaled, exact) in scaled.iter().zip(&exact) {
        assert!(
            (scaled - exact).abs() < 0.02 * exact + 1e-4,
            "{scaled} against {exact}"
        );
    }
}
