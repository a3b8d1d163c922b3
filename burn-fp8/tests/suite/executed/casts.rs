//! Codes of floats, and floats of codes, equal those of torch and ml_dtypes.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, FloatDType, Shape};
use burn_cubecl::{CubeBackend, cubecl::client::Client, ops::permute, tensor::CubeTensor};
use burn_fp8::{Fp8Format, Fp8Ops, Granularity};
use half::{bf16, f16};

use super::super::{
    fixtures,
    gpu::{Gpu, launched, tensor},
};
use super::elements::{self, codes, numbers, packed_floats};

fn floats(client: &Client, values: &[f32], shape: &[usize]) -> CubeTensor {
    elements::floats(client, values, shape, FloatDType::F32)
}

fn single(tensor: &CubeTensor) -> f32 {
    let [value] = numbers(tensor)[..] else {
        panic!()
    };
    value
}

/// Codes come from bit operations before Ada, and from an instruction since then.
const CODERS: [Gpu; 3] = [Gpu::Ampere, Gpu::Ada, Gpu::Hopper];

#[test]
fn codes_of_every_half_float_are_ml_dtypes() {
    for client in CODERS.into_iter().filter_map(Gpu::client) {
        let one = || floats(&client, &[1.0], &[1]);
        let quantize = |bytes: &[u8], dtype, format| {
            let input = tensor(&client, bytes, &[bytes.len() / 2], dtype);
            let (found, amax) = CubeBackend::fp8_quantize(input, one(), format);
            assert!(single(&amax).is_nan());
            codes(&found)
        };
        for format in Fp8Format::ALL {
            let (inputs, expected) = fixtures::from_bf16(format);
            let found = quantize(bytemuck::cast_slice(&inputs), DType::BF16, format);
            fixtures::assert_codes::<bf16>(format, &inputs, &found, &expected);
            let (inputs, expected) = fixtures::from_f16(format);
            let found = quantize(bytemuck::cast_slice(&inputs), DType::F16, format);
            fixtures::assert_codes::<f16>(format, &inputs, &found, &expected);
        }
    }
}

/// The samples include ties, subnormals, infinities and NaN.
#[test]
fn codes_of_sampled_floats_are_ml_dtypes() {
    for client in CODERS.into_iter().filter_map(Gpu::client) {
        for format in Fp8Format::ALL {
            let (inputs, expected) = fixtures::from_f32(format);
            let input = floats(&client, &inputs, &[inputs.len()]);
            let one = floats(&client, &[1.0], &[1]);
            let (found, _) = CubeBackend::fp8_quantize(input, one, format);
            fixtures::assert_codes(format, &inputs, &codes(&found), &expected);
        }
    }
}

/// Batches with rows that are no multiples of a chunk, read four at a time and one by one, and matrices on which units work
/// together.
#[test]
fn codes_and_those_of_the_transpose_are_ml_dtypes() {
    let Some(client) = Gpu::Hopper.client() else {
        return;
    };
    for (format, [batch, rows, columns], kernel) in [
        (Fp8Format::E4M3, [2, 27, 76], "quantize"),
        (Fp8Format::E5M2, [2, 27, 76], "quantize"),
        (Fp8Format::E4M3, [2, 27, 35], "quantize"),
        (Fp8Format::E4M3, [1, 131, 132], "staged"),
        (Fp8Format::E5M2, [1, 140, 129], "staged"),
    ] {
        let (all, expected) = fixtures::from_f32(format);
        let count = batch * rows * columns;
        // Samples from the whole range.
        let step = all.len() / count;
        let inputs: Vec<f32> = all.iter().copied().step_by(step).take(count).collect();
        let expected: Vec<u8> = expected.iter().copied().step_by(step).take(count).collect();
        let input = floats(&client, &inputs, &[batch, rows, columns]);
        let one = floats(&client, &[1.0], &[1]);
        let (found, turned, amax) = CubeBackend::fp8_quantize_transposed(input, one, format);
        fixtures::assert_codes(format, &inputs, &codes(&found), &expected);
        assert_eq!(turned.shape(), Shape::new([batch, columns, rows]));
        let turned = codes(&turned);
        for index in 0..count {
            let (matrix, row, column) = (
                index / (rows * columns),
                index / columns % rows,
                index % columns,
            );
            let code = turned[(matrix * columns + column) * rows + row];
            fixtures::assert_codes(
                format,
                &inputs[index..=index],
                &[code],
                &expected[index..=index],
            );
        }
        let largest = inputs.iter().map(|x| x.to_bits() & 0x7FFF_FFFF).max();
        assert_eq!(single(&amax).to_bits(), largest.unwrap());
        let by = if columns % 4 == 0 { "n_4" } else { "n_1" };
        let kernels = launched(&client);
        let is_it = |name: &String| name.contains(kernel) && name.contains(by);
        assert!(kernels.iter().any(is_it), "{kernels:?}");
    }
}

/// An amax, codes with the amax, and codes in both layouts with the amax each take one kernel and one read of the input, in place,
/// also if there are gaps between its rows, as CUDA's allocations have them.
#[test]
fn casts_are_one_kernel() {
    // Rows that are read four elements at a time, and one by one.
    for (gpu, turns, columns) in [
        (Gpu::Ampere, false, 40),
        (Gpu::Ampere, false, 35),
        (Gpu::Hopper, true, 40),
    ] {
        let Some(client) = gpu.client() else { return };
        let rows = 24;
        let inputs: Vec<f32> = (0..rows * columns).map(|x| x as f32 - 700.0).collect();
        let contiguous =
            |shape: [usize; 2]| packed_floats(&client, &inputs, &shape, FloatDType::F32);
        let allocated = floats(&client, &inputs, &[rows, columns]);
        let pitch = allocated.meta.strides()[0];
        assert!(pitch > columns);
        for (input, strides) in [
            (contiguous([rows, columns]), [columns, 1]),
            (permute(contiguous([columns, rows]), &[1, 0]), [1, rows]),
            (allocated, [pitch, 1]),
        ] {
            assert_eq!(input.meta.strides().to_vec(), strides);
            let scale = floats(&client, &[0.5], &[1]);
            let ran = |cast: &dyn Fn() -> CubeTensor, kernel: &str| {
                let before = launched(&client).len();
                let amax = cast();
                let ran = launched(&client).split_off(before);
                assert_eq!(ran.len(), 1, "{ran:?} on {gpu:?}");
                assert!(ran[0].contains(kernel), "{ran:?}");
                assert_eq!(single(&amax), 700.0);
            };
            let expected = numbers(&input).into_iter();
            let expected: Vec<u8> = expected.map(|x| Fp8Format::E4M3.encode(x * 0.5)).collect();
            let (input, scale, format) = (|| input.clone(), || scale.clone(), Fp8Format::E4M3);
            ran(&|| CubeBackend::fp8_amax(input()), "amax");
            let quantize = || {
                let (found, amax) = CubeBackend::fp8_quantize(input(), scale(), format);
                assert_eq!(codes(&found), expected);
                amax
            };
            ran(&quantize, "quantize");
            let both = || {
                let (found, turned, amax) =
                    CubeBackend::fp8_quantize_transposed(input(), scale(), format);
                assert_eq!(codes(&found), expected);
                // A separate copy only where products read it.
                let mut swapped = turned.meta.strides().to_vec();
                swapped.swap(0, 1);
                assert_eq!(found.meta.strides().to_vec() != swapped, turns);
                amax
            };
            ran(&both, "quantize");
        }
    }
}

#[test]
fn values_of_every_code_are_ml_dtypes() {
    let Some(client) = Gpu::Ada.client() else {
        return;
    };
    // Also with gaps between rows, and behind the last row.
    for (format, dtype, shape) in [
        (Fp8Format::E4M3, FloatDType::F32, [1, 256]),
        (Fp8Format::E5M2, FloatDType::BF16, [4, 63]),
        (Fp8Format::E4M3, FloatDType::F16, [1, 252]),
    ] {
        let all: Vec<u8> = (0..=u8::MAX).take(shape[0] * shape[1]).collect();
        let input = tensor(&client, &all, &shape, DType::U8);
        // Exact, because the scale is a power of two.
        let output = CubeBackend::fp8_dequantize(
            input,
            floats(&client, &[0.5], &[1]),
            Granularity::Tensor,
            format,
            dtype,
        );
        for (found, code) in numbers(&output).into_iter().zip(fixtures::values(format)) {
            let expected = 2.0 * code;
            assert!(
                found == expected || found.is_nan() && expected.is_nan(),
                "{found} is not {expected}"
            );
        }
    }
}

#[test]
fn amax_is_the_largest_magnitude() {
    let Some(client) = Gpu::Hopper.client() else {
        return;
    };
    for (values, expected) in [
        (vec![-0.0, 0.0], 0.0),
        (vec![1.0, -3.5, 2.0], 3.5),
        (vec![1e-45], 1e-45),
        (vec![1.0, f32::NEG_INFINITY, 2.0], f32::INFINITY),
        (
            (0..1000).map(|i| (i * 7 % 1000) as f32 - 600.0).collect(),
            600.0,
        ),
    ] {
        let input = floats(&client, &values, &[values.len()]);
        assert_eq!(single(&CubeBackend::fp8_amax(input)), expected);
    }
    let input = floats(&client, &[1.0, f32::NAN, f32::INFINITY], &[3]);
    assert!(single(&CubeBackend::fp8_amax(input)).is_nan());
}
