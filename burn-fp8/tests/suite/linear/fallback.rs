//! What a layer leaves to Burn's own `linear`.

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_fp8::recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe};
use burn_fp8::{Fp8Linear, calibrate, fp8_autocast};

use super::super::device::{Random, devices, float_dtypes, precision_of_sums, values};
use super::{assert_near, linear};

/// As with fp8, the input may have another dtype than the parameters. The product is in the weight's dtype, and the output has
/// the input's.
#[test]
fn inputs_have_a_dtype_of_their_own() {
    for device in devices() {
        let mut random = Random::new(60);
        let plain = linear(&mut random, 6, 3, &device);
        let layer = Fp8Linear::from(plain.clone());
        let x = random.matrix([5, 6], &device);
        for dtype in float_dtypes(&device) {
            let x = x.clone().cast(dtype);
            let exact = plain.forward(x.clone().cast(FloatDType::F32)).cast(dtype);
            let own = DType::from(dtype);
            for output in [
                fp8_autocast(false, None, || layer.forward(x.clone())),
                calibrate(|| layer.forward(x.clone())),
            ] {
                assert_eq!(output.dtype(), own);
                assert_eq!(values(output), values(exact.clone()), "{dtype:?}");
            }
            let none = layer.forward(x.clone().slice([0..0, 0..6]));
            assert_eq!((none.dims(), none.dtype()), ([0, 3], own));
            assert_eq!(layer.forward(x).dtype(), own, "and so in fp8");
        }
    }
}

/// The gradients of weight and input have the dtypes of these.
#[test]
fn gradients_of_mixed_dtypes_are_those_of_the_products() {
    for device in devices() {
        // Burn's own products of f32 are of TF32 on an NVIDIA GPU.
        let precision = precision_of_sums(&device) as f32;
        let exact = if precision > 1e-5 { 1e-2 } else { 1e-5 };
        let device = device.autodiff();
        let mut random = Random::new(61);
        let plain = linear(&mut random, 6, 3, &device);
        let layer = Fp8Linear::from(plain.clone());
        let x = random.matrix([5, 6], &device);
        for dtype in float_dtypes(&device) {
            let x = x.clone().cast(dtype).detach().require_grad();
            let output = fp8_autocast(false, None, || layer.forward(x.clone()));
            let gradients = output.cast(FloatDType::F32).sum().backward();
            let weight = layer.weight.val().grad(&gradients).unwrap();
            let input = x.grad(&gradients).unwrap();
            assert_eq!((weight.dtype(), input.dtype()), (DType::F32, dtype.into()));
            // The gradients of a sum are the sum of each column and of each row.
            let columns = x.clone().cast(FloatDType::F32).sum_dim(0).transpose();
            assert_near(&values(weight), &values(columns.repeat_dim(1, 3)), exact);
            let rows = |terms: Tensor<2>| values(terms.sum_dim(1).transpose().repeat_dim(0, 5));
            let sums = rows(plain.weight.val());
            // What rounding the terms to TF32 may change.
            let errors = rows(plain.weight.val().abs() * precision);
            for ((actual, sum), error) in values(input).into_iter().zip(sums).zip(errors) {
                let error = 1e-2 * sum.abs() + error;
                assert!((actual - sum).abs() <= error, "{actual} is not {sum}");
            }
        }
    }
}

/// Without terms, a product is the bias; without columns, it is empty.
#[test]
fn layers_of_no_size_are_linear_layers() {
    let recipes: [Fp8Recipe; 3] = [
        DelayedScaling::new().into(),
        CurrentScaling::new().into(),
        BlockScaling::new().into(),
    ];
    for device in devices() {
        for recipe in recipes {
            // Burn's initializers have no range for weights without inputs.
            let layer = |shape: [usize; 2]| {
                let bias = Tensor::<1>::full([shape[1]], 0.5, &device);
                let linear = Linear {
                    weight: Param::from_tensor(Tensor::zeros(shape, &device)),
                    bias: Some(Param::from_tensor(bias)),
                };
                Fp8Linear::from_linear(linear, recipe).unwrap()
            };
            let output = layer([0, 3]).forward(Tensor::<2>::zeros([2, 0], &device));
            assert_eq!((output.dims(), values(output)), ([2, 3], vec![0.5; 6]));
            let output = layer([4, 0]).forward(Tensor::<2>::ones([2, 4], &device));
            assert_eq!(output.dims(), [2, 0]);
        }
    }
}
