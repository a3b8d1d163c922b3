//! Formats, dtypes and product specs as scalars of a description.

use burn::tensor::FloatDType;
use burn_ir::ScalarIr;

use crate::{Fp8Format, Granularity, MatmulSpec};

pub(super) fn format_ir(format: Fp8Format) -> ScalarIr {
    ScalarIr::Bool(format == Fp8Format::E5M2)
}

pub(super) fn format_of(scalar: &ScalarIr) -> Fp8Format {
    match scalar {
        ScalarIr::Bool(false) => Fp8Format::E4M3,
        ScalarIr::Bool(true) => Fp8Format::E5M2,
        other => panic!("not an fp8 format: {other:?}"),
    }
}

const DTYPES: [FloatDType; 5] = [
    FloatDType::F32,
    FloatDType::BF16,
    FloatDType::F16,
    FloatDType::F64,
    FloatDType::Flex32,
];

pub(super) fn dtype_ir(dtype: FloatDType) -> ScalarIr {
    let index = DTYPES.iter().position(|&other| other == dtype);
    ScalarIr::UInt(index.expect("every float dtype is in the list") as u64)
}

pub(super) fn dtype_of(scalar: &ScalarIr) -> FloatDType {
    match scalar {
        ScalarIr::UInt(index) if (*index as usize) < DTYPES.len() => DTYPES[*index as usize],
        other => panic!("not a float dtype: {other:?}"),
    }
}

pub(super) fn spec_ir(spec: MatmulSpec) -> [ScalarIr; 8] {
    let [[left_rows, left_columns], [rows, columns]] = spec.granularities.map(granularity_ir);
    [
        format_ir(spec.lhs),
        format_ir(spec.rhs),
        left_rows,
        left_columns,
        rows,
        columns,
        dtype_ir(spec.output),
        ScalarIr::Bool(spec.fast_accumulation),
    ]
}

pub(super) fn spec_of(scalars: &[ScalarIr]) -> MatmulSpec {
    let [
        lhs,
        rhs,
        left_rows,
        left_columns,
        rows,
        columns,
        output,
        ScalarIr::Bool(fast),
    ] = scalars
    else {
        panic!("not a product: {scalars:?}")
    };
    MatmulSpec::new(format_of(lhs), format_of(rhs), dtype_of(output))
        .with_granularities([[left_rows, left_columns], [rows, columns]].map(granularity_of))
        .with_fast_accumulation(*fast)
}

/// The numbers of rows and of columns that share a scale, or 0 if all do.
pub(super) fn granularity_ir(granularity: Granularity) -> [ScalarIr; 2] {
    granularity.sides().map(ScalarIr::UInt)
}

pub(super) fn granularity_of(sizes: [&ScalarIr; 2]) -> Granularity {
    Granularity::from_sides(sizes.map(|size| match size {
        ScalarIr::UInt(size) => *size,
        other => panic!("not a number of rows or columns: {other:?}"),
    }))
}
