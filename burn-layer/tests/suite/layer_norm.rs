//! Layer normalizations in training, against their formulas.

use super::{
    devices::devices,
    rowwise::{
        Mixed, activation, cases, cases_of, check_f32, check_network, check_nothing_later,
        difference, numbers, rounded, values, wide,
    },
};
use burn::{
    module::Param,
    nn::{LayerNorm, LayerNormConfig, Linear},
    tensor::{Device, Tensor, TensorData},
};

const EPSILON: f64 = 1e-5;

fn tensor<const D: usize>(dims: [usize; D], step: usize, device: &Device) -> Tensor<D> {
    let all = dims.iter().product();
    Tensor::from_data(TensorData::new(numbers(all, step), dims), device)
}

/// A norm with a scale and a bias of these numbers.
fn layer_norm(columns: usize, [scale, bias]: [usize; 2], device: &Device) -> LayerNorm {
    let mut norm = LayerNormConfig::new(columns).init(device);
    norm.gamma = Param::from_tensor(tensor([columns], scale, device));
    norm.beta = Some(Param::from_tensor(tensor([columns], bias, device)));
    norm
}

/// Normalizes the rows, in f64, and returns the deviations too.
fn normalized(x: &[f64], columns: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut all, mut deviations) = (Vec::new(), Vec::new());
    for row in x.chunks(columns) {
        let mean = row.iter().sum::<f64>() / columns as f64;
        let squares = row.iter().map(|x| (x - mean) * (x - mean));
        let deviation = (squares.sum::<f64>() / columns as f64 + EPSILON).sqrt();
        all.extend(row.iter().map(|x| (x - mean) / deviation));
        deviations.push(deviation);
    }
    (all, deviations)
}

/// The gradient of the input, from that of the normalized rows.
fn gradient_of(n: &[f64], deviations: &[f64], g: &[f64], columns: usize) -> Vec<f64> {
    let mut gradient = Vec::new();
    for (row, deviation) in deviations.iter().enumerate() {
        let of_row = row * columns..(row + 1) * columns;
        let (n, g) = (&n[of_row.clone()], &g[of_row]);
        let mean = g.iter().sum::<f64>() / columns as f64;
        let projection = g.iter().zip(n).map(|(g, n)| g * n).sum::<f64>() / columns as f64;
        let own = g.iter().zip(n);
        gradient.extend(own.map(|(g, n)| (g - mean - n * projection) / deviation));
    }
    gradient
}

/// A norm whose output, and whose input if there is a `residual`, are multiplied and summed.
fn check_norm<const D: usize>(dims: [usize; D], cases: Vec<(Device, Mixed)>) {
    let (all, columns) = (dims.iter().product(), dims[D - 1]);
    let [x, dy, residual] = [7, 5, 3].map(|step| wide(numbers(all, step)));
    let [gamma, beta] = [2, 9].map(|step| wide(numbers(columns, step)));
    let (n, deviations) = normalized(&x, columns);
    let of_column = |at: usize| at % columns;
    let y: Vec<f64> = (0..all)
        .map(|at| n[at] * gamma[of_column(at)] + beta[of_column(at)])
        .collect();
    let g: Vec<f64> = (0..all).map(|at| dy[at] * gamma[of_column(at)]).collect();
    let dx = gradient_of(&n, &deviations, &g, columns);
    let sums = |of: &dyn Fn(usize) -> f64| -> Vec<f64> {
        let column = |column| (column..all).step_by(columns).map(of).sum();
        (0..columns).map(column).collect()
    };
    let (dgamma, dbeta) = (sums(&|at| dy[at] * n[at]), sums(&|at| dy[at]));
    let added: Vec<f64> = dx.iter().zip(&residual).map(|(dx, by)| dx + by).collect();
    for (plain, layer) in cases {
        let device = layer.device(&plain).autodiff();
        for with_residual in [false, true] {
            let leaf = tensor(dims, 7, &device).require_grad();
            let norm = layer_norm(columns, [2, 9], &device);
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
            let of = |param: &Param<Tensor<1>>| values(param.val().grad(&gradients).unwrap());
            is("scale", of(&norm.gamma), &dgamma, 1e-5);
            is("bias", of(norm.beta.as_ref().unwrap()), &dbeta, 1e-5);
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

/// A transformer's feed-forward block: residual, and normalized before.
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        let linear = |ins, outs, step| Linear {
            weight: Param::from_tensor(tensor([ins, outs], step, device) / 8.0),
            bias: Some(Param::from_tensor(tensor([outs], step, device))),
        };
        Self {
            norm: layer_norm(8, [2, 9], device),
            up: linear(8, 12, 5),
            down: linear(12, 8, 3),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let inner = self.up.forward(self.norm.forward(x.clone())).tanh();
        x + self.down.forward(inner)
    }
}

/// Two blocks, of which the second one's residual sum is normalized by another norm: the output and all gradients.
fn network(device: &Device) -> Vec<Vec<f64>> {
    let leaf = tensor([2, 3, 8], 7, device).require_grad();
    let blocks = [Block::new(device), Block::new(device)];
    let last: LayerNorm = LayerNormConfig::new(8).init(device);
    let x = blocks
        .iter()
        .fold(activation(&leaf), |x, block| block.forward(x));
    let y = last.forward(x);
    let loss = (y.clone() * tensor([2, 3, 8], 5, device)).sum();
    let gradients = loss.backward();
    let mut found = vec![values(y), values(leaf.grad(&gradients).unwrap())];
    for block in &blocks {
        found.push(values(block.norm.gamma.val().grad(&gradients).unwrap()));
        found.push(values(block.up.weight.val().grad(&gradients).unwrap()));
        found.push(values(block.down.weight.val().grad(&gradients).unwrap()));
    }
    found.push(values(last.gamma.val().grad(&gradients).unwrap()));
    found
}

#[test]
fn residual_blocks_are_as_on_the_plain_device() {
    check_network(network, 16.0);
}

/// Where ops are fused, no op of a norm's backward is computed by itself, and nothing of forward once more.
#[test]
fn what_lies_between_is_not_computed() {
    check_nothing_later(|device| {
        let leaf = tensor([3, 16], 7, device).require_grad();
        let norm: LayerNorm = LayerNormConfig::new(16).init(device);
        let x = activation(&leaf);
        let y = norm.forward(x.clone()).matmul(Tensor::eye(16, device));
        (leaf, (y + x).sum())
    });
}

/// A row of equal elements has no deviation but that of epsilon.
#[test]
fn a_row_of_equal_elements_is_normalized_to_zeros() {
    for (plain, layer) in cases() {
        let device = layer.device(&plain).autodiff();
        let leaf = Tensor::<2>::full([2, 8], 3.0, &device).require_grad();
        let norm: LayerNorm = LayerNormConfig::new(8).init(&device);
        let y = norm.forward(activation(&leaf));
        let loss = (y.clone() * tensor([2, 8], 5, &device)).sum();
        let gradient = values(leaf.grad(&loss.backward()).unwrap());
        assert!(values(y).iter().all(|y| y.abs() < 1e-6), "{plain:?}");
        let g = wide(numbers(16, 5));
        let deviations = [EPSILON.sqrt(); 2];
        let expected = gradient_of(&[0.0; 16], &deviations, &g, 8);
        let found = difference(&gradient, &expected);
        assert!(found < rounded(&plain, &layer), "{plain:?}: {found}");
    }
}

/// The same ops in programs that are no norms, or need their parts by themselves.
fn other_uses(device: &Device) -> Vec<Vec<f64>> {
    let leaf = tensor([3, 4, 5], 7, device).require_grad();
    let row = tensor([1, 1, 5], 2, device).require_grad();
    let x = activation(&leaf);
    let mean = x.clone().mean_dim(2);
    let centered = x.clone() - mean.clone();
    let squares = centered.clone() * centered.clone();
    let variance = squares.clone().mean_dim(2);
    let deviation = (variance.clone() + EPSILON).sqrt();
    let n = centered.clone() / deviation.clone();
    // By the root of something else, and by another row's.
    let others = centered.clone() / (variance.clone() + 1.0).sqrt();
    let turned = centered.clone() / deviation.clone().flip([1]);
    let loss = (n.clone() * row.clone() * x.clone()).sum()
        + (centered.clone() * x.clone()).sum()
        + (squares.clone() * row.clone()).sum() / 100.0
        + (others.clone() * n.clone()).sum()
        + (turned.clone() * row.clone()).sum()
        + (variance.clone() * mean.clone()).sum()
        + (x.clone() / deviation.clone()).sum()
        + deviation.clone().recip().sum();
    let gradients = loss.backward();
    let of = |leaf: &Tensor<3>| values(leaf.grad(&gradients).unwrap());
    vec![
        of(&leaf),
        of(&row),
        values(x.clone().mean_dim(1)),
        // Of another tensor, along other dimensions, and twice.
        values(x.clone() * 2.0 - mean.clone()),
        values(squares.clone().mean_dim(1)),
        values(centered.clone().mean_dim(2) + 1.0),
        values(squares.clone().sum_dim(2)),
        values(centered.clone().neg()),
        values(mean),
        values(centered),
        values(squares),
        values(variance),
        values(deviation),
        values(n.clone().mean_dim(2) + 1.0),
        values(n),
        values(others),
        values(turned),
    ]
}

#[test]
fn what_is_needed_by_itself_is_as_on_the_plain_device() {
    check_f32(other_uses, 1e-5);
}
