//! Products of random fp8 tensors.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_fp8::{
    Fp8Data, Fp8Format, Fp8Tensor, Granularity, scaled_matmul, scaled_matmul_with_amax,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::reference::{self, Matrix};
use super::{Outcome, check, dtypes, formats, granularities, side};
use crate::suite::device::{Random, values};

/// Which codes a side has.
#[derive(Clone, Copy, Debug)]
enum Codes {
    Finite,
    Any,
    Zeros,
}

/// A side of a product.
#[derive(Clone, Debug)]
struct Side {
    granularity: Granularity,
    format: Fp8Format,
    codes: Codes,
    /// Exponents of scales lie within so many of 0.
    spread: i32,
    /// Whether it is stored as its transpose.
    turned: bool,
    seed: u64,
}

#[derive(Clone, Debug)]
struct Case {
    /// Of both sides.
    shapes: [Vec<usize>; 2],
    sides: [Side; 2],
    bias: Option<FloatDType>,
    output: FloatDType,
}

fn shapes() -> impl Strategy<Value = [Vec<usize>; 2]> {
    let batch = (prop_oneof![1 => Just(0usize), 12 => 1usize..4], 0..4);
    (vec(batch, 0..=2), [side(), side(), side()]).prop_map(|(batch, [m, k, n])| {
        // One of the two may be broadcast.
        let of = |which| {
            let dims = batch.iter().map(move |(size, ones)| match *ones == which {
                true => 1,
                false => *size,
            });
            dims.collect::<Vec<_>>()
        };
        [[of(1), vec![m, k]].concat(), [of(2), vec![k, n]].concat()]
    })
}

fn sides() -> impl Strategy<Value = Side> {
    let codes = prop_oneof![
        6 => Just(Codes::Finite),
        1 => Just(Codes::Any),
        1 => Just(Codes::Zeros)
    ];
    let spread = select(vec![0, 8, 20]);
    (
        granularities(),
        formats(),
        codes,
        spread,
        any::<bool>(),
        any::<u64>(),
    )
        .prop_map(|(granularity, format, codes, spread, turned, seed)| Side {
            granularity,
            format,
            codes,
            spread,
            turned,
            seed,
        })
}

fn cases() -> impl Strategy<Value = Case> {
    let bias = proptest::option::of(dtypes());
    (shapes(), [sides(), sides()], bias, dtypes()).prop_map(|(shapes, sides, bias, output)| Case {
        shapes,
        sides,
        bias,
        output,
    })
}

impl Side {
    fn tensor<const D: usize>(&self, shape: &[usize], device: &Device) -> Fp8Tensor<D> {
        let (mut shape, mut granularity) = (shape.to_vec(), self.granularity);
        // Burn cannot read a transposed tensor without elements on CubeCL's devices.
        let turned = self.turned && !shape.contains(&0);
        if turned {
            shape.swap(D - 2, D - 1);
            granularity = granularity.transposed();
        }
        let mut random = Random::new(self.seed);
        let mut code = |_| loop {
            let code = match self.codes {
                Codes::Zeros => (random.bits() as u8) & 0x80,
                _ => random.bits() as u8,
            };
            if matches!(self.codes, Codes::Any) || reference::decode(self.format, code).is_finite()
            {
                return code;
            }
        };
        let codes = (0..shape.iter().product()).map(&mut code).collect();
        let (scale_shape, _) = reference::places(granularity, &shape);
        let scale = |_| {
            let exponent = (random.bits() % (2 * self.spread as u64 + 1)) as i32 - self.spread;
            (1.0 + random.uniform()) * 2f32.powi(exponent)
        };
        let data = Fp8Data {
            scales: (0..scale_shape.iter().product()).map(scale).collect(),
            codes,
            shape,
            scale_shape,
            granularity,
            format: self.format,
        };
        let tensor = Fp8Tensor::from_data(data, device).unwrap();
        match turned {
            true => tensor.transpose(),
            false => tensor,
        }
    }
}

fn product<const D: usize>(case: &Case, device: &Device) -> Outcome {
    let [lhs, rhs] = [0, 1].map(|side| case.sides[side].tensor::<D>(&case.shapes[side], device));
    let columns = rhs.dims()[D - 1];
    let bias = case.bias.map(|dtype| {
        let numbers = Random::new(7).normals(columns);
        Tensor::<1>::from_data(TensorData::new(numbers, [columns]), device).cast(dtype)
    });
    let host = bias.clone().map(values);
    let host: Option<Vec<f64>> = host.map(|bias| bias.into_iter().map(f64::from).collect());
    let [left, right] = [&lhs, &rhs].map(|side| Matrix::of(&side.clone().into_data()));
    let (shape, sums) = left.times(&right, host.as_deref());

    let found = scaled_matmul(&lhs, &rhs, bias.clone(), case.output).unwrap();
    prop_assert_eq!(found.dims().to_vec(), shape);
    prop_assert_eq!(found.dtype(), case.output.into());
    let found = values(found);
    reference::all_near(&found, &sums, 1e-5, case.output)?;

    let (again, amax) = scaled_matmul_with_amax(&lhs, &rhs, bias, case.output).unwrap();
    let bits = |values: &[f32]| -> Vec<_> {
        let bits = values
            .iter()
            .map(|value| (!value.is_nan()).then(|| value.to_bits()));
        bits.collect()
    };
    prop_assert_eq!(bits(&values(again)), bits(&found));
    prop_assert_eq!(bits(&values(amax)), bits(&[reference::amax(found)]));
    Ok(())
}

fn product_of_any_rank(case: &Case, device: &Device) -> Outcome {
    match case.shapes[0].len() {
        2 => product::<2>(case, device),
        3 => product::<3>(case, device),
        _ => product::<4>(case, device),
    }
}

#[test]
fn products_are_those_of_the_reference() {
    check(200, cases(), |case| {
        product_of_any_rank(case, &Device::flex())
    });
}

#[cfg(feature = "cpu")]
#[test]
fn products_of_kernels_are_those_of_the_reference() {
    check(4, cases(), |case| product_of_any_rank(case, &Device::cpu()));
}

#[cfg(feature = "remote")]
#[test]
fn products_over_a_wire_are_those_of_the_reference() {
    let servers = [false, true].map(super::serve);
    check(25, (cases(), 0..2usize), |(case, server)| {
        product_of_any_rank(case, &servers[*server].1)
    });
}
