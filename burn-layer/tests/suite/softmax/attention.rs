//! Scores of attention, which are scaled and masked before their softmax.

use super::super::rowwise::{cases, check_network, difference, numbers, rounded, values, wide};
use super::softmax_of;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData, activation::softmax};

/// A network's attention: scores that are scaled, masked, and multiplied with values.
fn attention(device: &Device) -> Vec<Vec<f64>> {
    let dims = [2, 2, 6, 4];
    let leaf = |step| {
        let data = TensorData::new(numbers(96, step), dims);
        Tensor::<4>::from_data(data, device).require_grad()
    };
    let [q, k, v] = [7, 5, 3].map(leaf);
    let mask = Tensor::<4, Bool>::tril_mask([1, 1, 6, 6], 0, device);
    let scores = q.clone().matmul(k.clone().swap_dims(2, 3)) / 2.0;
    let y = softmax(scores.mask_fill(mask, f32::NEG_INFINITY), 3);
    let loss = y.clone().matmul(v.clone()).square().mean();
    let gradients = loss.backward();
    let of = |leaf: &Tensor<4>| values(leaf.grad(&gradients).unwrap());
    vec![values(y), of(&q), of(&k), of(&v)]
}

#[test]
fn attention_is_as_on_the_plain_device() {
    check_network(attention, 16.0);
}

/// Of heads whose rows lie in between each other, as linear layers compute them and take them.
fn attention_of_heads(device: &Device) -> Vec<Vec<f64>> {
    let leaf = |step| {
        let data = TensorData::new(numbers(96, step), [2, 6, 8]);
        Tensor::<3>::from_data(data, device).require_grad()
    };
    let heads = |x: &Tensor<3>| x.clone().reshape([2, 6, 2, 4]).swap_dims(1, 2);
    let [q, k, v] = [7, 5, 3].map(leaf);
    let scores = heads(&q).matmul(heads(&k).swap_dims(2, 3)) / 2.0;
    let rows = softmax(scores, 3).matmul(heads(&v)).swap_dims(1, 2);
    let rows = rows.reshape([2, 6, 8]);
    let gradients = rows.clone().square().mean().backward();
    let of = |leaf: &Tensor<3>| values(leaf.grad(&gradients).unwrap());
    vec![values(rows), of(&q), of(&k), of(&v)]
}

#[test]
fn attention_of_heads_is_as_on_the_plain_device() {
    check_network(attention_of_heads, 16.0);
}

/// How scores of attention, which are a product, become a softmax's input.
#[derive(Clone, Copy, Debug)]
struct Scaled {
    /// What they are multiplied with, or divided by.
    by: Option<f64>,
    over: Option<f64>,
    /// The shape of the mask, and what it fills with.
    mask: Option<([usize; 4], f64)>,
}

impl Scaled {
    /// The factor.
    fn factor(&self) -> f64 {
        self.by.unwrap_or(1.0) / self.over.unwrap_or(1.0)
    }

    /// Which scores are masked.
    fn masked(&self, [_, heads, queries, keys]: [usize; 4], at: usize) -> bool {
        let Some((shape, _)) = self.mask else {
            return false;
        };
        let place = [
            at / (heads * queries * keys),
            at / (queries * keys) % heads,
            at / keys % queries,
            at % keys,
        ];
        let of_mask = (0..4).fold(0, |of_mask, dim| {
            of_mask * shape[dim] + place[dim] % shape[dim]
        });
        is_masked(of_mask)
    }
}

fn is_masked(place: usize) -> bool {
    place * 7 % 5 == 1
}

fn check_scores(dims: [usize; 4], scaled: Scaled) {
    let (all, keys): (usize, _) = (dims.iter().product(), dims[3]);
    let (products, dy) = (wide(numbers(all, 7)), wide(numbers(all, 5)));
    let fill = scaled.mask.map_or(0.0, |(_, fill)| fill);
    let x: Vec<f64> = (0..all)
        .map(|at| match scaled.masked(dims, at) {
            true => fill,
            false => products[at] * scaled.factor(),
        })
        .collect();
    let (mut outputs, mut gradients) = (Vec::new(), Vec::new());
    for (x, dy) in x.chunks(keys).zip(dy.chunks(keys)) {
        let y = softmax_of(x);
        let drift: f64 = y.iter().zip(dy).map(|(y, dy)| y * dy).sum();
        gradients.extend(y.iter().zip(dy).map(|(y, dy)| y * (dy - drift)));
        outputs.extend(y);
    }
    for (at, gradient) in gradients.iter_mut().enumerate() {
        match scaled.masked(dims, at) {
            true => *gradient = 0.0,
            false => *gradient *= scaled.factor(),
        }
    }
    for (plain, layer) in cases() {
        let device = layer.device(&plain).autodiff();
        let data = TensorData::new(numbers(all, 7), dims);
        let leaf = Tensor::<4>::from_data(data, &device).require_grad();
        let [batch, heads, ..] = dims;
        let eye = Tensor::<2>::eye(keys, &device).reshape([1, 1, keys, keys]);
        let mut scores = leaf.clone().matmul(eye.expand([batch, heads, keys, keys]));
        if let Some(by) = scaled.by {
            scores = scores * by;
        }
        if let Some(over) = scaled.over {
            scores = scores / over;
        }
        if let Some((shape, fill)) = scaled.mask {
            let places = 0..shape.iter().product();
            let places: Vec<i32> = places.map(|place| i32::from(is_masked(place))).collect();
            let mask = Tensor::<4, Int>::from_data(TensorData::new(places, shape), &device);
            let mask = mask.equal_elem(1);
            let mask = match shape {
                // As a program broadcasts it itself, and as no kernel reads it.
                [1, ..] => mask.expand([batch, shape[1], shape[2], keys]),
                _ if shape == dims => mask.swap_dims(2, 3).flip([0]).flip([0]).swap_dims(2, 3),
                _ => mask,
            };
            scores = scores.mask_fill(mask, fill);
        }
        let y = softmax(scores, 3);
        let weight = Tensor::<4>::from_data(TensorData::new(numbers(all, 5), dims), &device);
        // In 16 bits, as the product with the values takes it, and in f32.
        let half = y
            .clone()
            .matmul(Tensor::eye(keys, &device).reshape([1, 1, keys, keys]));
        let loss = (y.clone() * weight.clone()).sum() + (half * weight).sum();
        let gradient = leaf.grad(&loss.backward()).unwrap();
        let name = format!("{plain:?}, {:?}, {dims:?}, {scaled:?}", layer.low);
        let found = difference(&values(y), &outputs);
        let most = 1e-5
            + if scaled.over == Some(3.0) {
                2.0 * rounded(&plain, &layer)
            } else {
                0.0
            };
        assert!(found < most, "{name}: output, {found}");
        let twice: Vec<f64> = gradients.iter().map(|gradient| 2.0 * gradient).collect();
        let found = difference(&values(gradient), &twice);
        assert!(
            found < 3.0 * rounded(&plain, &layer),
            "{name}: gradient, {found}"
        );
    }
}

/// Scaled and masked in the same kernels; whole loads and rows that end anywhere, masks of all kinds, and fills that leave something.
#[test]
fn scores_are_scaled_and_masked_as_the_formula_says() {
    let nothing = Scaled {
        by: None,
        over: None,
        mask: None,
    };
    let over = |over| Scaled {
        over: Some(over),
        ..nothing
    };
    let with_mask = |of: Scaled, mask, fill| Scaled {
        mask: Some((mask, fill)),
        ..of
    };
    for (dims, scaled) in [
        ([2, 2, 3, 8], over(2.0)),
        ([2, 2, 3, 5], over(3.0)),
        (
            [2, 2, 3, 8],
            Scaled {
                by: Some(0.5),
                ..nothing
            },
        ),
        (
            [2, 2, 3, 8],
            with_mask(over(2.0), [2, 1, 3, 8], f64::NEG_INFINITY),
        ),
        ([2, 2, 3, 8], with_mask(over(2.0), [1, 1, 3, 8], -1e4)),
        ([2, 2, 3, 8], with_mask(nothing, [2, 1, 1, 8], 0.5)),
        ([2, 2, 3, 5], with_mask(over(2.0), [2, 2, 3, 5], -0.5)),
        ([1, 2, 3, 8], with_mask(over(2.0), [1, 2, 1, 8], -2.0)),
    ] {
        check_scores(dims, scaled);
    }
}

/// Scores that a program needs by themselves, or does something else with.
fn other_scores(device: &Device) -> Vec<Vec<f64>> {
    let dims = [2, 2, 3, 4];
    let data = TensorData::new(numbers(48, 7), dims);
    let leaf = Tensor::<4>::from_data(data, device).require_grad();
    let eye = Tensor::<2>::eye(4, device).reshape([1, 1, 4, 4]);
    let product = leaf.clone().matmul(eye.expand([2, 2, 4, 4]));
    let mask = Tensor::<4, Bool>::tril_mask([1, 1, 3, 4], 0, device);
    let other = Tensor::<4, Bool>::tril_mask([1, 1, 3, 4], 1, device);
    let scaled = product.clone() / 2.0;
    let masked = scaled.clone().mask_fill(mask.clone(), -3.0);
    let y = softmax(masked.clone(), 3);
    let twice = softmax(masked.clone().mask_fill(other, -2.0), 3);
    let by_column = softmax(masked.clone(), 2);
    // The statistics before the softmax, not with it.
    let maxima = masked.clone().detach().max_dim(3);
    let first = values(maxima.clone());
    let e = (masked.clone() - maxima).exp();
    let by_hand = e.clone() / e.sum_dim(3);
    let weight = Tensor::<4>::from_data(TensorData::new(numbers(48, 5), dims), device);
    let loss = (y.clone() * weight.clone()).sum()
        + (masked.clone() * y.clone()).sum()
        + (scaled.clone().exp() * weight.clone()).sum()
        + (twice.clone() * weight.clone()).sum()
        + (by_column.clone() * weight.clone()).sum()
        + (by_hand.clone() * weight).sum()
        + product.clone().square().sum();
    let gradient = leaf.grad(&loss.backward()).unwrap();
    vec![
        values(gradient),
        values(product),
        values(scaled),
        values(masked.clone().max_dim(3)),
        values(masked),
        values(y),
        values(twice),
        values(by_column),
        first,
        values(by_hand),
    ]
}

#[test]
fn scores_that_are_needed_by_themselves_are_as_on_the_plain_device() {
    check_network(other_scores, 4.0);
}
