//! Softmaxes and cross-entropies in training, against their formulas.

mod attention;
mod cross_entropy;

use super::{
    devices::devices,
    rowwise::{
        Mixed, activation, cases, cases_of, check_f32, difference, numbers, rounded, values, wide,
    },
};
use burn::tensor::{
    Device, Int, Tensor, TensorData,
    activation::{log_softmax, softmax},
};
use cross_entropy::check_cross_entropy;

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

/// As many units as a cube has. On CubeCL's CPU runtime, that is one.
#[test]
fn long_rows_are_shared_by_many_units() {
    let cases = || cases_of(devices());
    check_softmax([2, 5000], cases());
    check_softmax([3, 4999], cases());
    check_cross_entropy([2, 5001], cases());
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
