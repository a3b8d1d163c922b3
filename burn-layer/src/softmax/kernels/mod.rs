//! The kernels. A cube takes a row, or as many rows as end where a vector of elements ends.

mod backward;
mod forward;

pub(super) use backward::{gathered_backward, softmax_backward};
use cubecl::prelude::*;
pub(super) use forward::{softmax_forward, statistics, whole_softmax};

/// The place of an element's row in a group of rows. Its load begins in the row `row`.
#[cube]
pub(super) fn place_of(
    element: usize,
    row: usize,
    first_row: usize,
    columns: usize,
    #[comptime] group: usize,
) -> usize {
    let mut place = 0usize;
    if comptime!(group > 1) {
        place = row_of(element, row, columns) - first_row;
    }
    place
}

/// The row of an element of a load, which begins in the row `first` and reaches into the next one at most.
#[cube]
pub(super) fn row_of(element: usize, first: usize, columns: usize) -> usize {
    select(element >= (first + 1) * columns, first + 1, first)
}

/// The largest of a load and of `largest`.
#[cube]
pub(super) fn largest_of<N: Size>(values: Vector<f32, N>, largest: f32) -> f32 {
    let mut result = largest;
    #[unroll]
    for lane in 0..N::value() {
        result = max_nan(result, values.extract(lane));
    }
    result
}

/// `exp(x - maximum)` of a load.
#[cube]
pub(super) fn exponentials<N: Size>(values: Vector<f32, N>, maximum: f32) -> Vector<f32, N> {
    (values - Vector::new(maximum)).exp()
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use burn_backend::{DType, TensorData, ops::IntTensorOps};
    use burn_cubecl::{CubeBackend, CubeDevice, tensor::CubeTensor};

    use super::*;
    use crate::{
        ops::{Logits, Scale, SoftmaxBackward},
        rowwise::tests::{self as rowwise, assert_close, on_devices},
    };

    const ROWS: usize = 8;

    fn tensor(values: &[f64], columns: usize, device: &CubeDevice) -> CubeTensor {
        rowwise::tensor(values, [ROWS, columns], device)
    }

    /// Of rows that units keep, with some for each plane, and of rows that end within a load.
    #[test]
    fn kernels_compute_what_the_formulas_say() {
        for columns in [16, 7, 197, 1024, 1030] {
            let number = |at: usize| (at * 37 % 23) as f64 / 4.0 - 2.0;
            let mut x: Vec<f64> = (0..ROWS * columns).map(number).collect();
            // A row that begins with nothing.
            x[columns..columns + 5].fill(f64::NEG_INFINITY);
            let gradients: Vec<f64> = (0..ROWS * columns).map(|at| number(at * at + 5)).collect();
            let (mut maxima, mut sums, mut softmax) = (vec![], vec![], vec![]);
            let (mut backward, mut gathered) = (vec![], vec![]);
            let index = |row: usize| row * 3 % columns;
            for row in 0..ROWS {
                let [x, gradients] = [&x, &gradients].map(|all| &all[row * columns..][..columns]);
                let maximum = x.iter().copied().fold(f64::MIN, f64::max);
                let terms: Vec<f64> = x.iter().map(|x| (x - maximum).exp()).collect();
                let sum: f64 = terms.iter().sum();
                let y: Vec<f64> = terms.iter().map(|term| term / sum).collect();
                let projection: f64 = y.iter().zip(gradients).map(|(y, g)| y * g).sum();
                backward.extend(y.iter().zip(gradients).map(|(y, g)| y * (g - projection)));
                let own = |column| if column == index(row) { -1.5 } else { 0.0 };
                gathered.extend(terms.iter().enumerate().map(|(at, e)| e * 0.5 + own(at)));
                maxima.push(maximum);
                sums.push(sum);
                softmax.extend(y);
            }
            let indices: Vec<i32> = (0..ROWS).map(|row| index(row) as i32).collect();
            on_devices(|device| {
                let of = || Logits {
                    x: tensor(&x, columns, device),
                    scale: Scale::Nothing,
                    mask: None,
                };
                let numbers = |values: &[f64]| tensor(values, 1, device);
                let [found_maxima, found_sums] = statistics(of());
                assert_close(found_maxima, &maxima);
                assert_close(found_sums, &sums);
                let [found_maxima, found_sums, found] = whole_softmax(of(), DType::F32);
                assert_close(found_maxima, &maxima);
                assert_close(found_sums, &sums);
                assert_close(found, &softmax);
                let known = [numbers(&maxima), numbers(&sums)];
                assert_close(softmax_forward(of(), known, DType::F32), &softmax);
                let found = softmax_backward(SoftmaxBackward {
                    of: of(),
                    maxima: numbers(&maxima),
                    sums: numbers(&sums),
                    gradient: tensor(&gradients, columns, device),
                    masked: false,
                    scale: Scale::Nothing,
                });
                assert_close(found, &backward);
                let of = [of().x, numbers(&maxima), numbers(&[0.5; ROWS])];
                let indices = TensorData::new(indices.clone(), [ROWS, 1]);
                let indices = CubeBackend::int_from_data(indices, device);
                let found = gathered_backward(of, indices, numbers(&[-1.5; ROWS]));
                assert_close(found, &gathered);
            });
        }
    }
}
