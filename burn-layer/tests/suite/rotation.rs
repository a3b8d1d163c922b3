//! Rotary position encodings, against their formula.

use super::rowwise::{
    activation, cases, check_f32, check_nothing_later, difference, numbers, rounded, values, wide,
};
use burn::{
    nn::RotaryEncodingConfig,
    tensor::{Device, Tensor, TensorData},
};

fn tensor<const D: usize>(dims: [usize; D], step: usize, device: &Device) -> Tensor<D> {
    let all = dims.iter().product();
    Tensor::from_data(TensorData::new(numbers(all, step), dims), device)
}

/// Turns the pairs of `[.., length, width]` by the angles of their positions, the first of which is `start`; back for -1. The formula is
/// that of Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
fn turned(x: &[f64], [length, width]: [usize; 2], start: usize, sign: f64) -> Vec<f64> {
    let pair = |(number, pair): (usize, &[f64])| {
        let (place, dim) = (2 * number / width % length, 2 * number % width);
        let theta = 10_000f64.powf(-(dim as f64) / width as f64);
        let (sin, cos) = ((start + place) as f64 * theta).sin_cos();
        let sin = sign * sin;
        [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin]
    };
    x.chunks(2).enumerate().flat_map(pair).collect()
}

/// An encoding of activations, multiplied and summed: as it is, and after a product in 16 bits.
fn check_rotation<const D: usize>(dims: [usize; D], start: usize) {
    let all = dims.iter().product();
    let sizes = [dims[D - 2], dims[D - 1]];
    let [x, dy] = [7, 5].map(|step| wide(numbers(all, step)));
    let y = turned(&x, sizes, start, 1.0);
    let dx = turned(&dy, sizes, start, -1.0);
    for (plain, layer) in cases() {
        let device = layer.device(&plain).autodiff();
        let encoding = RotaryEncodingConfig::new(sizes[0] + start, sizes[1]).init(&device);
        for product in [false, true] {
            let leaf = tensor(dims, 7, &device).require_grad();
            let output = encoding.apply(activation(&leaf), start);
            let output = if product { activation(&output) } else { output };
            let loss = (output.clone() * tensor(dims, 5, &device)).sum();
            let gradient = leaf.grad(&loss.backward()).unwrap();
            let name = format!("{plain:?}, {:?}, {dims:?}, {product}", layer.low);
            let most = if product {
                rounded(&plain, &layer)
            } else {
                1e-5
            };
            let found = difference(&values(output), &y);
            assert!(found < most, "{name}: output, {found}");
            let found = difference(&values(gradient), &dx);
            assert!(
                found < 2.0 * rounded(&plain, &layer),
                "{name}: gradient, {found}"
            );
        }
    }
}

#[test]
fn an_encoding_and_its_gradient_are_those_of_the_formula() {
    // Whole loads, smaller ones, and rows that end within a load.
    check_rotation([2, 3, 5, 16], 0);
    check_rotation([1, 2, 3, 6], 2);
    check_rotation([3, 4, 10], 1);
}

/// Where ops are fused, backward computes nothing of forward once more.
#[test]
fn what_lies_between_is_not_computed() {
    check_nothing_later(|device| {
        let encoding = RotaryEncodingConfig::new(4, 8).init(device);
        let leaf = tensor([2, 4, 8], 7, device).require_grad();
        let loss = encoding.forward(activation(&leaf)).sum();
        (leaf, loss)
    });
}

/// The same ops in programs that are no encodings, or need their parts by themselves, or learn what they turn by.
fn other_uses(device: &Device) -> Vec<Vec<f64>> {
    let leaf = tensor([2, 3, 4, 2], 7, device).require_grad();
    let matrix = tensor([1, 1, 2, 4], 5, device).require_grad();
    let factors = tensor([1, 3, 8, 2], 3, device).require_grad();
    let of_all = tensor([2, 3, 8, 2], 9, device);
    let x = activation(&leaf);
    let products = x.clone().matmul(matrix.clone());
    let terms = products.clone().reshape([2, 3, 8, 2]);
    let factored = terms.clone() * factors.clone();
    let sums = factored.clone().sum_dim(3);
    // By other factors, along other dimensions, and in other shapes.
    let by_all = (terms.clone() * of_all.clone()).sum_dim(3);
    let along = factored.clone().sum_dim(2);
    let flat = products.clone().reshape([2, 3, 16, 1]) * factors.clone().reshape([1, 3, 16, 1]);
    let back = (of_all * factors.clone()).reshape([2, 3, 4, 4]);
    let back = back.matmul(matrix.clone().transpose());
    let loss = (sums.clone() * sums.clone()).sum()
        + by_all.clone().sum()
        + (along.clone() * along.clone()).sum()
        + flat.clone().sum()
        + (products.clone() * products.clone()).sum();
    let gradients = loss.backward();
    let of = |leaf: &Tensor<4>| values(leaf.grad(&gradients).unwrap());
    vec![
        of(&leaf),
        of(&matrix),
        of(&factors),
        values(sums.clone().expand([2, 3, 8, 2])),
        values(sums.clone().reshape([2, 3, 2, 4]).swap_dims(1, 3)),
        values(sums.expand([4, 2, 3, 8, 2]).sum_dim(4)),
        values(by_all),
        values(along),
        values(flat),
        values(back),
        values(products.clone().reshape([3, 2, 8, 2])),
        values(products),
        values(terms),
        values(factored),
    ]
}

#[test]
fn what_is_needed_by_itself_is_as_on_the_plain_device() {
    check_f32(other_uses, 1e-5);
}
