//! Cross-entropies: what is gathered of a softmax's logarithms, and its gradient.

use super::super::rowwise::{Mixed, activation, cases, difference, numbers, rounded, values, wide};
use super::softmax_of;
use burn::{
    nn::loss::CrossEntropyLossConfig,
    tensor::{Device, Int, Tensor, TensorData, activation::log_softmax},
};

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

pub(super) fn check_cross_entropy(dims: [usize; 2], cases: Vec<(Device, Mixed)>) {
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
