//! Casts of random tensors and back.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_fp8::{Fp8Cast, Fp8Data, Fp8Tensor, Granularity};
use proptest::collection::vec;
use proptest::prelude::*;

use super::reference::{self, Sum};
use super::tensors::{Drawn, drawn};
use super::{Outcome, check, dtypes, formats, granularities, side};
use crate::suite::device::values;

#[derive(Clone, Debug)]
struct Case {
    input: Drawn,
    dtype: FloatDType,
    cast: Fp8Cast,
    /// The scale, if it does not come from the amax.
    given: Option<f32>,
    back: FloatDType,
}

fn shapes() -> impl Strategy<Value = Vec<usize>> {
    let outer = prop_oneof![1 => Just(0usize), 4 => Just(1), 8 => 2usize..4];
    (vec(outer, 0..=3), side(), side(), any::<bool>()).prop_map(|(outer, rows, columns, vector)| {
        match vector && outer.is_empty() {
            true => vec![rows * columns],
            false => outer.into_iter().chain([rows, columns]).collect(),
        }
    })
}

fn cases() -> impl Strategy<Value = Case> {
    let given = prop_oneof![
        3 => Just(None),
        1 => (-120i32..=127).prop_map(|exponent| Some(1.3 * 2f32.powi(exponent).min(2e38))),
        1 => (-6i32..=6).prop_map(|exponent| Some(0.9 * 2f32.powi(exponent))),
    ];
    let cast = (granularities(), formats(), any::<bool>());
    let dtype = prop_oneof![4 => dtypes(), 1 => Just(FloatDType::F64)];
    (drawn(shapes()), dtype, cast, given, dtypes()).prop_map(
        |(input, dtype, (granularity, format, power_of_two), given, back)| {
            let granularity = match input.shape.len() {
                1 if granularity != Granularity::Tensor => Granularity::Row,
                _ => granularity,
            };
            Case {
                input,
                dtype,
                cast: Fp8Cast::new(granularity, format).with_power_of_two(power_of_two),
                given: given.filter(|_| granularity == Granularity::Tensor),
                back,
            }
        },
    )
}

/// Codes of NaN may have either sign.
pub(in crate::suite) fn same_codes(found: Vec<u8>, expected: &Fp8Data) -> Outcome {
    let unsigned = |code: u8| match reference::decode(expected.format, code).is_nan() {
        true => code & 0x7F,
        false => code,
    };
    let found: Vec<u8> = found.into_iter().map(unsigned).collect();
    prop_assert_eq!(&found, &expected.codes);
    Ok(())
}

fn same(found: Fp8Data, expected: &Fp8Data) -> Outcome {
    same_codes(found.codes, expected)?;
    let codes = expected.codes.clone();
    prop_assert_eq!(&Fp8Data { codes, ..found }, expected);
    Ok(())
}

pub(in crate::suite) fn same_amax(found: &[f32], expected: f32) -> Outcome {
    let same = matches!(*found, [found] if found.to_bits() == expected.to_bits()
        || found.is_nan() && expected.is_nan());
    prop_assert!(same, "the amax is {:?} instead of {}", found, expected);
    Ok(())
}

fn swapped<T: Copy>(shape: &[usize], elements: &[T]) -> Vec<T> {
    let last = shape.len() - 1;
    let [rows, columns] = [shape[last - 1], shape[last]];
    let matrices = elements.chunks(rows.max(1) * columns.max(1));
    let turned = matrices.flat_map(|matrix| {
        (0..columns)
            .flat_map(move |column| (0..rows).map(move |row| matrix[row * columns + column]))
    });
    turned.collect()
}

/// The data of the transpose.
pub(in crate::suite) fn transposed(data: &Fp8Data) -> Fp8Data {
    let turn = |shape: &[usize]| {
        let mut shape = shape.to_vec();
        let last = shape.len() - 1;
        shape.swap(last - 1, last);
        shape
    };
    Fp8Data {
        codes: swapped(&data.shape, &data.codes),
        shape: turn(&data.shape),
        scales: swapped(&data.scale_shape, &data.scales),
        scale_shape: turn(&data.scale_shape),
        granularity: data.granularity.transposed(),
        format: data.format,
    }
}

/// That these are the numbers of the codes, in `dtype`.
pub(in crate::suite) fn decoded(found: &[f32], data: &Fp8Data, dtype: FloatDType) -> Outcome {
    // The inverse of a scale may be subnormal.
    let sums = reference::numbers(data).into_iter().map(|number| Sum {
        sum: number,
        size: number.abs() + 1e-38,
    });
    let sums: Vec<Sum> = sums.collect();
    reference::all_near(found, &sums, 1e-6, dtype)
}

fn decodes<const D: usize>(tensor: &Fp8Tensor<D>, data: &Fp8Data, dtype: FloatDType) -> Outcome {
    let back = tensor.dequantize(dtype);
    prop_assert_eq!(back.dims().to_vec(), data.shape.clone());
    prop_assert_eq!(back.dtype(), dtype.into());
    decoded(&values(back), data, dtype)
}

fn cast<const D: usize>(case: &Case, device: &Device) -> Outcome {
    let input: Tensor<D> = case.input.tensor(case.dtype, device);
    let host = values(input.clone());
    let expected = reference::cast(case.cast, case.given, &case.input.shape, &host);
    let amax = reference::amax(host);
    let same_amax = |found: Tensor<1>| same_amax(&values(found), amax);
    same_amax(burn_fp8::amax(input.clone()))?;
    let format = case.cast.format;
    let tensor = match case.given {
        Some(scale) => Fp8Tensor::quantize_with_scale(input.clone(), scale, format),
        None => Fp8Tensor::quantize_as(input.clone(), case.cast),
    };
    let tensor = tensor.map_err(|error| TestCaseError::fail(error.to_string()))?;
    same(tensor.clone().into_data(), &expected)?;
    decodes(&tensor, &expected, case.back)?;
    let data = tensor.clone().into_data();
    let again = Fp8Tensor::<D>::from_data(data.clone(), device).unwrap();
    prop_assert_eq!(again.into_data(), data);
    // Burn cannot read a transposed tensor without elements on CubeCL's devices, and takes 0 as a size of a shape for another.
    let filled = input.shape().num_elements() > 0;
    if D > 1 && filled {
        let turned = transposed(&expected);
        same(tensor.clone().transpose().into_data(), &turned)?;
        decodes(&tensor.clone().transpose(), &turned, case.back)?;
    }
    if case.cast.granularity == Granularity::Tensor {
        let scale = tensor.scale().reshape([1]);
        let (direct, found) =
            Fp8Tensor::quantize_with_device_scale(input.clone(), scale.clone(), format);
        same(direct.into_data(), &expected)?;
        same_amax(found)?;
        if D > 1 && filled {
            let (direct, turned, found) =
                Fp8Tensor::quantize_with_transpose(input.clone(), scale, format);
            same(direct.into_data(), &expected)?;
            same(turned.clone().into_data(), &transposed(&expected))?;
            decodes(&turned, &transposed(&expected), case.back)?;
            let codes = turned.clone().into_data().codes;
            let flat = turned.reshape([input.shape().num_elements()]);
            prop_assert_eq!(flat.into_data().codes, codes);
            same_amax(found)?;
        }
    }
    Ok(())
}

fn cast_of_any_rank(case: &Case, device: &Device) -> Outcome {
    match case.input.shape.len() {
        1 => cast::<1>(case, device),
        2 => cast::<2>(case, device),
        3 => cast::<3>(case, device),
        4 => cast::<4>(case, device),
        _ => cast::<5>(case, device),
    }
}

#[test]
fn casts_are_those_of_the_reference() {
    check(200, cases(), |case| cast_of_any_rank(case, &Device::flex()));
}

#[cfg(feature = "cpu")]
#[test]
fn casts_of_kernels_are_those_of_the_reference() {
    check(4, cases(), |case| cast_of_any_rank(case, &Device::cpu()));
}

#[cfg(feature = "remote")]
#[test]
fn casts_over_a_wire_are_those_of_the_reference() {
    let servers = [false, true].map(super::serve);
    check(25, (cases(), 0..2usize), |(case, server)| {
        cast_of_any_rank(case, &servers[*server].1)
    });
}
