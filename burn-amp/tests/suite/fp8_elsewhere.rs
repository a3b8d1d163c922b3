//! Fp8 asked for where there are no kernels for it.

use burn::{
    nn::LinearConfig,
    tensor::{Device, Tensor, TensorData},
};
use burn_amp::{Autocast, AutocastDevice, Layers, recipe::CurrentScaling};
use burn_flex::{Flex, FlexDevice};
use burn_layer::{Layered, LayeredDevice};

/// Output and gradients of a linear layer whose parameters are the same on every device.
fn pass(autocast: &AutocastDevice) -> [Vec<f32>; 3] {
    let device = autocast.device.clone().autodiff();
    let wave = |shape: [usize; 2]| {
        let values = (0..shape[0] * shape[1]).map(|place| (place as f32 * 0.37).sin());
        let data = TensorData::new(values.collect::<Vec<_>>(), shape);
        Tensor::<2>::from_data(data, &device).require_grad()
    };
    let mut linear = LinearConfig::new(32, 16).with_bias(false).init(&device);
    linear.weight = linear.weight.map(|_| wave([32, 16]));
    let x = wave([6, 32]);
    let output = linear.forward(x.clone());
    let gradients = output.clone().powi_scalar(2).mean().backward();
    let weight = linear.weight.grad(&gradients).unwrap();
    let read = |tensor: Tensor<2>| tensor.into_data().try_to_vec().unwrap();
    [
        read(output),
        read(x.grad(&gradients).unwrap()),
        read(weight),
    ]
}

/// Over layers, for instance, which are a backend of their own, linear layers run by the policy: as without fp8.
#[test]
fn without_kernels_layers_run_by_the_policy() {
    let layer = Autocast::fp8(CurrentScaling::new()).unwrap();
    let layer = layer.layer(&Device::flex()).unwrap();
    let under = LayeredDevice::new(FlexDevice, []);
    let layers = Layers::over::<Layered<Flex>>(under).layer(layer.clone());
    let fp8 = layer.on(layers.serve().unwrap());
    let bf16 = Autocast::bf16().with_report(Device::flex()).unwrap();
    assert_eq!(pass(&fp8), pass(&bf16));
    let (found, expected) = (fp8.report(), bf16.report());
    assert_eq!(found.fp8_runs(), 0);
    assert_eq!(found.ops, expected.ops);
    assert_eq!(found.low_bytes, expected.low_bytes);
}
