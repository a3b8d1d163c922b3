//! What random arguments are refused, and why.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_fp8::{Fp8Error, Fp8Format, Fp8Tensor, scaled_matmul, scaled_matmul_with_amax};
use proptest::prelude::*;
use proptest::sample::select;

use super::{Outcome, check};

type Case = ([usize; 4], [usize; 4], Option<usize>, FloatDType);

fn cases() -> impl Strategy<Value = Case> {
    let dtypes = vec![
        FloatDType::F32,
        FloatDType::F64,
        FloatDType::BF16,
        FloatDType::F16,
        FloatDType::Flex32,
    ];
    let shape = || [0usize..3, 0..3, 0..3, 0..3];
    (
        shape(),
        shape(),
        proptest::option::of(0usize..3),
        select(dtypes),
    )
}

/// The name of the error that the arguments give.
fn refusal((left, right, bias, dtype): &Case) -> Option<&'static str> {
    let fits = |(a, b): (&usize, &usize)| a == b || *a == 1 || *b == 1;
    match () {
        _ if matches!(dtype, FloatDType::F64 | FloatDType::Flex32) => Some("OutputDType"),
        _ if left[3] != right[2] => Some("InnerDimension"),
        _ if !left[..2].iter().zip(&right[..2]).all(fits) => Some("BatchDimension"),
        _ if bias.is_some_and(|bias| bias != right[3]) => Some("BiasLength"),
        _ => None,
    }
}

fn refused(case: &Case, device: &Device) -> Outcome {
    let (left, right, bias, dtype) = *case;
    let [lhs, rhs] = [left, right].map(|shape| {
        let ones = Tensor::<4>::ones(shape, device);
        Fp8Tensor::quantize_with_scale(ones, 1.0, Fp8Format::E5M2).unwrap()
    });
    let bias = bias.map(|length| Tensor::<1>::ones([length], device));
    let products = [
        scaled_matmul(&lhs, &rhs, bias.clone(), dtype).map(|product| product.dims()),
        scaled_matmul_with_amax(&lhs, &rhs, bias, dtype).map(|(product, _)| product.dims()),
    ];
    for product in products {
        let found = match product {
            Ok(_) => None,
            Err(Fp8Error::OutputDType { .. }) => Some("OutputDType"),
            Err(Fp8Error::InnerDimension { .. }) => Some("InnerDimension"),
            Err(Fp8Error::BatchDimension { .. }) => Some("BatchDimension"),
            Err(Fp8Error::BiasLength { .. }) => Some("BiasLength"),
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        prop_assert_eq!(found, refusal(case));
    }
    Ok(())
}

#[test]
fn products_are_refused_for_their_reason() {
    check(100, cases(), |case| refused(case, &Device::flex()));
}

/// A scale is refused unless it and its inverse are positive and finite.
#[test]
fn scales_are_refused_by_their_value() {
    check(100, any::<f32>(), |&scale| {
        let x = Tensor::<1>::ones([2], &Device::flex());
        let found = Fp8Tensor::quantize_with_scale(x, scale, Fp8Format::E4M3);
        let usable = scale > 0.0 && scale.is_finite() && (1.0 / scale).is_finite();
        match found {
            Ok(_) => prop_assert!(usable),
            Err(Fp8Error::InvalidScale { scale: refused }) => {
                prop_assert!(!usable && refused.to_bits() == scale.to_bits());
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        }
        Ok(())
    });
}
