//! What autocast computes again in backward instead of keeping it: every bit is as if it were kept.

use super::{
    checkpointing::{pass, wave},
    devices::cube_devices,
};
use burn::{
    module::Module,
    nn::{
        BatchNormConfig, LinearConfig, PaddingConfig2d,
        conv::Conv2dConfig,
        transformer::{TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{
        DType, Device, Tensor,
        activation::{gelu, relu, softmax},
    },
};
use burn_amp::{Autocast, Policy, full_precision, recipe::CurrentScaling};
use burn_layer::ops_come_whole;

/// The loss and all gradients.
type Pass = (f32, Vec<Vec<f32>>);

/// Passes with and without, of the same model.
fn both<M: Module>(
    kind: &Autocast,
    plain: &Device,
    build: impl Fn(&Device) -> M,
    run: impl Fn(&M, &Device) -> Tensor<1>,
) -> [Pass; 2] {
    let record = build(plain).into_record();
    let [keeps, recomputes] = [false, true].map(|recompute| {
        let autocast = kind.clone().recompute(recompute);
        let autocast = autocast.lease(plain.clone()).unwrap();
        let device = autocast.device().autodiff();
        let model = build(&device).load_record(record.clone());
        let output = run(&model, &device);
        device.sync().unwrap();
        let forward = autocast.report().recomputed;
        assert_eq!(forward, 0, "forward finds what it has just made: {kind:?}");
        (pass(&model, output), autocast.report().recomputed)
    });
    assert_eq!(keeps.1, 0);
    assert!(recomputes.1 > 0, "{kind:?} on {plain:?}");
    [keeps.0, recomputes.0]
}

/// On Flex every bit is as if it were kept.
fn compare<M: Module>(build: impl Fn(&Device) -> M, run: impl Fn(&M, &Device) -> Tensor<1>) {
    for kind in [
        Autocast::bf16(),
        Autocast::fp16(),
        Autocast::new(Policy::o2()),
        Autocast::fp8(CurrentScaling::new()).unwrap(),
    ] {
        let [keeps, recomputes] = both(&kind, &Device::flex(), &build, &run);
        assert_eq!(recomputes, keeps, "{kind:?}");
        assert!(keeps.1.iter().flatten().any(|&gradient| gradient != 0.0));
    }
}

/// CubeCL may fuse what is computed again with other ops than before, and round products and sums together.
#[test]
fn gradients_are_the_same_on_cubecl() {
    for plain in cube_devices() {
        let kind = match plain.supports_dtype(DType::BF16) {
            true => Autocast::bf16(),
            false => Autocast::fp16(),
        };
        let [keeps, recomputes] = both(
            &kind,
            &plain,
            |device| LinearConfig::new(64, 64).with_bias(false).init(device),
            |linear, device| {
                let scores = linear.forward(wave([64, 64], device));
                // The softmax's kernels compute its own ops again, which are not counted.
                let output = linear.forward(softmax(scores.tanh().exp(), 1));
                // What is made after the softmax's input takes its place.
                output.tanh().exp().flatten(0, 1)
            },
        );
        let [expected, found] = [keeps, recomputes].map(|(_, gradients)| gradients.concat());
        let largest = expected.iter().fold(0f32, |max, x| x.abs().max(max));
        assert!(largest > 0.0 && expected.len() == found.len());
        for (expected, found) in expected.iter().zip(&found) {
            let error = (expected - found).abs();
            assert!(error <= 0.02 * largest, "{found} for {expected}, {plain:?}");
        }
    }
}

#[test]
fn a_transformer_has_the_same_gradients() {
    let config = TransformerEncoderConfig::new(64, 128, 4, 2)
        .with_dropout(0.0)
        .with_norm_first(true);
    compare(
        |device| config.init(device),
        |model, device| {
            let tokens = wave([4, 33, 64], device);
            model
                .forward(TransformerEncoderInput::new(tokens))
                .flatten(0, 2)
        },
    );
}

#[test]
fn a_convolution_has_the_same_gradients() {
    compare(
        |device| {
            let conv = |from| {
                Conv2dConfig::new([from, 8], [3, 3])
                    .with_padding(PaddingConfig2d::Same)
                    .init(device)
            };
            let norm = || BatchNormConfig::new(8).init(device);
            [(conv(3), norm()), (conv(8), norm())]
        },
        |layers, device| {
            let images = wave([4, 3, 16, 16], device);
            let output = layers.iter().fold(images, |x, (conv, norm)| {
                relu(norm.forward(conv.forward(x)))
            });
            output.flatten(0, 3)
        },
    );
}

/// A transposition of what is stored in bf16, for a region that computes in f32.
#[test]
fn views_are_in_the_dtype_of_their_region() {
    let [keeps, recomputes] = [false, true].map(|recompute| {
        let autocast = Autocast::bf16().recompute(recompute);
        let lease = autocast.lease(Device::flex()).unwrap();
        let x = wave([64, 64], &lease.device());
        let low = relu(x.clone().matmul(x));
        let turned = full_precision(|| low.clone().transpose());
        let sum = full_precision(|| turned + low.clone() * 1.001);
        sum.into_data().try_to_vec::<f32>().unwrap()
    });
    assert_eq!(recomputes, keeps);
    assert!(keeps.iter().any(|&x| x != 0.0 && x.to_bits() << 16 != 0));
}

#[test]
fn it_is_another_device() {
    let device = |autocast: Autocast| autocast.device(Device::flex()).unwrap();
    let keeps = device(Autocast::bf16().recompute(false));
    assert_ne!(keeps, device(Autocast::bf16()));
    assert_eq!(keeps, device(Autocast::bf16().recompute(false)));
    assert_eq!(
        device(Autocast::bf16().recompute(true)),
        device(Autocast::bf16())
    );
}

/// What a linear layer takes in fp8 stays in fp8, so that backward does not ask for it once more. And a policy that changes nothing
/// keeps all.
#[test]
fn only_what_16_bits_need_is_computed_again() {
    if !ops_come_whole() {
        return println!("SKIPPED: with Burn's own fusion, its client sends this op in parts");
    }
    let kinds = [
        Autocast::bf16(),
        Autocast::fp8(CurrentScaling::new()).unwrap(),
        Autocast::new(Policy::o0()),
    ];
    let [bf16, fp8, o0] = kinds.map(|kind| {
        let autocast = kind.lease(Device::flex()).unwrap();
        let device = autocast.device().autodiff();
        let layers = [0, 1, 2].map(|_| LinearConfig::new(64, 64).with_bias(false).init(&device));
        let x = wave([64, 64], &device);
        let output = layers.iter().fold(x, |x, linear| gelu(linear.forward(x)));
        let (_, gradients) = pass(&layers.to_vec(), output.flatten(0, 1));
        assert_eq!(gradients.len(), 3);
        autocast.report().recomputed
    });
    // The inputs of two of them. (The last output is there until backward begins.)
    assert_eq!((bf16, fp8, o0), (2, 0, 0));
}
