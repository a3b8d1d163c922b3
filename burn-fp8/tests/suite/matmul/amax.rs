//! Products with the amax of their output.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_fp8::{
    Fp8Cast, Fp8Format, Fp8Tensor, Granularity, amax, scaled_matmul, scaled_matmul_with_amax,
};

use super::super::device::{Random, devices, float_dtypes, values};
use super::random;

/// For small and large products, rounded ones, and ones with several scales, including the bias.
#[test]
fn the_amax_is_that_of_the_output() {
    for device in devices() {
        let mut generator = Random::new(18);
        let mut check = |cast: Fp8Cast, [m, k, n]: [usize; 3], dtype| {
            let x = random(&mut generator, [m, k], &device);
            let y = random(&mut generator, [n, k], &device);
            let bias: Tensor<1> = random(&mut generator, [n], &device) * 30.0;
            let a = Fp8Tensor::quantize_as(x, cast).unwrap();
            let b = Fp8Tensor::quantize_as(y, cast).unwrap().transpose();
            let expected = scaled_matmul(&a, &b, Some(bias.clone()), dtype).unwrap();
            let expected = values(expected);
            let (output, found) = scaled_matmul_with_amax(&a, &b, Some(bias), dtype).unwrap();
            assert_eq!(values(output), expected);
            let largest = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
            assert!(largest > 1.0);
            assert_eq!(values(found), [largest]);
        };
        let whole = Fp8Cast::new(Granularity::Tensor, Fp8Format::E4M3);
        let (small, large) = ([3, 7, 5], [90, 131, 101]);
        for dtype in float_dtypes(&device) {
            check(whole, small, dtype);
            check(whole, large, dtype);
        }
        let rows = Fp8Cast::new(Granularity::Row, Fp8Format::E4M3);
        check(rows, small, FloatDType::F32);

        let nan = Tensor::<2>::from_floats([[f32::NAN, 1.0]], &device);
        let nan = Fp8Tensor::quantize(nan, Fp8Format::E4M3);
        let column = nan.clone().transpose();
        let (_, found) = scaled_matmul_with_amax(&nan, &column, None, FloatDType::F32).unwrap();
        assert!(values(found)[0].is_nan());
        assert!(scaled_matmul_with_amax(&nan, &nan, None, FloatDType::F32).is_err());
    }
}

/// Under autodiff the bias has a gradient, and the amax takes the bias into account.
#[test]
fn the_amax_is_not_differentiated() {
    let device = Device::flex().autodiff();
    let ones = Tensor::<2>::ones([2, 3], &device);
    let a = Fp8Tensor::quantize_with_scale(ones, 1.0, Fp8Format::E4M3).unwrap();
    let b = a.clone().transpose();
    let bias = Tensor::<1>::from_floats([-10.0, 1.0], &device).require_grad();
    let (output, found) =
        scaled_matmul_with_amax(&a, &b, Some(bias.clone()), FloatDType::F32).unwrap();
    assert_eq!(values(found.clone()), [7.0]);
    assert_eq!(values(found), values(amax(output.clone())));
    let gradients = output.sum().backward();
    assert_eq!(values(bias.grad(&gradients).unwrap()), [2.0, 2.0]);
    let (_, plain) = scaled_matmul_with_amax(&a, &b, None, FloatDType::F32).unwrap();
    assert_eq!(values(plain), [3.0]);
}
