//! Batch normalization in training, against its formula.

use super::devices::{Leased, devices_and_cpu, exact};
use burn::tensor::{DType, Device, Tensor, TensorData, module::batch_norm_train};
use burn_layer::{Inputs, Layer, Layers, Op, Plan, ops_come_whole};
use std::sync::{Arc, Mutex};

const EPSILON: f64 = 1e-5;

/// Products in bf16 and statistics in f32, as autocast has them, or nothing changed. Writes down what is computed later than it was
/// called.
#[derive(Clone, Debug, Default)]
struct Mixed {
    low: bool,
    later: Arc<Mutex<Vec<Op>>>,
    stored: Arc<Mutex<Vec<(DType, usize)>>>,
}

impl Layer for Mixed {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        let wide = Plan::compute(DType::F32);
        self.low.then(|| match op {
            Op::float_matmul => Plan::compute(DType::BF16),
            Op::float_mean_dim | Op::float_sum_dim => wide,
            Op::batch_norm => wide.store(inputs.first),
            _ => inputs.promote(),
        })
    }

    fn recomputed(&self, op: Op) {
        self.later.lock().unwrap().push(op);
    }

    fn stored(&self, dtype: DType, _nominal: DType, elements: usize) {
        self.stored.lock().unwrap().push((dtype, elements));
    }
}

impl Mixed {
    fn device(&self, plain: &Device) -> Device {
        let layers = Layers::on(plain.clone()).layer(self.clone());
        layers.leased()
    }

    fn take_later(&self, device: &Device) -> Vec<Op> {
        device.sync().unwrap();
        core::mem::take(&mut self.later.lock().unwrap())
    }

    /// How many results of so many elements were stored in bf16.
    fn stored_low(&self, elements: usize) -> usize {
        let stored = self.stored.lock().unwrap();
        let low = stored.iter().filter(|&&it| it == (DType::BF16, elements));
        low.count()
    }
}

/// Whether a device fuses ops.
fn fuses(device: &Device) -> bool {
    cfg!(feature = "fusion") && *device != Device::flex()
}

/// Integers that bf16 holds, around `center`.
fn numbers(count: usize, step: usize, center: f32) -> Vec<f32> {
    let number = |place: usize| ((place * step + place / 5) % 23) as f32 - 11.0 + center;
    (0..count).map(number).collect()
}

/// Which dimension of an activation is the last in memory.
#[derive(Clone, Copy, Debug)]
enum Last {
    /// The last one.
    Samples,
    /// The channels, as a convolution leaves it.
    Channels,
}

/// The product of a leaf and the identity: an activation, which is equal to the leaf.
fn activation<const D: usize>(leaf: &Tensor<D>, in_memory: Last) -> Tensor<D> {
    let product = |x: Tensor<D>| {
        let dims = x.dims();
        let last = dims[D - 1];
        let rows = x.reshape([dims.iter().product::<usize>() / last, last]);
        rows.matmul(Tensor::eye(last, &leaf.device())).reshape(dims)
    };
    let mut axes: [isize; D] = core::array::from_fn(|dim| dim as isize);
    match in_memory {
        Last::Samples => product(leaf.clone()),
        Last::Channels => {
            axes[1..].rotate_left(1);
            let product = product(leaf.clone().permute(axes));
            axes.sort_unstable();
            axes[1..].rotate_right(1);
            product.permute(axes)
        }
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    let data = tensor.into_data().convert::<f64>();
    data.try_to_vec().unwrap()
}

/// What a batch normalization gives: mean, variance, output, and the gradients of input, gamma and beta.
type Results = [Vec<f64>; 6];

fn normalized<const D: usize>(
    dims: [usize; D],
    center: f32,
    in_memory: Last,
    device: &Device,
) -> Results {
    let (all, channels) = (dims.iter().product(), dims[1]);
    let data = TensorData::new(numbers(all, 7, center), dims);
    let leaf = Tensor::<D>::from_data(data, device).require_grad();
    let weight = Tensor::<D>::from_data(TensorData::new(numbers(all, 5, 0.0), dims), device);
    let [gamma, beta] = [3, 4].map(|step| {
        let data = TensorData::new(numbers(channels, step, 0.5), [channels]);
        Tensor::<1>::from_data(data, device).require_grad()
    });
    let activation = activation(&leaf, in_memory);
    let result = batch_norm_train(activation, gamma.clone(), beta.clone(), EPSILON);
    let loss = (result.output.clone() * weight).sum();
    let gradients = loss.backward();
    [
        values(result.mean),
        values(result.variance),
        values(result.output),
        values(leaf.grad(&gradients).unwrap()),
        values(gamma.grad(&gradients).unwrap()),
        values(beta.grad(&gradients).unwrap()),
    ]
}

/// The same by the formula.
fn expected<const D: usize>(dims: [usize; D], center: f32) -> Results {
    let (all, channels): (usize, usize) = (dims.iter().product(), dims[1]);
    let inner: usize = dims[2..].iter().product();
    let wide = |numbers: Vec<f32>| -> Vec<f64> { numbers.into_iter().map(f64::from).collect() };
    let (x, dy) = (wide(numbers(all, 7, center)), wide(numbers(all, 5, 0.0)));
    let (gamma, beta) = (
        wide(numbers(channels, 3, 0.5)),
        wide(numbers(channels, 4, 0.5)),
    );
    let channel = |place: usize| place / inner % channels;
    let samples = (all / channels) as f64;
    let sums = |value: &dyn Fn(usize) -> f64| -> Vec<f64> {
        let mut sums = vec![0.0; channels];
        (0..all).for_each(|place| sums[channel(place)] += value(place));
        sums
    };
    let means = |value: &dyn Fn(usize) -> f64| -> Vec<f64> {
        sums(value).into_iter().map(|sum| sum / samples).collect()
    };
    let mean = means(&|at| x[at]);
    let variance = means(&|at| (x[at] - mean[channel(at)]).powi(2));
    let deviation: Vec<f64> = variance.iter().map(|it| (it + EPSILON).sqrt()).collect();
    let normalized = |at: usize| (x[at] - mean[channel(at)]) / deviation[channel(at)];
    let output = |at: usize| normalized(at) * gamma[channel(at)] + beta[channel(at)];
    let (of_gamma, of_beta) = (sums(&|at| dy[at] * normalized(at)), sums(&|at| dy[at]));
    let of_x = |at: usize| {
        let channel = channel(at);
        let drift = of_beta[channel] + normalized(at) * of_gamma[channel];
        gamma[channel] / deviation[channel] * (dy[at] - drift / samples)
    };
    let outputs = (0..all).map(output).collect();
    let of_inputs = (0..all).map(of_x).collect();
    [mean, variance, outputs, of_inputs, of_gamma, of_beta]
}

/// The largest difference, relative to the largest value.
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected
        .iter()
        .fold(1.0, |largest: f64, it| largest.max(it.abs()));
    let pairs = found.iter().zip(expected);
    pairs.fold(0.0, |most: f64, (a, b)| most.max((a - b).abs())) / largest
}

fn check<const D: usize>(dims: [usize; D], center: f32) {
    for plain in devices_and_cpu() {
        let kinds = [Last::Samples, Last::Channels].map(|last| [(false, last), (true, last)]);
        for (low, in_memory) in kinds.into_iter().flatten() {
            if low && !plain.supports_dtype(DType::BF16) {
                println!("SKIPPED: {plain:?} has no bf16");
                continue;
            }
            let layer = Mixed {
                low,
                ..Mixed::default()
            };
            let device = layer.device(&plain).autodiff();
            let found = normalized(dims, center, in_memory, &device);
            let formula = expected(dims, center);
            let close = 2e-5;
            // Output and gradient of the input are stored in bf16, and the gradient comes out of a product.
            let (output, gradient) = match low {
                true => (1.0 / 256.0, 1.0 / 256.0),
                false => (close, exact(&plain).max(close)),
            };
            let tolerances = [close, close, output, gradient, close, close];
            for (of, tolerance) in tolerances.into_iter().enumerate() {
                let difference = difference(&found[of], &formula[of]);
                assert!(
                    difference < tolerance,
                    "{plain:?}, {dims:?}, low: {low}, {in_memory:?} last, result {of}: {difference}"
                );
            }
        }
    }
}

#[test]
fn statistics_are_those_of_the_formula() {
    check([4, 3, 5], 0.0);
    check([3, 5, 6, 7], 0.0);
    check([2, 3, 3, 2, 4], 0.0);
    check([1, 2, 9, 5], 0.0);
    check([17, 3, 2, 3], 0.0);
}

/// The variance is that of differences from the mean: a difference of squares would lose most of its digits here.
#[test]
fn a_large_mean_leaves_the_variance_exact() {
    check([4, 3, 8, 8], 100.0);
}

/// Where ops are fused, nothing of the input's size is computed for the statistics of forward. Backward computes the normalized
/// input, and the gradient less its mean, for the gradient of the input alone, which has the input's dtype.
#[test]
fn what_is_only_summed_is_not_computed() {
    let mut stored_low_without_fusion = None;
    for plain in devices_and_cpu() {
        if !plain.supports_dtype(DType::BF16) {
            println!("SKIPPED: {plain:?} has no bf16");
            continue;
        }
        let layer = Mixed {
            low: true,
            ..Mixed::default()
        };
        let device = layer.device(&plain).autodiff();
        let dims = [3, 5, 6, 7];
        normalized(dims, 0.0, Last::Samples, &device);
        let mut later = layer.take_later(&device);
        later.sort_unstable_by_key(|op| op.name());
        let expected: &[Op] = match (fuses(&plain), ops_come_whole()) {
            (true, true) => &[Op::float_mul, Op::float_sub, Op::float_sub],
            // Forward's output is computed by several ops, too, of which one is the difference from the mean.
            (true, false) => &[Op::float_mul, Op::float_sub, Op::float_sub, Op::float_sub],
            (false, _) => &[],
        };
        assert_eq!(later, expected, "{plain:?}");

        // The gradient, and its reshape. Without fusion it is as its last op computes it, in f32.
        let stored_low = layer.stored_low(dims.iter().product());
        match stored_low_without_fusion {
            None => stored_low_without_fusion = Some(stored_low),
            Some(without) if fuses(&plain) => assert_eq!(stored_low, without + 2, "{plain:?}"),
            Some(without) => assert_eq!(stored_low, without, "{plain:?}"),
        }
    }
}

/// The same ops in programs that are no batch normalization.
fn other_uses(device: &Device) -> Vec<Vec<f64>> {
    let dims = [3, 4, 5, 2];
    let data = TensorData::new(numbers(120, 7, 1.0), dims);
    let leaf = Tensor::<4>::from_data(data, device).require_grad();
    let x = activation(&leaf, Last::Samples);
    let swapped = x.clone().swap_dims(0, 1);
    let flat: Tensor<2> = swapped.clone().reshape([4, 30]);
    let mean = flat.clone().mean_dim(1);
    let centered = x.clone() - mean.clone().reshape([1, 4, 1, 1]);
    let squares = centered.clone() * centered.clone();
    let flat_squares: Tensor<2> = squares.clone().swap_dims(1, 0).reshape([4, 30]);
    let by_channel = Tensor::<1>::from_floats([1.0, -2.0, 0.5, 3.0], device).reshape([1, 4, 1, 1]);
    let scaled = centered.clone() * by_channel;
    let product = x.clone() * scaled.clone();
    let flat_product: Tensor<2> = product.clone().swap_dims(0, 1).reshape([4, 30]);
    let other: Tensor<3> = x.clone().reshape([3, 4, 10]) - mean.clone().reshape([1, 4, 1]);
    let flat_other: Tensor<2> = other.swap_dims(0, 1).reshape([4, 30]);
    let loss = (product.clone() * centered.clone()).sum() + flat_squares.clone().sum_dim(0).max();
    let gradient = leaf.grad(&loss.backward()).unwrap();
    vec![
        values(swapped.clone()),
        values(flat.clone()),
        // Other dimensions, other shapes, and the same again.
        values(flat.clone().sum_dim(0)),
        values(swapped.clone().reshape([8, 15]).sum_dim(1)),
        values(swapped.sum_dim(1)),
        values(flat.clone().transpose().matmul(flat.clone())),
        values(flat.sum_dim(1)),
        values(mean.clone().reshape([2, 2])),
        values(mean + 1.0),
        values(centered.clone()),
        values(centered.exp()),
        values(squares),
        values(flat_squares.clone().sum_dim(1)),
        values(flat_squares.clone().mean_dim(1)),
        values(flat_squares),
        values(scaled.clone()),
        values(scaled.swap_dims(0, 1).reshape([4, 30]).sum_dim(1)),
        values(flat_product.clone().mean_dim(1)),
        values(flat_product.sum_dim(1)),
        values(product),
        // A mean of a tensor of four dimensions, and a tensor of three.
        values((flat_other.clone() * flat_other.clone()).sum_dim(1)),
        values(flat_other.sum_dim(1)),
        values(gradient),
    ]
}

#[test]
fn what_is_needed_by_itself_is_as_on_the_plain_device() {
    let expected = other_uses(&Device::flex().autodiff());
    for plain in devices_and_cpu() {
        let device = Mixed::default().device(&plain).autodiff();
        for (which, (found, expected)) in other_uses(&device).iter().zip(&expected).enumerate() {
            let difference = difference(found, expected);
            // One is a sum that is 0.
            let most = exact(&plain).max(1e-4);
            assert!(difference < most, "{plain:?}, {which}: {difference}");
        }
    }
}
