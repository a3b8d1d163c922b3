//! Softmaxes and cross-entropies in training, against their formulas.

use super::{
    devices::devices,
    rowwise::{
        Mixed, activation, cases, cases_of, check_f32, check_network, difference, numbers, rounded,
        values, wide,
    },
};
use burn::{
    nn::loss::CrossEntropyLossConfig,
    tensor::{
        Bool, Device, Int, Tensor, TensorData,
        activation::{log_softmax, softmax},
    },
};

/// Softmax by its formula.
fn softmax_of(row: &[f64]) -> Vec<f64> {
    let largest = row.iter().copied().fold(f64::MIN, f64::max);
    let exponents: Vec<f64> = row.iter().map(|x| (x - largest).exp()).collect();
    let sum: f64 = exponents.iter().sum();
    exponents.into_iter().map(|e| e / sum).collect()
}

fn check_softmax<const D: usize>(dims: [usize; D], cases: Vec<(Device, Mixed)>) {
    let (all, columns) = (dims.iter().product(), dims[D - 1]);
    let (x, dy) = (wide(numbers(all, 7)), wide(numbers(all, 5)));
    let (mut outputs, mut gradients) = (Vec::new(), Vec::new());
    for (x, dy) in x.chunks(columns).zip(dy.chunks(columns)) {
        let y = softmax_of(x);
        let drift: f64 = y.iter().zip(dy).map(|(y, dy)| y * dy).sum();
        gradients.extend(y.iter().zip(dy).map(|(y, dy)| y * (dy - drift)));
        outputs.extend(y);
    }
    for (plain, layer) in cases {
        let device = layer.device(&plain).autodiff();
        let data = TensorData::new(numbers(all, 7), dims);
        let leaf = Tensor::<D>::from_data(data, &device).require_grad();
        let weight = Tensor::<D>::from_data(TensorData::new(numbers(all, 5), dims), &device);
        let y = softmax(activation(&leaf), D - 1);
        let loss = (y.clone() * weight).sum();
        let gradient = leaf.grad(&loss.backward()).unwrap();
        let name = format!("{plain:?}, {:?}, {dims:?}", layer.low);
        let found = difference(&values(y), &outputs);
        assert!(found < 1e-5, "{name}: output, {found}");
        let found = difference(&values(gradient), &gradients);
        assert!(found < rounded(&plain, &layer), "{name}: gradient, {found}");
    }
}

#[test]
fn a_softmax_and_its_gradient_are_those_of_the_formula() {
    // Whole loads, several rows for each, and rows that end anywhere.
    check_softmax([3, 16], cases());
    check_softmax([2, 4, 13], cases());
    check_softmax([5, 70], cases());
}

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

/// A row that is masked entirely is not a number, as on the plain device, and leaves the others as they are.
#[test]
fn masked_rows_leave_others_alone() {
    for (plain, layer) in cases() {
        let device = layer.device(&plain).autodiff();
        let data = TensorData::new(numbers(24, 7), [3, 8]);
        let leaf = Tensor::<2>::from_data(data, &device).require_grad();
        let mask = Tensor::<2>::from_data(TensorData::new(numbers(24, 3), [3, 8]), &device)
            .lower_elem(0.0)
            .bool_or(
                Tensor::<1, Int>::from_ints([0, 1, 0], &device)
                    .reshape([3, 1])
                    .equal_elem(1)
                    .expand([3, 8]),
            );
        let x = activation(&leaf).mask_fill(mask, f32::NEG_INFINITY);
        let y = values(softmax(x, 1));
        for (row, values) in y.chunks(8).enumerate() {
            match row {
                1 => assert!(values.iter().all(|y| y.is_nan()), "{plain:?}"),
                _ => assert!((values.iter().sum::<f64>() - 1.0).abs() < 1e-5, "{plain:?}"),
            }
        }
    }
}

/// Maxima that a program looks at: of nothing but -inf, and of what has a NaN.
#[test]
fn maxima_keep_infinities_and_nan() {
    let [rows, columns] = [4, 70];
    let mut elements = numbers(rows * columns, 7);
    elements[columns..2 * columns].fill(f32::NEG_INFINITY);
    elements[2 * columns + 41] = f32::NAN;
    elements[3 * columns + 5] = f32::INFINITY;
    let largest = elements[..columns].iter().copied().fold(f32::MIN, f32::max);
    let expected = [largest, f32::NEG_INFINITY, f32::NAN, f32::INFINITY];
    for (plain, layer) in cases() {
        let device = layer.device(&plain);
        // Of an activation, to which a place's number is added.
        let product = activation(&Tensor::<2>::zeros([rows, columns], &device));
        let data = TensorData::new(elements.clone(), [rows, columns]);
        let found = values((product + Tensor::from_data(data, &device)).max_dim(1));
        for (found, expected) in found.into_iter().zip(expected) {
            let expected = f64::from(expected);
            let near = (found - expected).abs() < 0.01 * expected.abs();
            let same = found == expected || (found.is_nan() && expected.is_nan());
            assert!(
                same || near,
                "{plain:?}, {:?}: {found}, {expected}",
                layer.low
            );
        }
    }
}

/// Classes of samples, each with a row of logits.
fn targets(rows: usize, columns: usize) -> Vec<usize> {
    (0..rows).map(|row| (row * 5 + 2) % columns).collect()
}

/// The loss and its gradient by the formula: the mean of `log(softmax(x))` at the targets, negated.
fn cross_entropy_of([rows, columns]: [usize; 2]) -> (f64, Vec<f64>) {
    let x = wide(numbers(rows * columns, 7));
    let (mut loss, mut gradients) = (0.0, Vec::new());
    for (x, target) in x.chunks(columns).zip(targets(rows, columns)) {
        let y = softmax_of(x);
        loss -= y[target].ln() / rows as f64;
        let own = |class: usize| f64::from(u8::from(class == target));
        gradients.extend((0..columns).map(|class| (y[class] - own(class)) / rows as f64));
    }
    (loss, gradients)
}

fn check_cross_entropy(dims: [usize; 2], cases: Vec<(Device, Mixed)>) {
    let [rows, columns] = dims;
    let (expected, gradients) = cross_entropy_of(dims);
    for (plain, layer) in cases {
        let device = layer.device(&plain).autodiff();
        let data = TensorData::new(numbers(rows * columns, 7), dims);
        let leaf = Tensor::<2>::from_data(data, &device).require_grad();
        let classes = targets(rows, columns).into_iter();
        let classes: Vec<i32> = classes.map(|class| class as i32).collect();
        let classes = Tensor::<1, Int>::from_data(TensorData::new(classes, [rows]), &device);
        let loss = CrossEntropyLossConfig::new().init(&device);
        let loss = loss.forward(activation(&leaf), classes);
        let gradient = leaf.grad(&loss.clone().backward()).unwrap();
        let name = format!("{plain:?}, {:?}, {dims:?}", layer.low);
        let found = difference(&values(loss), &[expected]);
        assert!(found < 2e-6, "{name}: loss, {found}");
        let found = difference(&values(gradient), &gradients);
        assert!(found < rounded(&plain, &layer), "{name}: gradient, {found}");
    }
}

#[test]
fn a_cross_entropy_and_its_gradient_are_those_of_the_formula() {
    for dims in [[3, 16], [8, 13], [6, 2]] {
        check_cross_entropy(dims, cases());
    }
}

/// As many units as a cube has. On CubeCL's CPU runtime, that is one.
#[test]
fn long_rows_are_shared_by_many_units() {
    let cases = || cases_of(devices());
    check_softmax([2, 5000], cases());
    check_softmax([3, 4999], cases());
    check_cross_entropy([2, 5001], cases());
}

/// A class that is nearly certain has a gradient much smaller than both its terms.
#[test]
fn the_gradient_of_what_is_certain_is_not_lost() {
    for (plain, layer) in cases() {
        let device = layer.device(&plain).autodiff();
        let leaf = Tensor::<2>::from_floats([[9.0, 1.0, 0.0, 0.0, 2.0]], &device).require_grad();
        let y = softmax_of(&[9.0, 1.0, 0.0, 0.0, 2.0]);
        let class = Tensor::<2, Int>::from_ints([[0]], &device);
        let loss = log_softmax(activation(&leaf), 1)
            .gather(1, class)
            .sum()
            .neg();
        let found = values(leaf.grad(&loss.backward()).unwrap())[0];
        let relative = (found - (y[0] - 1.0)).abs() / (1.0 - y[0]);
        // Of f32, 1 - y has three digits less.
        let most = 1e-3 + rounded(&plain, &layer);
        assert!(relative < most, "{plain:?}, {:?}: {relative}", layer.low);
    }
}

/// Where ops are fused, no op of a softmax is computed by itself, and nothing of forward once more.
#[test]
fn what_lies_between_is_not_computed() {
    for (plain, layer) in cases() {
        let fuses = cfg!(feature = "fusion") && plain != Device::flex();
        if !fuses {
            continue;
        }
        let device = layer.device(&plain).autodiff();
        let take = || {
            device.sync().unwrap();
            core::mem::take(&mut *layer.later.lock().unwrap())
        };
        let data = TensorData::new(numbers(48, 7), [3, 16]);
        let leaf = Tensor::<2>::from_data(data, &device).require_grad();
        let y = softmax(activation(&leaf), 1);
        let loss = y.matmul(Tensor::eye(16, &device)).sum();
        leaf.grad(&loss.backward()).unwrap().into_data();
        assert_eq!(take(), [], "{plain:?}");
        let classes = Tensor::<2, Int>::from_ints([[1], [15], [0]], &device);
        let loss = log_softmax(activation(&leaf), 1).gather(1, classes).sum();
        leaf.grad(&loss.backward()).unwrap().into_data();
        assert_eq!(take(), [], "{plain:?}");
    }
}

/// The same ops in programs that are neither.
fn other_uses(device: &Device) -> Vec<Vec<f64>> {
    let data = TensorData::new(numbers(60, 7), [3, 4, 5]);
    let leaf = Tensor::<3>::from_data(data, device).require_grad();
    let x = activation(&leaf);
    let maxima = x.clone().detach().max_dim(2);
    let shifted = x.clone() - maxima.clone();
    let e = shifted.clone().exp();
    let sums = e.clone().sum_dim(2);
    let y = e.clone() / sums.clone();
    let logarithms = shifted.clone() - sums.clone().log();
    let classes = Tensor::<1, Int>::from_ints([0, 2, 4], device).reshape([3, 1, 1]);
    let several = Tensor::<1, Int>::from_ints([0, 2, 4, 1], device).reshape([1, 4, 1]);
    let several = several.repeat(&[3, 1, 2]);
    let picked = logarithms.clone().gather(2, classes.repeat(&[1, 4, 1]));
    let loss = (y.clone() * x.clone()).sum()
        + (e.clone() * shifted.clone()).sum()
        + sums.clone().square().sum() / 100.0
        + logarithms.clone().square().sum()
        + picked.clone().sum()
        + logarithms.clone().gather(2, several.clone()).sum()
        + (e.clone() / sums.clone().square()).sum();
    let gradient = leaf.grad(&loss.backward()).unwrap();
    vec![
        values(maxima.clone()),
        values(x.clone().max_dim(1)),
        // The maximum of another tensor, and other dimensions.
        values((x.clone() * 2.0 - maxima.clone()).exp().sum_dim(2)),
        values(e.clone().sum_dim(1)),
        values(e.clone().sum_dim(0)),
        values(e.clone() / sums.clone().sum_dim(1)),
        values(e.clone().neg()),
        values(-e.clone() / (sums.clone() * sums.clone())),
        values(sums.clone().recip() * e.clone()),
        values(e.clone() / (sums.clone() + 1.0)),
        values(shifted),
        values(e),
        values(sums.clone() * sums.clone()),
        values(sums),
        values(y.clone().sum_dim(2)),
        values(softmax(y.clone(), 2)),
        values(softmax(x.clone(), 1)),
        values(log_softmax(x.clone(), 0)),
        values(log_softmax(x, 2).gather(2, several)),
        values(y),
        values(picked),
        values(logarithms),
        values(gradient),
    ]
}

#[test]
fn what_is_needed_by_itself_is_as_on_the_plain_device() {
    check_f32(other_uses, 1e-5);
}
