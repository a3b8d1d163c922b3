//! Descriptions of the ops.

use burn::tensor::{DType, FloatDType, Shape};
use burn_ir::{CustomOpIr, ScalarIr, TensorId, TensorIr};

use super::{
    AMAX, DEQUANTIZE, DEQUANTIZE_BLOCKS, MATMUL, MATMUL_AMAX, MATMUL_BLOCKS, QUANTIZE,
    QUANTIZE_BLOCKS, QUANTIZE_TRANSPOSED, SCALES, UPDATE_SCALE,
    scalar::{dtype_ir, format_ir, granularity_ir, spec_ir},
};
use crate::{
    Fp8Cast, Fp8Format, Granularity, MatmulSpec,
    recipe::{AmaxCompute, ScaleUpdate},
};

pub(crate) fn amax(input: TensorIr, mut id: impl FnMut() -> TensorId) -> CustomOpIr {
    let output = TensorIr::uninit(id(), Shape::new([1]), DType::F32);
    CustomOpIr::with_scalars(AMAX, &[input], &[output], vec![])
}

pub(crate) fn scales(
    amax: TensorIr,
    format: Fp8Format,
    power_of_two: bool,
    mut id: impl FnMut() -> TensorId,
) -> CustomOpIr {
    let output = TensorIr::uninit(id(), amax.shape.clone(), DType::F32);
    let scalars = vec![format_ir(format), ScalarIr::Bool(power_of_two)];
    CustomOpIr::with_scalars(SCALES, &[amax], &[output], scalars)
}

pub(crate) fn quantize(
    input: TensorIr,
    scale: TensorIr,
    format: Fp8Format,
    mut id: impl FnMut() -> TensorId,
) -> CustomOpIr {
    let outputs = [
        TensorIr::uninit(id(), input.shape.clone(), DType::U8),
        TensorIr::uninit(id(), Shape::new([1]), DType::F32),
    ];
    CustomOpIr::with_scalars(QUANTIZE, &[input, scale], &outputs, vec![format_ir(format)])
}

pub(crate) fn quantize_transposed(
    input: TensorIr,
    scale: TensorIr,
    format: Fp8Format,
    mut id: impl FnMut() -> TensorId,
) -> CustomOpIr {
    let outputs = [
        TensorIr::uninit(id(), input.shape.clone(), DType::U8),
        TensorIr::uninit(id(), transposed(&input.shape), DType::U8),
        TensorIr::uninit(id(), Shape::new([1]), DType::F32),
    ];
    let scalars = vec![format_ir(format)];
    CustomOpIr::with_scalars(QUANTIZE_TRANSPOSED, &[input, scale], &outputs, scalars)
}

pub(crate) fn dequantize(
    codes: TensorIr,
    scale: TensorIr,
    format: Fp8Format,
    dtype: FloatDType,
    mut id: impl FnMut() -> TensorId,
) -> CustomOpIr {
    let output = TensorIr::uninit(id(), codes.shape.clone(), dtype.into());
    CustomOpIr::with_scalars(
        DEQUANTIZE,
        &[codes, scale],
        &[output],
        vec![format_ir(format), dtype_ir(dtype)],
    )
}

/// The product, and its amax if `amax` is true.
pub(crate) fn matmul(
    [lhs, rhs]: [TensorIr; 2],
    scales: [TensorIr; 2],
    bias: Option<TensorIr>,
    spec: MatmulSpec,
    amax: bool,
    mut id: impl FnMut() -> TensorId,
) -> CustomOpIr {
    let shape = matmul_shape(&lhs.shape, &rhs.shape);
    let mut outputs = vec![TensorIr::uninit(id(), shape, spec.output.into())];
    if amax {
        outputs.push(TensorIr::uninit(id(), Shape::new([1]), DType::F32));
    }
    let scalars = spec_ir(spec).to_vec();
    let inputs: Vec<_> = [lhs, rhs].into_iter().chain(scales).chain(bias).collect();
    let name = if amax { MATMUL_AMAX } else { MATMUL };
    CustomOpIr::with_scalars(name, &inputs, &outputs, scalars)
}

pub(crate) fn update_scale(
    history: TensorIr,
    scale: TensorIr,
    amax: TensorIr,
    update: ScaleUpdate,
    mut id: impl FnMut() -> TensorId,
) -> CustomOpIr {
    let outputs = [
        TensorIr::uninit(id(), history.shape.clone(), DType::F32),
        TensorIr::uninit(id(), Shape::new([1]), DType::F32),
    ];
    let scalars = vec![
        ScalarIr::Float(f64::from(update.fp8_max)),
        ScalarIr::Int(i64::from(update.margin)),
        ScalarIr::Bool(update.algorithm == AmaxCompute::Max),
    ];
    CustomOpIr::with_scalars(UPDATE_SCALE, &[history, scale, amax], &outputs, scalars)
}

pub(crate) fn quantize_blocks(
    input: TensorIr,
    cast: Fp8Cast,
    mut id: impl FnMut() -> TensorId,
) -> CustomOpIr {
    let scales = cast.granularity.scale_shape(&input.shape);
    let outputs = [
        TensorIr::uninit(id(), input.shape.clone(), DType::U8),
        TensorIr::uninit(id(), scales.into(), DType::F32),
    ];
    let [rows, columns] = granularity_ir(cast.granularity);
    let scalars = vec![
        rows,
        columns,
        format_ir(cast.format),
        ScalarIr::Bool(cast.power_of_two),
    ];
    CustomOpIr::with_scalars(QUANTIZE_BLOCKS, &[input], &outputs, scalars)
}

pub(crate) fn dequantize_blocks(
    [codes, scale]: [TensorIr; 2],
    granularity: Granularity,
    format: Fp8Format,
    dtype: FloatDType,
    mut id: impl FnMut() -> TensorId,
) -> CustomOpIr {
    let output = TensorIr::uninit(id(), codes.shape.clone(), dtype.into());
    let [rows, columns] = granularity_ir(granularity);
    let scalars = vec![rows, columns, format_ir(format), dtype_ir(dtype)];
    CustomOpIr::with_scalars(DEQUANTIZE_BLOCKS, &[codes, scale], &[output], scalars)
}

pub(crate) fn matmul_blocks(
    [lhs, rhs]: [TensorIr; 2],
    scales: [TensorIr; 2],
    bias: Option<TensorIr>,
    granularities: [Granularity; 2],
    spec: MatmulSpec,
    mut id: impl FnMut() -> TensorId,
) -> CustomOpIr {
    let shape = matmul_shape(&lhs.shape, &rhs.shape);
    let output = TensorIr::uninit(id(), shape, spec.output.into());
    let inputs: Vec<_> = [lhs, rhs].into_iter().chain(scales).chain(bias).collect();
    let scalars = granularities.into_iter().flat_map(granularity_ir);
    let scalars = scalars.chain(spec_ir(spec)).collect();
    CustomOpIr::with_scalars(MATMUL_BLOCKS, &inputs, &[output], scalars)
}

/// The shape of a matrix product with broadcast batch dimensions.
pub(crate) fn matmul_shape(lhs: &Shape, rhs: &Shape) -> Shape {
    let rank = lhs.num_dims();
    let mut dims: Vec<_> = lhs
        .iter()
        .zip(rhs.iter())
        .map(|(&lhs, &rhs)| if lhs == 1 { rhs } else { lhs })
        .collect();
    dims[rank - 2] = lhs[rank - 2];
    dims[rank - 1] = rhs[rank - 1];
    Shape::from(dims)
}

/// The shape with its last two dimensions swapped.
fn transposed(shape: &Shape) -> Shape {
    let rank = shape.num_dims();
    let mut dims: Vec<_> = shape.iter().copied().collect();
    dims.swap(rank - 2, rank - 1);
    Shape::from(dims)
}
