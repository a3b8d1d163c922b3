//! The kernels. A cube takes a row.

use burn_backend::{TensorMetadata, cubecl::dtype_to_storage_type};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::*;

use super::gradient_dtype;
use crate::{
    ops::NormBackward,
    rowwise::{Rows, Units, cubes, empty, of_cube, of_rows, plain},
};

/// See [`Normalizes::moments`](super::Normalizes::moments).
pub(super) fn moments(x: CubeTensor) -> [CubeTensor; 2] {
    let x = plain(x);
    let rows = Rows::of_whole_loads(&x.client, &x.shape(), x.dtype.size());
    let outputs = [(); 2].map(|()| empty(&x, of_rows(&x.shape())));
    let [means, variances] = outputs.each_ref().map(|output| output.clone());
    let (client, dtype) = (x.client.clone(), dtype_to_storage_type(x.dtype));
    moments_kernel::launch(
        &client,
        cubes(rows.rows),
        rows.dim(),
        rows.address,
        rows.vector,
        x.into_buffer_arg(),
        means.into_buffer_arg(),
        variances.into_buffer_arg(),
        rows.rows,
        rows.columns,
        rows.units,
        dtype,
    );
    outputs
}

/// See [`Normalizes::mean_squares`](super::Normalizes::mean_squares).
pub(super) fn mean_squares(x: CubeTensor) -> CubeTensor {
    let x = plain(x);
    let rows = Rows::of_whole_loads(&x.client, &x.shape(), x.dtype.size());
    let output = empty(&x, of_rows(&x.shape()));
    let (client, dtype) = (x.client.clone(), dtype_to_storage_type(x.dtype));
    mean_squares_kernel::launch(
        &client,
        cubes(rows.rows),
        rows.dim(),
        rows.address,
        rows.vector,
        x.into_buffer_arg(),
        output.clone().into_buffer_arg(),
        rows.rows,
        rows.columns,
        rows.units,
        dtype,
    );
    output
}

/// See [`Normalizes::norm_backward`](super::Normalizes::norm_backward).
pub(super) fn norm_backward(backward: NormBackward<CubeBackend>) -> CubeTensor {
    let dtype = gradient_dtype::<CubeBackend>(&backward.x, backward.added.as_ref());
    let NormBackward {
        x,
        mean,
        deviation,
        gradient,
        scale,
        added,
    } = backward;
    let [x, deviation, gradient] = [x, deviation, gradient].map(plain);
    let [mean, scale, added] = [mean, scale, added].map(|tensor| tensor.map(plain));
    let dtypes = [x.dtype, gradient.dtype, dtype].into_iter();
    let others = [&scale, &added].into_iter().flatten();
    let sizes = dtypes.chain(others.map(|tensor| tensor.dtype));
    let size = sizes.map(|dtype| dtype.size()).max().unwrap_or(1);
    let rows = Rows::of_whole_loads(&x.client, &x.shape(), size);
    let output = empty(&x, (x.shape(), dtype));
    let client = x.client.clone();
    let added_dtype = added.as_ref().map_or(dtype, |added| added.dtype);
    let dtypes = [x.dtype, gradient.dtype, added_dtype, dtype].map(dtype_to_storage_type);
    norm_backward_kernel::launch(
        &client,
        cubes(rows.rows),
        rows.dim(),
        rows.address,
        rows.vector,
        x.into_buffer_arg(),
        mean.map(|mean| mean.into_buffer_arg()).into(),
        deviation.into_buffer_arg(),
        gradient.into_buffer_arg(),
        scale.map(|scale| scale.into_buffer_arg()).into(),
        added.map(|added| added.into_buffer_arg()).into(),
        output.clone().into_buffer_arg(),
        rows.rows,
        rows.columns,
        rows.units,
        dtypes,
    );
    output
}

#[cube(launch, address_type = "dynamic")]
fn moments_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    means: &mut [f32],
    variances: &mut [f32],
    rows: usize,
    columns: usize,
    #[comptime] units: Units,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(units.count));
    let width = columns / N::value();
    let count = f32::cast_from(columns);
    let mut row = CUBE_POS;
    while row < rows {
        let end = (row + 1) * width;
        let mut sum = f32::new(0.0);
        let mut at = row * width + UNIT_POS as usize;
        while at < end {
            let values = Vector::<f32, N>::cast_from(x[at]);
            #[unroll]
            for lane in 0..N::value() {
                sum += values.extract(lane);
            }
            at += comptime!(units.count);
        }
        let mean = of_cube(sum, &mut shared, units, false) / count;
        let sum = squares_of_row::<F, N>(x, row, width, mean, &mut shared, units);
        if UNIT_POS == 0 {
            means[row] = mean;
            variances[row] = sum / count;
        }
        row += CUBE_COUNT;
    }
}

/// The sum of `(x - around)^2` of a row. All units of the cube must call this.
#[cube]
fn squares_of_row<F: Float, N: Size>(
    x: &[Vector<F, N>],
    row: usize,
    width: usize,
    around: f32,
    shared: &mut Shared<[f32]>,
    #[comptime] units: Units,
) -> f32 {
    let end = (row + 1) * width;
    let mut sum = f32::new(0.0);
    let mut at = row * width + UNIT_POS as usize;
    while at < end {
        let values = Vector::<f32, N>::cast_from(x[at]);
        #[unroll]
        for lane in 0..N::value() {
            let distance = values.extract(lane) - around;
            sum += distance * distance;
        }
        at += comptime!(units.count);
    }
    of_cube(sum, shared, units, false)
}

#[cube(launch, address_type = "dynamic")]
fn mean_squares_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    output: &mut [f32],
    rows: usize,
    columns: usize,
    #[comptime] units: Units,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(units.count));
    let width = columns / N::value();
    let mut row = CUBE_POS;
    while row < rows {
        let sum = squares_of_row::<F, N>(x, row, width, f32::new(0.0), &mut shared, units);
        if UNIT_POS == 0 {
            output[row] = sum / f32::cast_from(columns);
        }
        row += CUBE_COUNT;
    }
}

#[cube(launch, address_type = "dynamic")]
fn norm_backward_kernel<F: Float, G: Float, H: Float, O: Float, N: Size>(
    x: &[Vector<F, N>],
    means: ComptimeOption<&[f32]>,
    deviations: &[f32],
    gradient: &[Vector<G, N>],
    scale: ComptimeOption<&[Vector<f32, N>]>,
    added: ComptimeOption<&[Vector<H, N>]>,
    output: &mut [Vector<O, N>],
    rows: usize,
    columns: usize,
    #[comptime] units: Units,
    #[define(F, G, H, O)] _dtypes: [ElemType; 4],
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(units.count));
    let width = columns / N::value();
    let count = f32::cast_from(columns);
    let mut row = CUBE_POS;
    while row < rows {
        let first = row * width;
        // Dividing takes many times as long.
        let inverse = f32::new(1.0) / deviations[row];
        let mean: ComptimeOption<f32> = means.as_ref().map(|means| means[row]);
        let centered = comptime!(mean.is_some());
        let mean: f32 = mean.unwrap_or(f32::new(0.0));
        // The sums of the gradient of the normalized row, and of its product with that.
        let mut sum = f32::new(0.0);
        let mut projection = f32::new(0.0);
        let mut at = UNIT_POS as usize;
        while at < width {
            let values = Vector::<f32, N>::cast_from(x[first + at]);
            let gradients = Vector::<f32, N>::cast_from(gradient[first + at]);
            let scaled: ComptimeOption<Vector<f32, N>> =
                scale.as_ref().map(|scale| times::<N>(gradients, scale[at]));
            let gradients: Vector<f32, N> = scaled.unwrap_or(gradients);
            #[unroll]
            for lane in 0..N::value() {
                let own = gradients.extract(lane);
                sum += own;
                projection += own * ((values.extract(lane) - mean) * inverse);
            }
            at += comptime!(units.count);
        }
        let sum = if comptime!(centered) {
            of_cube(sum, &mut shared, units, false) / count
        } else {
            f32::new(0.0)
        };
        let projection = of_cube(projection, &mut shared, units, false) / count;
        let mut at = UNIT_POS as usize;
        while at < width {
            let values = Vector::<f32, N>::cast_from(x[first + at]);
            let gradients = Vector::<f32, N>::cast_from(gradient[first + at]);
            let scaled: ComptimeOption<Vector<f32, N>> =
                scale.as_ref().map(|scale| times::<N>(gradients, scale[at]));
            let gradients: Vector<f32, N> = scaled.unwrap_or(gradients);
            let mut result = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for lane in 0..N::value() {
                let normalized = (values.extract(lane) - mean) * inverse;
                let own = gradients.extract(lane) - sum - normalized * projection;
                result.insert(lane, own * inverse);
            }
            let sums: ComptimeOption<Vector<f32, N>> = added
                .as_ref()
                .map(|added| plus::<H, N>(result, added[first + at]));
            let result: Vector<f32, N> = sums.unwrap_or(result);
            output[first + at] = Vector::cast_from(result);
            at += comptime!(units.count);
        }
        row += CUBE_COUNT;
    }
}

#[cube]
fn times<N: Size>(values: Vector<f32, N>, by: Vector<f32, N>) -> Vector<f32, N> {
    values * by
}

#[cube]
fn plus<H: Float, N: Size>(values: Vector<f32, N>, other: Vector<H, N>) -> Vector<f32, N> {
    values + Vector::<f32, N>::cast_from(other)
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use super::*;
    use crate::rowwise::tests::{assert_close, on_devices, tensor};

    #[test]
    fn kernels_compute_what_the_formulas_say() {
        [12, 7, 1024].into_iter().for_each(check);
    }

    fn check(columns: usize) {
        let rows = 3;
        let number = |at: usize| (at * 37 % 23) as f64 / 4.0 - 2.0;
        let x: Vec<f64> = (0..rows * columns).map(number).collect();
        let gradients: Vec<f64> = (0..rows * columns).map(|at| number(at * at + 5)).collect();
        let (mut means, mut variances, mut squares) = (vec![], vec![], vec![]);
        let (mut deviations, mut backward) = (vec![], vec![]);
        for row in 0..rows {
            let [x, g] = [&x, &gradients].map(|all| &all[row * columns..][..columns]);
            let of_row = |values: &[f64]| values.iter().sum::<f64>() / columns as f64;
            let mean = of_row(x);
            let distances: Vec<f64> = x.iter().map(|x| (x - mean).powi(2)).collect();
            let variance = of_row(&distances);
            let deviation = (variance + 1e-5).sqrt();
            let n: Vec<f64> = x.iter().map(|x| (x - mean) / deviation).collect();
            let products: Vec<f64> = n.iter().zip(g).map(|(n, g)| n * g).collect();
            let (shift, projection) = (of_row(g), of_row(&products));
            let gradient = |(n, g): (&f64, &f64)| (g - shift - n * projection) / deviation;
            backward.extend(n.iter().zip(g).map(gradient));
            squares.push(of_row(&x.iter().map(|x| x * x).collect::<Vec<_>>()));
            means.push(mean);
            variances.push(variance);
            deviations.push(deviation);
        }
        on_devices(|device| {
            let whole = |values: &[f64]| tensor(values, [rows, columns], device);
            let numbers = |values: &[f64]| tensor(values, [rows, 1], device);
            let [found_means, found_variances] = moments(whole(&x));
            assert_close(found_means, &means);
            assert_close(found_variances, &variances);
            assert_close(mean_squares(whole(&x)), &squares);
            let found = norm_backward(NormBackward {
                x: whole(&x),
                mean: Some(numbers(&means)),
                deviation: numbers(&deviations),
                gradient: whole(&gradients),
                scale: None,
                added: None,
            });
            assert_close(found, &backward);
        });
    }
}
