//! Models with quantized weights, which are not trained.

use burn::{
    module::{Module, Quantizer},
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    tensor::{
        DType, Device, Distribution, Tensor, TensorData,
        quantization::{Calibration, QuantValue},
    },
};
use burn_ddp::{Ddp, DdpConfig, ModelEma};

use crate::suite::{net::contents, ranks::locally};

#[derive(Module, Debug)]
struct Model {
    base: Linear,
    head: Linear,
}

fn model(value: QuantValue, frozen: bool) -> Model {
    let device = Device::flex().autodiff();
    let scheme = device.settings().quantization.scheme.with_value(value);
    let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
    let base = LinearConfig::new(32, 32).with_bias(false).init(&device);
    let base = base.quantize_weights(&mut quantizer);
    Model {
        base: if frozen { base.freeze() } else { base },
        head: LinearConfig::new(32, 2).init(&device),
    }
}

fn base(model: &Model) -> TensorData {
    let weight = model.base.weight.base();
    assert!(matches!(weight.dtype(), DType::QFloat(_)));
    weight.dequantize().into_data()
}

#[test]
fn they_become_those_of_rank_0() {
    for value in [QuantValue::Q8S, QuantValue::Q4S, QuantValue::Q2S] {
        for frozen in [true, false] {
            let ranks = locally(3, |group| {
                let model = model(value, frozen);
                let own = base(&model);
                let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
                let model = ddp.broadcast_parameters(model).unwrap();
                let received = base(&model);
                // They stay, and the others are trained.
                let device = Device::flex().autodiff();
                let input = Tensor::<2>::random([4, 32], Distribution::Default, &device);
                let weight = model.base.weight.base().dequantize();
                let loss = model.head.forward(input.matmul(weight)).sum();
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                let gradients = ddp.reduce_gradients(gradients, &model).unwrap();
                let model = SgdConfig::new().init().step(0.1, model, gradients);
                base(&model).assert_eq(&received, true);
                (own, received, contents(&model.head))
            });
            for (own, received, head) in &ranks {
                received.assert_eq(&ranks[0].0, true);
                assert!(own == received || *own != ranks[0].0);
                assert_eq!(*head, ranks[0].2);
            }
            assert_ne!(ranks[1].0, ranks[0].0);
        }
    }
}

#[test]
fn an_average_of_weights_copies_them() {
    let mut trained = model(QuantValue::Q8S, true);
    let mut ema = ModelEma::new(&trained, 0.5);
    let first = contents(&trained.head);
    trained.head = LinearConfig::new(32, 2).init(&Device::flex().autodiff());
    ema.update(&trained);
    let averaged = ema.apply(&trained);
    base(&averaged).assert_eq(&base(&trained), true);
    let both = first.iter().zip(contents(&trained.head));
    let expected: Vec<f32> = both.map(|(a, b)| 0.5 * a + 0.5 * b).collect();
    assert_eq!(contents(&averaged.head), expected);
}
