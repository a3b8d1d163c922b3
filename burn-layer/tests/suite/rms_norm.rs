//! RMS normalizations in training, against their formulas.

use super::{
    devices::devices,
    rowwise::{
        Mixed, activation, cases, cases_of, check_f32, check_network, check_nothing_later,
        difference, numbers, rounded, values, wide,
    },
};
use burn::{
    module::Param,
    nn::{RmsNorm, RmsNormConfig},
    tensor::{Device, Tensor, TensorData},
};

const EPSILON: f64 = 1e-5;

fn tensor<const D: usize>(dims: [usize; D], step: usize, device: &Device) -> Tensor<D> {
    let all = dims.iter().product();
    Tensor::from_data(TensorData::new(numbers(all, step), dims), device)
}

/// A norm with a scale of these numbers.
fn rms_norm(columns: usize, scale: usize, device: &Device) -> RmsNorm {
    let mut norm = RmsNormConfig::new(columns)
        .with_epsilon(EPSILON)
        .init(device);
    norm.gamma = Param::from_tensor(tensor([columns], scale, device));
    norm
}

/// The output, and the gradients of the input and the scale, in f64, of a norm whose output is multiplied by `dy` and summed.
fn formula(x: &[f64], gamma: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let columns = gamma.len();
    let count = columns as f64;
    let (mut y, mut dx, mut dgamma) = (Vec::new(), Vec::new(), vec![0.0; columns]);
    for (x, dy) in x.chunks(columns).zip(dy.chunks(columns)) {
        let squares = x.iter().map(|x| x * x).sum::<f64>() / count;
        let rms = (squares + EPSILON).sqrt();
        let of_column = |at: usize| (x[at] / rms, dy[at] * gamma[at]);
        let projection = (0..columns).map(of_column).map(|(n, g)| n * g).sum::<f64>() / count;
        for at in 0..columns {
            let (n, g) = of_column(at);
            y.push(n * gamma[at]);
            dx.push((g - n * projection) / rms);
            dgamma[at] += dy[at] * n;
        }
    }
    [y, dx, dgamma]
}

/// A norm whose output, and whose input if there is a `residual`, are multiplied and summed.
fn check_norm<const D: usize>(dims: [usize; D], cases: Vec<(Device, Mixed)>) {
    let (all, columns) = (dims.iter().product(), dims[D - 1]);
    let [x, dy, residual] = [7, 5, 3].map(|step| wide(numbers(all, step)));
    let [y, dx, dgamma] = formula(&x, &wide(numbers(columns, 2)), &dy);
    let added: Vec<f64> = dx.iter().zip(&residual).map(|(dx, by)| dx + by).collect();
    for (plain, layer) in cases {
        let device = layer.device(&plain).autodiff();
        for with_residual in [false, true] {
            let leaf = tensor(dims, 7, &device).require_grad();
            let norm = rms_norm(columns, 2, &device);
            let x = activation(&leaf);
            let output = norm.forward(x.clone());
            let mut loss = (output.clone() * tensor(dims, 5, &device)).sum();
            if with_residual {
                loss = loss + (x * tensor(dims, 3, &device)).sum();
            }
            let gradients = loss.backward();
            let name = format!("{plain:?}, {:?}, {dims:?}, {with_residual}", layer.low);
            let is = |what: &str, found: Vec<f64>, expected: &[f64], most: f64| {
                let difference = difference(&found, expected);
                assert!(difference < most, "{name}: {what}, {difference}");
            };
            is("output", values(output), &y, 1e-5);
            let expected = if with_residual { &added } else { &dx };
            let found = values(leaf.grad(&gradients).unwrap());
            is("gradient", found, expected, rounded(&plain, &layer));
            let gamma = values(norm.gamma.val().grad(&gradients).unwrap());
            is("scale", gamma, &dgamma, 1e-5);
        }
    }
}

#[test]
fn a_norm_and_its_gradients_are_those_of_the_formula() {
    // Whole loads, and smaller ones.
    check_norm([3, 16], cases());
    check_norm([2, 4, 13], cases());
    check_norm([5, 70], cases());
}

/// As many units as a cube has. On CubeCL's CPU runtime, that is one.
#[test]
fn long_rows_are_shared_by_many_units() {
    let cases = || cases_of(devices());
    check_norm([2, 5000], cases());
    check_norm([3, 4999], cases());
}

/// Residual blocks, which are normalized before, and a last norm; the second block normalizes its inner values too, heads of them: the
/// output and all gradients.
fn network(device: &Device) -> Vec<Vec<f64>> {
    let leaf = tensor([2, 3, 8], 7, device).require_grad();
    let norms = [2, 9, 4].map(|scale| rms_norm(8, scale, device));
    let of_heads = rms_norm(4, 3, device);
    let weights = [5, 3, 8, 6].map(|step| (tensor([8, 8], step, device) / 8.0).require_grad());
    let product = |x: Tensor<3>, which: usize| x.matmul(weights[which].clone().unsqueeze());
    let x = activation(&leaf);
    let inner = product(norms[0].forward(x.clone()), 0).tanh();
    let x = x + product(inner, 1);
    let heads = product(norms[1].forward(x.clone()), 2).reshape([2, 3, 2, 4]);
    let heads = of_heads.forward(heads.swap_dims(1, 2)).swap_dims(1, 2);
    let x = x + product(heads.reshape([2, 3, 8]), 3);
    let y = norms[2].forward(x);
    let gradients = (y.clone() * tensor([2, 3, 8], 5, device)).sum().backward();
    let mut found = vec![values(y), values(leaf.grad(&gradients).unwrap())];
    found.extend(weights.map(|weight| values(weight.grad(&gradients).unwrap())));
    let gammas = norms.iter().chain([&of_heads]);
    found.extend(gammas.map(|norm| values(norm.gamma.val().grad(&gradients).unwrap())));
    found
}

#[test]
fn residual_blocks_are_as_on_the_plain_device() {
    check_network(network, 16.0);
}

/// Where ops are fused, no op of a norm's backward is computed by itself, and nothing of forward once more: of an input in f32, and of
/// one in 16 bits.
#[test]
fn what_lies_between_is_not_computed() {
    for wide in [false, true] {
        check_nothing_later(|device| {
            let leaf = tensor([3, 16], 7, device).require_grad();
            let norm = rms_norm(16, 2, device);
            let x = activation(&leaf);
            let x = if wide { x.clone() + x.exp() } else { x };
            let y = norm.forward(x.clone()).matmul(Tensor::eye(16, device));
            (leaf, (y + x).sum())
        });
    }
}

/// The same ops in programs that are no norms, or need their parts by themselves.
fn other_uses(device: &Device) -> Vec<Vec<f64>> {
    let leaf = tensor([3, 4, 5], 7, device).require_grad();
    let row = tensor([1, 1, 5], 2, device).require_grad();
    let x = activation(&leaf);
    let other = activation(&leaf);
    let squares = x.clone() * x.clone();
    let mean = squares.clone().mean_dim(2);
    let rms = (mean.clone() + EPSILON).sqrt();
    let n = x.clone() / rms.clone();
    // Of another tensor, by the root of something else, and by another row's.
    let others = other.clone() / rms.clone();
    let more = x.clone() / (mean.clone() + 1.0).sqrt();
    let turned = x.clone() / rms.clone().flip([1]);
    let loss = (n.clone() * row.clone() * other.clone()).sum()
        + (squares.clone() * row.clone()).sum() / 100.0
        + (others.clone() * n.clone()).sum()
        + (more.clone() * row.clone()).sum()
        + (turned.clone() * row.clone()).sum()
        + (x.clone().neg() * row.clone()).sum()
        + (x.clone() / other.clone().exp()).sum()
        + mean.clone().sum()
        + rms.clone().recip().sum();
    let gradients = loss.backward();
    let of = |leaf: &Tensor<3>| values(leaf.grad(&gradients).unwrap());
    vec![
        of(&leaf),
        of(&row),
        values(squares.clone().mean_dim(1)),
        values(squares.clone().sum_dim(2)),
        values(squares.clone().mean_dim(2) + 1.0),
        values(x.clone().neg()),
        values(squares),
        values(mean),
        values(rms),
        values(n.clone().mean_dim(2) + 1.0),
        values(n),
        values(others),
        values(more),
        values(turned),
    ]
}

#[test]
fn what_is_needed_by_itself_is_as_on_the_plain_device() {
    check_f32(other_uses, 1e-5);
}

/// An input that two norms share, as attention and a feed-forward layer side by side do.
fn shared(device: &Device) -> Vec<Vec<f64>> {
    let leaf = tensor([3, 8], 7, device).require_grad();
    let norms = [2, 9].map(|scale| rms_norm(8, scale, device));
    let x = activation(&leaf);
    let [one, other] = [5, 3].map(|step| tensor([3, 8], step, device));
    let y = norms[0].forward(x.clone()) * one + norms[1].forward(x.clone()) * other + x;
    let gradients = y.clone().sum().backward();
    let mut found = vec![values(y), values(leaf.grad(&gradients).unwrap())];
    found.extend(norms.map(|norm| values(norm.gamma.val().grad(&gradients).unwrap())));
    found
}

#[test]
fn norms_that_share_their_input_are_as_on_the_plain_device() {
    check_network(shared, 4.0);
}
