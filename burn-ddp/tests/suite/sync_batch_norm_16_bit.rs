//! Synchronized batch normalization of 16-bit inputs: statistics in `f32`.

use burn::{
    module::{Module, Param},
    nn::BatchNormConfig,
    tensor::{DType, Device, Tensor},
};
use burn_ddp::SyncBatchNorm;

use crate::suite::{
    ranks::locally,
    sync_batch_norm::{close, tensor, values},
};

#[test]
fn sixteen_bit_inputs_have_f32_statistics() {
    // Inputs and outputs are rounded to 8 bits of precision, the running statistics are not.
    for (dtype, tolerance) in [(DType::BF16, 0.03), (DType::F16, 0.004)] {
        for ranks in [1, 2] {
            for parameters in [DType::F32, dtype] {
                check_16_bit(dtype, tolerance, ranks, parameters);
            }
        }
    }
}

fn check_16_bit(dtype: DType, tolerance: f64, ranks: usize, parameters: DType) {
    let device = Device::flex().autodiff();
    let results = locally(ranks, |group| {
        let mut norm = SyncBatchNorm::new(&BatchNormConfig::new(1).init(&device), &group);
        for parameter in [&mut norm.gamma, &mut norm.beta] {
            let cast = parameter.val().inner().cast(parameters);
            *parameter = Param::from_tensor(Tensor::from_inner(cast));
        }
        // 1001 samples around 100: a 16-bit mean or variance would be far off.
        let len = 500 + group.rank();
        let samples: Vec<f64> = (0..len)
            .map(|index| 100.0 + ((group.rank() * 500 + index) % 7) as f64)
            .collect();
        let x = tensor(&samples, [len, 1], dtype, &device).require_grad();
        let y = norm.forward(x.clone());
        assert_eq!(y.dtype(), dtype);
        let weights: Vec<f64> = (0..len).map(|index| (index % 3) as f64).collect();
        let loss = y.clone() * tensor(&weights, [len, 1], dtype, &device);
        // In 16 bits, the sum itself would be far off; its gradient is exact.
        let gradients = loss.sum().backward();
        let gradient = x.grad(&gradients).unwrap();
        assert_eq!(gradient.dtype(), dtype);
        let dgamma = values(norm.gamma.grad(&gradients).unwrap());
        let running_mean = values(norm.running_mean.value_sync());
        let evaluated = norm.valid().forward(x.inner());
        assert_eq!(evaluated.dtype(), dtype);
        (
            samples,
            weights,
            values(y),
            values(gradient),
            dgamma,
            running_mean,
            values(evaluated),
        )
    });
    let joined = |of: fn(&Ranks) -> &Vec<f64>| -> Vec<f64> {
        results.iter().flat_map(|rank| of(rank).clone()).collect()
    };
    let all = joined(|rank| &rank.0);
    let weights = joined(|rank| &rank.1);
    let count = all.len() as f64;
    let mean = all.iter().sum::<f64>() / count;
    let variance = all.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / count;
    let deviation = (variance + 1e-5).sqrt();
    let normalized: Vec<f64> = all.iter().map(|it| (it - mean) / deviation).collect();
    close(&joined(|rank| &rank.2), &normalized, tolerance, "y");
    // Ioffe and Szegedy 2015, with gamma 1: dx = (dy - mean(dy) - x^ mean(dy x^)) / sigma.
    let products = || weights.iter().zip(&normalized).map(|(dy, x)| dy * x);
    let (dy_mean, product_mean) = (
        weights.iter().sum::<f64>() / count,
        products().sum::<f64>() / count,
    );
    let expected = weights.iter().zip(&normalized);
    let expected = expected.map(|(dy, x)| (dy - dy_mean - x * product_mean) / deviation);
    let expected: Vec<f64> = expected.collect();
    close(&joined(|rank| &rank.3), &expected, tolerance, "dx");
    // Summed over the batch in f32, from inputs that are exact.
    let dgamma: f64 = results.iter().map(|rank| rank.4[0]).sum();
    let expected: f64 = products().sum();
    let rounding = match parameters {
        DType::F32 => 1e-2,
        _ => tolerance * expected.abs().max(1.0),
    };
    assert!((dgamma - expected).abs() < rounding, "{dgamma} {expected}");
    for rank in &results {
        close(&rank.5, &[0.1 * mean], 1e-5, "running mean");
    }
    let deviation = (0.9 + 0.1 * variance + 1e-5).sqrt();
    let expected: Vec<f64> = all.iter().map(|it| (it - 0.1 * mean) / deviation).collect();
    close(&joined(|rank| &rank.6), &expected, tolerance, "evaluated");
}

/// Samples, their weights in the loss, outputs, gradients of samples and gamma, the running mean, outputs in
/// evaluation.
type Ranks = (
    Vec<f64>,
    Vec<f64>,
    Vec<f64>,
    Vec<f64>,
    Vec<f64>,
    Vec<f64>,
    Vec<f64>,
);
