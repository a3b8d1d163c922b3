//! The codes that torch 2.15 and ml_dtypes produce, which agree on all finite cases: `tests/fixtures/float8`.

use burn_fp8::Fp8Format;
use half::{bf16, f16};

fn bytes(name: &str) -> Vec<u8> {
    let path = format!(
        "{}/tests/fixtures/float8/{name}",
        env!("CARGO_MANIFEST_DIR")
    );
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn f32s(name: &str) -> Vec<f32> {
    bytes(name)
        .chunks_exact(4)
        .map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap()))
        .collect()
}

pub(crate) fn name(format: Fp8Format) -> &'static str {
    match format {
        Fp8Format::E4M3 => "e4m3",
        Fp8Format::E5M2 => "e5m2",
    }
}

/// The value of every code.
pub(crate) fn values(format: Fp8Format) -> Vec<f32> {
    f32s(&format!("{}_to_f32.bin", name(format)))
}

/// All bf16 numbers and their codes.
pub(crate) fn from_bf16(format: Fp8Format) -> (Vec<bf16>, Vec<u8>) {
    let inputs = (0..=u16::MAX).map(bf16::from_bits).collect();
    (inputs, bytes(&format!("bf16_to_{}.bin", name(format))))
}

/// All f16 numbers and their codes.
pub(crate) fn from_f16(format: Fp8Format) -> (Vec<f16>, Vec<u8>) {
    let inputs = (0..=u16::MAX).map(f16::from_bits).collect();
    (inputs, bytes(&format!("f16_to_{}.bin", name(format))))
}

/// Sampled f32 numbers (all values, midpoints, neighbors of both, random and special ones) and their codes.
pub(crate) fn from_f32(format: Fp8Format) -> (Vec<f32>, Vec<u8>) {
    let codes = bytes(&format!("f32_samples_to_{}.bin", name(format)));
    (f32s("f32_samples.bin"), codes)
}

/// Compares codes. The sign of NaN is ignored, because it is not specified.
#[track_caller]
pub(crate) fn assert_codes<T: Copy + Into<f32>>(
    format: Fp8Format,
    inputs: &[T],
    codes: &[u8],
    expected: &[u8],
) {
    assert_eq!(
        (codes.len(), inputs.len()),
        (expected.len(), expected.len())
    );
    for ((&input, &code), &expected) in inputs.iter().zip(codes).zip(expected) {
        let value: f32 = input.into();
        let mask = if value.is_nan() { 0x7F } else { 0xFF };
        assert_eq!(
            code & mask,
            expected & mask,
            "{value:e} ({:#x}) to {format:?}",
            value.to_bits()
        );
    }
}
