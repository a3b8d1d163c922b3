//! Products with a bias, its gradient, and products that are nothing else.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Tensor, Granularity, scaled_matmul};

use super::super::device::{Random, devices, float_dtypes, values};
use super::{assert_close, precision, product, random};

#[test]
fn bias_and_output_dtypes() {
    for device in devices() {
        let mut generator = Random::new(6);
        let a = Fp8Tensor::quantize(random(&mut generator, [5, 12], &device), Fp8Format::E4M3);
        let b = Fp8Tensor::quantize(random(&mut generator, [12, 10], &device), Fp8Format::E4M3);
        let bias: Tensor<1> = random(&mut generator, [10], &device);
        let mut expected = product(
            &a.dequantize(FloatDType::F32),
            &b.dequantize(FloatDType::F32),
        );
        for (index, bias) in values(bias.clone()).iter().cycle().take(50).enumerate() {
            expected[index].0 += f64::from(*bias);
            expected[index].1 += f64::from(bias.abs());
        }
        for dtype in float_dtypes(&device) {
            let precision = precision(dtype);
            let actual = scaled_matmul(&a, &b, Some(bias.clone()), dtype).unwrap();
            assert_eq!(actual.dtype(), DType::from(dtype));
            assert_close(&values(actual), &expected, precision);
        }
    }
}

/// It is the sum of the gradient's rows, whatever the scales of the operands are.
#[test]
fn the_gradient_of_a_bias() {
    for device in devices() {
        let dtypes = float_dtypes(&device);
        let device = device.autodiff();
        let mut generator = Random::new(23);
        let x: Tensor<2> = random(&mut generator, [3, 8], &device);
        let y: Tensor<2> = random(&mut generator, [8, 5], &device);
        let gradient: Tensor<2> = random(&mut generator, [3, 5], &device);
        let expected = values(gradient.clone().sum_dim(0));
        let square = Granularity::Block {
            rows: 4,
            columns: 4,
        };
        for granularity in [Granularity::Tensor, Granularity::Row, square] {
            let cast = Fp8Cast::new(granularity, Fp8Format::E4M3);
            let [a, b] =
                [&x, &y].map(|tensor| Fp8Tensor::quantize_as(tensor.clone(), cast).unwrap());
            for &dtype in &dtypes {
                let bias = random::<1>(&mut generator, [5], &device).require_grad();
                let output = scaled_matmul(&a, &b, Some(bias.clone()), dtype).unwrap();
                let loss = (output.cast(FloatDType::F32) * gradient.clone()).sum();
                let found = bias.grad(&loss.backward()).unwrap();
                assert_eq!(found.dtype(), DType::F32);
                for (found, expected) in values(found).iter().zip(&expected) {
                    // Each of three terms is rounded once.
                    let bound = 8.0 * precision(dtype) as f32;
                    assert!(
                        (found - expected).abs() < bound,
                        "{found} is not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_product_without_terms_is_the_bias() {
    for device in devices() {
        let empty =
            |shape| Fp8Tensor::quantize(Tensor::<2>::zeros(shape, &device), Fp8Format::E4M3);
        let bias = Tensor::from_floats([1.0, -2.0, 0.5], &device);
        let actual = scaled_matmul(&empty([2, 0]), &empty([0, 3]), Some(bias), FloatDType::F32);
        assert_eq!(values(actual.unwrap()), [1.0, -2.0, 0.5, 1.0, -2.0, 0.5]);
        // Also without any scales along the inner dimension.
        let block = |rows, columns| Granularity::Block { rows, columns };
        for [left, right] in [
            [Granularity::Row, Granularity::Column],
            [Granularity::Column, Granularity::Row],
            [Granularity::Tensor, Granularity::Row],
            [block(1, 4), block(4, 4)],
            [block(4, 4), Granularity::Tensor],
        ] {
            let empty = |shape, granularity| {
                let cast = Fp8Cast::new(granularity, Fp8Format::E4M3);
                Fp8Tensor::quantize_as(Tensor::<2>::zeros(shape, &device), cast).unwrap()
            };
            let (a, b) = (empty([2, 0], left), empty([0, 3], right));
            let bias = Tensor::from_floats([1.0, -2.0, 0.5], &device);
            let actual = scaled_matmul(&a, &b, Some(bias), FloatDType::F32).unwrap();
            assert_eq!(values(actual), [1.0, -2.0, 0.5, 1.0, -2.0, 0.5]);
            let actual = scaled_matmul(&a, &b, None, FloatDType::F32).unwrap();
            assert_eq!(values(actual), [0.0; 6]);
        }
        let none = scaled_matmul(&empty([0, 4]), &empty([4, 3]), None, FloatDType::F32).unwrap();
        assert_eq!(none.dims(), [0, 3]);
    }
}
