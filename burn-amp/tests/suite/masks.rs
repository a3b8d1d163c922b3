//! Constants that 16 bits cannot hold, and rows of scores that are masked entirely.

use burn::nn::loss::BinaryCrossEntropyLossConfig;
use burn::tensor::{
    Bool, Device, FloatDType, Int, Tensor, TensorData,
    activation::{sigmoid, softmax},
    module::attention,
    ops::{AttentionModuleOptions, PadMode},
};
use burn_amp::{Autocast, Policy};

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

fn ramp<const D: usize>(shape: [usize; D], step: f32, device: &Device) -> Tensor<D> {
    let count = shape.iter().product::<usize>() as i64;
    let ramp = Tensor::<1, Int>::arange(0..count, device).float();
    (ramp * step).cos().reshape(shape)
}

/// Scores by a product, so that they are stored low. The first row is masked entirely, the second in part.
fn masked(constant: f32, device: &Device) -> Tensor<2> {
    let scores = ramp([2, 3], 0.7, device).matmul(ramp([3, 4], 0.4, device));
    let mask = [[true; 4], [false, false, true, true]];
    scores.mask_fill(
        Tensor::<2, Bool>::from_data(TensorData::from(mask), device),
        constant,
    )
}

#[test]
fn a_finite_constant_stays_finite() {
    for (autocast, constant, expected) in [
        (Autocast::fp16(), -1e9, -65504.0),
        (Autocast::fp16(), 1e30, 65504.0),
        (Autocast::fp16(), -1e4, -1e4),
        (Autocast::bf16(), f32::MIN, -3.389_531_4e38),
        (Autocast::bf16(), -1e9, -998_244_352.0),
        (Autocast::bf16(), f32::NEG_INFINITY, f32::NEG_INFINITY),
        // Nothing is narrower than what the program sees.
        (Autocast::new(Policy::o0()), f32::MIN, f32::MIN),
    ] {
        let device = autocast.device(Device::flex()).unwrap();
        let filled = values(masked(constant, &device));
        assert_eq!(filled[..4], [expected; 4], "{constant}");
        assert_eq!(filled[6..], [expected; 2], "{constant}");
        if constant.is_finite() && constant < 0.0 {
            let rows = values(softmax(masked(constant, &device), 1));
            assert_eq!(rows[..4], [0.25; 4]);
            assert_eq!(rows[6..], [0.0; 2]);
        }
    }
    // A program that computes in fp16 by itself gets what a plain device gives.
    let fill = |device: &Device| {
        let zeros = Tensor::<1>::zeros([1], device).cast(FloatDType::F16);
        let everything = zeros.clone().equal_elem(0.0);
        values(zeros.mask_fill(everything, -1e9).cast(FloatDType::F32))
    };
    let autocast = Autocast::fp16().device(Device::flex()).unwrap();
    assert_eq!(fill(&autocast), fill(&Device::flex()));
}

/// By Burn's attention: in training it consists of several ops.
#[test]
fn a_finite_constant_that_pads_stays_finite() {
    for (autocast, constant, expected) in [
        (Autocast::fp16(), -1e9, -65504.0),
        (Autocast::fp16(), 1e-8, 1e-8),
        (Autocast::bf16(), f32::MIN, -3.389_531_4e38),
        (Autocast::bf16(), f32::NEG_INFINITY, f32::NEG_INFINITY),
    ] {
        // In training, Burn pads by other ops.
        for training in [false, true] {
            let device = autocast.clone().device(Device::flex()).unwrap();
            let device = if training { device.autodiff() } else { device };
            let low = ramp([2, 3], 0.7, &device).matmul(ramp([3, 2], 0.4, &device));
            let padded = values(low.pad([(1, 0), (0, 0)], PadMode::Constant(constant)));
            let found = padded[..2].to_vec();
            let whole = [constant; 2];
            assert!(
                found == [expected; 2] || (training && found == whole),
                "{constant}: {found:?}"
            );
        }
    }
}

#[test]
fn attention_of_a_row_that_is_masked_entirely_is_as_in_f32() {
    let attend = |device: &Device| {
        // By products, so that they are stored low.
        let low = |step| {
            let identity = Tensor::<2>::eye(4, device).reshape([1, 1, 4, 4]);
            ramp([1, 1, 3, 4], step, device).matmul(identity)
        };
        let query = low(0.7).require_grad();
        let mask = [[true; 3], [false, true, true], [false, false, true]];
        let mask = Tensor::<2, Bool>::from_data(TensorData::from(mask), device);
        let options = AttentionModuleOptions::default();
        let output = attention(
            query.clone(),
            low(0.4),
            low(0.3),
            Some(mask.reshape([1, 1, 3, 3])),
            None,
            options,
        );
        let gradients = output.clone().sum().backward();
        [values(output), values(query.grad(&gradients).unwrap())]
    };
    let expected = attend(&Device::flex().autodiff());
    for autocast in [Autocast::bf16(), Autocast::fp16()] {
        let device = autocast.device(Device::flex()).unwrap().autodiff();
        for (found, expected) in attend(&device).iter().zip(&expected) {
            assert!(expected.iter().all(|value| value.is_finite()));
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 0.02, "{found} is not {expected}");
            }
        }
    }
}

/// Numbers that are stored low, and the smallest constants that keep their logarithms and quotients finite.
#[test]
fn a_small_constant_does_not_vanish() {
    let small = |device: &Device| {
        let low = ramp([2, 3], 0.7, device).matmul(Tensor::<2>::zeros([3, 4], device));
        let tiny = f32::MIN_POSITIVE;
        [
            (low.clone() + 1e-8).log(),
            (low.clone() - (-1e-8)).log(),
            low.clone().clamp_min(tiny).log(),
            low.clone().clamp(1e-12, 1.0).log(),
            low.clone()
                .mask_fill(low.clone().lower_elem(tiny), tiny)
                .log(),
            low.clone().greater_elem(-1e-8).float(),
            low.clone().lower_equal_elem(-1e-8).float(),
            low.clone().greater_elem(f32::MIN).float(),
            // What was masked is found again.
            masked(-1e9, device).equal_elem(-1e9).float(),
            masked(f32::MIN, device).greater_elem(f32::MIN).float(),
            masked(f32::NEG_INFINITY, device)
                .lower_elem(f32::MIN)
                .float(),
            softmax(masked(f32::NEG_INFINITY, device).clamp_min(-1e9), 1).slice(0..1),
        ]
        .map(values)
    };
    let expected = small(&Device::flex());
    for autocast in [Autocast::fp16(), Autocast::bf16()] {
        let device = autocast.device(Device::flex()).unwrap();
        for (found, expected) in small(&device).iter().zip(&expected) {
            for (found, expected) in found.iter().zip(expected) {
                let close = (found - expected).abs() <= 0.004 * expected.abs();
                assert!(close, "{found} is not {expected}");
            }
        }
    }
}

/// As in losses of angles (ArcFace). At 1 and -1 the derivative of the arc cosine and the logarithm of the rest are infinite.
#[test]
fn a_bound_next_to_one_is_no_one() {
    let bounded = |device: &Device| {
        let identity = Tensor::<2>::eye(1, device);
        let cosines = Tensor::<2>::from_floats([[1.0], [-1.0], [0.5]], device).require_grad();
        let low = cosines.clone().matmul(identity);
        let inside = low.clone().clamp(-1.0 + 1e-7, 1.0 - 1e-7);
        let angles = inside.acos();
        let gradients = angles.clone().sum().backward();
        let rest = low.clamp_max(1.0 - 1e-7).neg().add_scalar(1.0).log();
        [angles, rest, cosines.grad(&gradients).unwrap()].map(values)
    };
    let expected = bounded(&Device::flex().autodiff());
    for autocast in [Autocast::fp16(), Autocast::bf16()] {
        let device = autocast.device(Device::flex()).unwrap().autodiff();
        for (found, expected) in bounded(&device).iter().zip(&expected) {
            for (found, expected) in found.iter().zip(expected) {
                let close = (found - expected).abs() <= 0.004 * expected.abs();
                assert!(close, "{found} is not {expected}");
            }
        }
    }
}

/// Under O2, from logits of 8.3 on, a probability in fp16 would be 1, and have no logarithm of its complement.
#[test]
fn probabilities_of_o2_have_logarithms() {
    let lease = Autocast::new(Policy::o2()).lease(Device::flex()).unwrap();
    let device = lease.device().autodiff();
    let logits = Tensor::<2>::from_floats([[12.0], [-12.0]], &device);
    let weight = Tensor::<2>::ones([1, 1], &device).require_grad();
    let probabilities = sigmoid(logits.matmul(weight.clone()));
    let targets = Tensor::<2, Int>::from_ints([[1], [0]], &device);
    let loss = BinaryCrossEntropyLossConfig::new().init(&device);
    let gradients = loss.forward(probabilities, targets).backward();
    let gradient = values(weight.grad(&gradients).unwrap());
    let expected = -12.0 / (1.0 + 12f32.exp());
    assert!(
        (gradient[0] - expected).abs() < 0.01 * expected.abs(),
        "{gradient:?} is not {expected}"
    );
}
