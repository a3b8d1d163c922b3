//! The scaled matrix product, compared with a sum in f64 over the values of the codes.

mod amax;
mod bias;
mod transposition;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_fp8::{Fp8Error, Fp8Format, Fp8Tensor, scaled_matmul};

use super::device::{Random, devices, float_dtypes, precision_of_sums, values};

fn random<const D: usize>(random: &mut Random, shape: [usize; D], device: &Device) -> Tensor<D> {
    let count = shape.iter().product();
    Tensor::from_data(TensorData::new(random.normals(count), shape), device)
}

/// The product of `[.., m, k]` by `[.., k, n]` in f64, with batch dimensions broadcast, and the sum of the magnitudes of the
/// terms, to which the error of an f32 sum is proportional.
pub(super) fn product<const D: usize>(lhs: &Tensor<D>, rhs: &Tensor<D>) -> Vec<(f64, f64)> {
    let (left, right) = (lhs.dims(), rhs.dims());
    let [m, k, n] = [left[D - 2], left[D - 1], right[D - 1]];
    let (a, b) = (values(lhs.clone()), values(rhs.clone()));
    let batch: Vec<usize> = (0..D - 2).map(|dim| left[dim].max(right[dim])).collect();
    let batches = batch.iter().product::<usize>();
    let start = |dims: &[usize; D], mut index: usize| {
        let (mut start, mut stride) = (0, 1);
        for dim in (0..D - 2).rev() {
            start += index % batch[dim] % dims[dim] * stride;
            index /= batch[dim];
            stride *= dims[dim];
        }
        start * dims[D - 2] * dims[D - 1]
    };
    let mut output = Vec::new();
    for index in 0..batches {
        let (a, b) = (&a[start(&left, index)..], &b[start(&right, index)..]);
        for row in 0..m {
            for column in 0..n {
                let terms =
                    (0..k).map(|i| f64::from(a[row * k + i]) * f64::from(b[i * n + column]));
                let (sum, size) =
                    terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                output.push((sum, size));
            }
        }
    }
    output
}

/// The relative precision of a product that is rounded to a dtype, including the error of an f32 sum.
fn precision(dtype: FloatDType) -> f64 {
    match dtype {
        FloatDType::F32 => 1e-5,
        FloatDType::F16 => 1.0 / 2048.0,
        _ => 1.0 / 256.0,
    }
}

#[track_caller]
fn assert_close(actual: &[f32], expected: &[(f64, f64)], relative: f64) {
    assert_eq!(actual.len(), expected.len());
    for (&actual, &(expected, size)) in actual.iter().zip(expected) {
        let error = (f64::from(actual) - expected).abs();
        assert!(
            error <= relative * (size + expected.abs()) + 1e-30,
            "{actual} is not {expected} (terms of {size})"
        );
    }
}

#[test]
fn all_format_pairs_and_odd_shapes() {
    for device in devices() {
        let mut generator = Random::new(3);
        for [m, k, n] in [
            [1, 1, 1],
            [3, 5, 7],
            [16, 16, 16],
            [17, 33, 9],
            [4, 100, 1],
            [1, 7, 40],
        ] {
            for lhs in Fp8Format::ALL {
                for rhs in Fp8Format::ALL {
                    let a = Fp8Tensor::quantize(random(&mut generator, [m, k], &device), lhs);
                    let b = Fp8Tensor::quantize(random(&mut generator, [k, n], &device), rhs);
                    let expected = product(
                        &a.dequantize(FloatDType::F32),
                        &b.dequantize(FloatDType::F32),
                    );
                    let actual = scaled_matmul(&a, &b, None, FloatDType::F32).unwrap();
                    assert_eq!(actual.dims(), [m, n]);
                    assert_close(&values(actual), &expected, 1e-5);
                }
            }
        }
    }
}

/// CubeCL uses other kernels for large products. These have batches, a transposed operand, a bias and odd sizes.
#[test]
fn large_products() {
    for device in devices() {
        let mut generator = Random::new(14);
        let a = Fp8Tensor::quantize(
            random(&mut generator, [2, 90, 131], &device),
            Fp8Format::E4M3,
        );
        let b = Fp8Tensor::quantize(
            random(&mut generator, [1, 101, 131], &device),
            Fp8Format::E5M2,
        );
        let b = b.transpose();
        let bias: Tensor<1> = random(&mut generator, [101], &device);
        let host = values(bias.clone());
        let mut expected = product(
            &a.dequantize(FloatDType::F32),
            &b.dequantize(FloatDType::F32),
        );
        for (index, (sum, size)) in expected.iter_mut().enumerate() {
            *sum += f64::from(host[index % 101]);
            *size += f64::from(host[index % 101].abs());
        }
        for dtype in float_dtypes(&device) {
            let precision = precision(dtype).max(precision_of_sums(&device));
            let actual = scaled_matmul(&a, &b, Some(bias.clone()), dtype).unwrap();
            assert_eq!(actual.dims(), [2, 90, 101]);
            assert_close(&values(actual), &expected, precision);
        }
    }
}

#[test]
fn batches_and_broadcast() {
    for device in devices() {
        let mut generator = Random::new(4);
        for (left, right) in [
            ([2, 3, 4, 5], [2, 3, 5, 6]),
            ([1, 3, 4, 5], [2, 1, 5, 6]),
            ([2, 1, 1, 8], [1, 1, 8, 3]),
        ] {
            let a = Fp8Tensor::quantize(random(&mut generator, left, &device), Fp8Format::E4M3);
            let b = Fp8Tensor::quantize(random(&mut generator, right, &device), Fp8Format::E5M2);
            let expected = product(
                &a.dequantize(FloatDType::F32),
                &b.dequantize(FloatDType::F32),
            );
            let actual = scaled_matmul(&a, &b, None, FloatDType::F32).unwrap();
            assert_close(&values(actual), &expected, 1e-5);
        }
    }
}

#[test]
fn transposed_operands() {
    for device in devices() {
        let mut generator = Random::new(5);
        let a = Fp8Tensor::quantize(random(&mut generator, [6, 11], &device), Fp8Format::E4M3);
        let b = Fp8Tensor::quantize(random(&mut generator, [9, 6], &device), Fp8Format::E4M3);
        let (at, bt) = (a.clone().transpose(), b.clone().transpose());
        let expected = product(
            &at.dequantize(FloatDType::F32),
            &bt.dequantize(FloatDType::F32),
        );
        let actual = scaled_matmul(&at, &bt, None, FloatDType::F32).unwrap();
        assert_close(&values(actual), &expected, 1e-5);
    }
}

#[test]
fn rows_columns_and_blocks() {
    for device in devices() {
        let mut generator = Random::new(7);
        // Rows and columns of very different magnitudes: with a single scale, little would be left of the small ones.
        let spread = |tensor: Tensor<2>| {
            let [rows, columns] = tensor.dims();
            let ramp = |len: usize, shape: [usize; 2]| {
                let data = (0..len).map(|i| 4f32.powi(i as i32 % 7 - 3)).collect();
                Tensor::<2>::from_data(TensorData::new(data, shape), &device)
            };
            tensor * ramp(rows, [rows, 1]) * ramp(columns, [1, columns])
        };
        let a = spread(random(&mut generator, [9, 21], &device));
        let b = spread(random(&mut generator, [21, 6], &device));
        let e4m3 = Fp8Format::E4M3;
        let blocks =
            |t: &Tensor<2>, block| Fp8Tensor::quantize_blocks(t.clone(), block, e4m3).unwrap();
        for (left, right) in [
            (
                Fp8Tensor::quantize_rows(a.clone(), e4m3),
                Fp8Tensor::quantize_columns(b.clone(), e4m3),
            ),
            (
                Fp8Tensor::quantize_columns(a.clone(), e4m3),
                Fp8Tensor::quantize_rows(b.clone(), e4m3),
            ),
            (blocks(&a, [1, 8]), blocks(&b, [8, 8])),
            (blocks(&a, [2, 6]), blocks(&b, [4, 1])),
            (blocks(&a, [1, 100]), Fp8Tensor::quantize(b.clone(), e4m3)),
        ] {
            let (x, y) = (
                left.dequantize(FloatDType::F32),
                right.dequantize(FloatDType::F32),
            );
            let actual = scaled_matmul(&left, &right, None, FloatDType::F32).unwrap();
            assert_close(&values(actual), &product(&x, &y), 1e-5);
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let device = Device::flex();
    let tensor = |shape| Fp8Tensor::quantize(Tensor::<3>::ones(shape, &device), Fp8Format::E4M3);
    let multiply =
        |left, right| scaled_matmul(&tensor(left), &tensor(right), None, FloatDType::F32);
    assert_eq!(
        multiply([1, 2, 3], [1, 4, 5]).unwrap_err(),
        Fp8Error::InnerDimension {
            lhs: vec![1, 2, 3],
            rhs: vec![1, 4, 5],
            inner_lhs: 3,
            inner_rhs: 4
        }
    );
    assert_eq!(
        multiply([2, 2, 3], [3, 3, 5]).unwrap_err(),
        Fp8Error::BatchDimension {
            lhs: vec![2, 2, 3],
            rhs: vec![3, 3, 5],
            dim: 0
        }
    );
    let (a, b) = (tensor([1, 2, 3]), tensor([1, 3, 2]));
    let bias = Some(Tensor::ones([3], &device));
    assert_eq!(
        scaled_matmul(&a, &b, bias, FloatDType::F32).unwrap_err(),
        Fp8Error::BiasLength {
            bias: 3,
            columns: 2
        }
    );
    assert_eq!(
        scaled_matmul(&a, &b, None, FloatDType::F64).unwrap_err(),
        Fp8Error::OutputDType {
            dtype: "F64".to_string()
        }
    );
    let vector = Fp8Tensor::quantize(Tensor::<1>::ones([3], &device), Fp8Format::E4M3);
    assert_eq!(
        scaled_matmul(&vector, &vector, None, FloatDType::F32).unwrap_err(),
        Fp8Error::Rank { rank: 1 }
    );
}
