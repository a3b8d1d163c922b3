//! The norm of gradients, beside the formula in f64, where f32 has the squares and where it has not.

use burn::{
    module::{Module, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Device, Tensor, TensorData},
};
use burn_layer::{
    Factor, MaxNorm, clip_gradient_norm, gradient_norm, gradient_norm_on_device, scale_gradients,
};

use super::devices::devices;

#[derive(Module, Debug)]
struct Two {
    first: Param<Tensor<2>>,
    second: Param<Tensor<1>>,
}

/// A model whose gradients are these, if they are some.
fn model(device: &Device, gradients: [Option<&[f64]>; 2], dtype: DType) -> (Two, GradientsParams) {
    let two = Two {
        first: Param::initialized(ParamId::new(), Tensor::zeros([2, 2], device)),
        second: Param::initialized(ParamId::new(), Tensor::zeros([3], device)),
    };
    let tensor = |values: &[f64]| {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        Tensor::<1>::from_data(data.convert_dtype(dtype), (device, dtype))
    };
    let mut all = GradientsParams::new();
    if let Some(values) = gradients[0] {
        all.register(two.first.id, tensor(values).reshape([2, 2]));
    }
    if let Some(values) = gradients[1] {
        all.register(two.second.id, tensor(values));
    }
    (two, all)
}

/// On the host, and on the device.
fn norms(device: &Device, gradients: [Option<&[f64]>; 2], dtype: DType) -> [f64; 2] {
    let (model, gradients) = model(device, gradients, dtype);
    let there = gradient_norm_on_device(&gradients, &model).unwrap();
    let there = there.into_data().iter::<f64>().next().unwrap();
    [gradient_norm(&gradients, &model).unwrap(), there]
}

#[test]
fn norms_are_those_of_the_formula_whatever_f32_does_to_squares() {
    let [first, second] = [&[3.0, -1.0, 0.5, 2.0][..], &[-4.0, 0.25, 1.0]];
    // Of 1e-30 and 1e-23 the squares are 0 in f32, and of 1e30 infinite; numbers up to 2^127 are floats.
    let magnitudes = [1.0, 1e-6, 1e6, 1e-18, 1e-23, 1e-30, 1e18, 1e20, 1e30, 4e37];
    for device in devices() {
        for magnitude in magnitudes {
            // The second gradient is as large as the first, or much smaller or larger.
            for other in [1.0, 1e-12, 1e12].map(|factor| magnitude * factor) {
                if !(1e-30..1e38).contains(&other) {
                    continue;
                }
                let of = |values: &[f64], by: f64| -> Vec<f64> {
                    values.iter().map(|value| value * by).collect()
                };
                let (first, second) = (of(first, magnitude), of(second, other));
                let squares = first.iter().chain(&second).map(|value| value * value);
                let expected = squares.sum::<f64>().sqrt();
                for norm in norms(&device, [Some(&first), Some(&second)], DType::F32) {
                    assert!(
                        (norm / expected - 1.0).abs() < 1e-5,
                        "{device:?} {magnitude} {other}: {norm}, expected {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn norms_of_other_types_are_taken_in_f32_at_least() {
    let device = Device::flex();
    let values = [300.0, -300.0, 300.0, 300.0];
    for dtype in [DType::F16, DType::BF16, DType::F64] {
        for norm in norms(&device, [Some(&values), None], dtype) {
            assert!((norm / 600.0 - 1.0).abs() < 4e-3, "{dtype:?}: {norm}");
        }
    }
    // More than any f32 is.
    let values = [1e200; 3];
    let [norm, there] = norms(&device, [None, Some(&values)], DType::F64);
    assert!((norm / (3f64.sqrt() * 1e200) - 1.0).abs() < 1e-6, "{norm}");
    assert_eq!(there, f64::INFINITY);
}

#[test]
fn gradients_that_are_zero_absent_or_not_finite_have_such_norms() {
    for device in devices() {
        let norms = |second: Option<&[f64]>| {
            let first = [0.0; 4];
            norms(&device, [Some(&first), second], DType::F32)
        };
        assert_eq!(norms(None), [0.0; 2]);
        assert_eq!(norms(Some(&[0.0; 3])), [0.0; 2]);
        assert_eq!(
            norms(Some(&[1.0, f64::NEG_INFINITY, 0.0])),
            [f64::INFINITY; 2]
        );
        for values in [[f64::NAN, 1.0, 0.0], [f64::NAN, f64::INFINITY, 1e30]] {
            let [norm, there] = norms(Some(&values));
            assert!(norm.is_nan() && there.is_nan(), "{norm} {there}");
        }
    }
    let (model, gradients) = model(&Device::flex(), [None, None], DType::F32);
    assert_eq!(gradient_norm(&gradients, &model).unwrap(), 0.0);
    assert!(gradient_norm_on_device(&gradients, &model).is_none());
}

#[test]
fn a_gradient_without_elements_adds_nothing() {
    for device in devices() {
        let empty = Tensor::<2>::zeros([0, 3], &device);
        let filled = Tensor::<2>::from_floats([[3.0, 4.0]], &device);
        let params =
            [&empty, &filled].map(|values| Param::initialized(ParamId::new(), values.clone()));
        let model = params.to_vec();
        let mut gradients = GradientsParams::new();
        gradients.register(params[0].id, empty);
        assert_eq!(gradient_norm(&gradients, &model).unwrap(), 0.0);
        assert!(gradient_norm_on_device(&gradients, &model).is_none());
        // The second time, with squares that are more than f32 has.
        for scale in [1.0, 1e25] {
            gradients.register(params[1].id, filled.clone().mul_scalar(scale));
            let there = gradient_norm_on_device(&gradients, &model).unwrap();
            for norm in [
                gradient_norm(&gradients, &model).unwrap(),
                there.into_scalar::<f32>().into(),
            ] {
                assert!((norm / (5.0 * scale) - 1.0).abs() < 1e-6, "{norm}");
            }
        }
    }
}

/// As PyTorch, whose `parameters()` gives a shared one once.
#[test]
fn a_parameter_in_two_places_counts_once() {
    let device = Device::flex();
    let mut gradients = GradientsParams::new();
    let weight = Param::initialized(ParamId::new(), Tensor::<1>::zeros([2], &device));
    // Squares of the second are more than f32 has: the other way to take the norm.
    for scale in [1.0, 1e25] {
        let gradient = Tensor::<1>::from_floats([3.0 * scale, 4.0 * scale], &device);
        gradients.register(weight.id, gradient);
        let tied = vec![weight.clone(), weight.clone()];
        let norm = gradient_norm(&gradients, &tied).unwrap();
        assert!(
            (norm / (5.0 * f64::from(scale)) - 1.0).abs() < 1e-6,
            "{norm}"
        );
        let there = gradient_norm_on_device(&gradients, &tied).unwrap();
        let there: f32 = there.into_scalar();
        assert!((there / (5.0 * scale) - 1.0).abs() < 1e-6, "{there}");
    }
}

#[test]
fn factors_are_those_of_pytorch() {
    for (norm, max_norm) in [(0.0, 1.0), (3.0, 4.0), (4.0, 1.0), (1e30, 2.0)] {
        let expected = f64::min(1.0, max_norm / (norm + 1e-6));
        let factor = MaxNorm::new(max_norm).factor(norm);
        assert_eq!(factor.is_some(), expected < 1.0);
        assert_eq!(factor.unwrap_or(1.0), expected);
        let norm = Tensor::<1>::from_data([norm], (&Device::flex(), DType::F32));
        let there: f32 = MaxNorm::new(max_norm).factor_on_device(norm).into_scalar();
        assert!((f64::from(there) / expected - 1.0).abs() < 1e-6, "{there}");
    }
    // Nothing is made of a norm that is none.
    assert_eq!(MaxNorm::new(1.0).factor(f64::NAN), None);
}

#[test]
#[should_panic(expected = "must be positive")]
fn a_largest_norm_is_positive() {
    MaxNorm::new(0.0);
}

#[test]
fn gradients_are_scaled_each_in_its_dtype_and_once() {
    let device = Device::flex();
    let values = [3.0, -1.0, 0.5, 2.0];
    let number = 0.3;
    // Half of a last place.
    let dtypes = [
        (DType::F64, 0.0),
        (DType::F32, 2f64.powi(-23)),
        (DType::F16, 2f64.powi(-11)),
        (DType::BF16, 2f64.powi(-8)),
    ];
    for (dtype, error) in dtypes {
        let on_device = Tensor::<1>::from_data([number], (&device, DType::F32));
        for (factor, error) in [
            (Factor::host(number), error),
            (Factor::device(on_device), error.max(1e-7)),
        ] {
            let (two, gradients) = model(&device, [Some(&values), Some(&[1.0; 3])], dtype);
            // In two places, and one that the module does not have.
            let tied = vec![two.first.clone(), two.first.clone()];
            let scaled = scale_gradients(gradients, &tied, factor);
            let found = scaled.get::<2>(two.first.id).unwrap();
            assert_eq!(found.dtype(), dtype);
            for (found, value) in found.into_data().iter::<f64>().zip(values) {
                let expected = value * number;
                let off = (found - expected).abs();
                assert!(
                    off <= error * expected.abs() * 1.001,
                    "{dtype:?}: {found}, {expected}"
                );
            }
            let other = scaled.get::<1>(two.second.id).unwrap();
            assert_eq!(other.into_data().iter::<f64>().sum::<f64>(), 3.0);
        }
    }
}

/// Also where squares overflow f32, or underflow it.
#[test]
fn gradients_are_clipped_to_the_norm() {
    for device in devices() {
        for (norm, max_norm) in [(5.0, 1.0), (5e20, 2.0), (5e-20, 1.0), (5.0, 5.5)] {
            let values = [0.6, 0.8, 0.0, 0.0].map(|value| value * norm);
            let (model, gradients) = model(&device, [Some(&values), None], DType::F32);
            let (gradients, found) = clip_gradient_norm(gradients, &model, max_norm).unwrap();
            assert!((found / norm - 1.0).abs() < 1e-6, "{found}");
            let clipped = gradients.get::<2>(model.first.id).unwrap();
            let clipped = clipped.into_data();
            let clipped = clipped.iter::<f64>().map(|it| it * it).sum::<f64>().sqrt();
            let expected = f64::min(norm, max_norm * norm / (norm + 1e-6));
            assert!(
                (clipped / expected - 1.0).abs() < 1e-5,
                "{clipped}, {expected}"
            );
        }
    }
}
