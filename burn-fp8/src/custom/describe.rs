//! Descriptions of the ops.

use burn::tensor::{DType, FloatDType, Shape};
use burn_ir::{CustomOpIr, ScalarIr, TensorId, TensorIr};

use super::{
    AMAX, DEQUANTIZE, MATMUL, MATMUL_AMAX, QUANTIZE, QUANTIZE_BLOCKS, QUANTIZE_TRANSPOSED, SCALES,
    UPDATE_SCALE,
    scalar::{dtype_ir, format_ir, granularity_ir, spec_ir},
};
use crate::{
    Fp8Cast, Fp8Format, Granularity, MatmulSpec,
    portable::matmul_shape,
    recipe::{AmaxCompute, ScaleUpdate},
};

/// An op whose outputs have no ids yet.
pub(crate) struct Description {
    op: &'static str,
    inputs: Vec<TensorIr>,
    outputs: Vec<(Shape, DType)>,
    scalars: Vec<ScalarIr>,
}

impl Description {
    /// The op, with a new id for each output.
    pub(crate) fn with_ids(self, mut id: impl FnMut() -> TensorId) -> CustomOpIr {
        let outputs = self.outputs.into_iter();
        let outputs = outputs.map(|(shape, dtype)| TensorIr::uninit(id(), shape, dtype));
        let outputs: Vec<_> = outputs.collect();
        CustomOpIr::with_scalars(self.op, &self.inputs, &outputs, self.scalars)
    }
}

/// The description of an op.
fn op(
    op: &'static str,
    inputs: impl Into<Vec<TensorIr>>,
    outputs: impl Into<Vec<(Shape, DType)>>,
    scalars: impl Into<Vec<ScalarIr>>,
) -> Description {
    Description {
        op,
        inputs: inputs.into(),
        outputs: outputs.into(),
        scalars: scalars.into(),
    }
}

/// A scale or an amax.
fn single() -> (Shape, DType) {
    (Shape::new([1]), DType::F32)
}

pub(crate) fn amax(input: TensorIr) -> Description {
    op(AMAX, [input], [single()], [])
}

pub(crate) fn scales(amax: TensorIr, format: Fp8Format, power_of_two: bool) -> Description {
    let scales = (amax.shape.clone(), DType::F32);
    let scalars = [format_ir(format), ScalarIr::Bool(power_of_two)];
    op(SCALES, [amax], [scales], scalars)
}

pub(crate) fn quantize(input: TensorIr, scale: TensorIr, format: Fp8Format) -> Description {
    let codes = (input.shape.clone(), DType::U8);
    let outputs = [codes, single()];
    op(QUANTIZE, [input, scale], outputs, [format_ir(format)])
}

pub(crate) fn quantize_transposed(
    input: TensorIr,
    scale: TensorIr,
    format: Fp8Format,
) -> Description {
    let codes = (input.shape.clone(), DType::U8);
    let transposed = (transposed(&input.shape), DType::U8);
    let (outputs, scalars) = ([codes, transposed, single()], [format_ir(format)]);
    op(QUANTIZE_TRANSPOSED, [input, scale], outputs, scalars)
}

pub(crate) fn dequantize(
    codes: TensorIr,
    scale: TensorIr,
    granularity: Granularity,
    format: Fp8Format,
    dtype: FloatDType,
) -> Description {
    let values = (codes.shape.clone(), dtype.into());
    let [rows, columns] = granularity_ir(granularity);
    let scalars = [rows, columns, format_ir(format), dtype_ir(dtype)];
    op(DEQUANTIZE, [codes, scale], [values], scalars)
}

/// The product, and its amax if `amax` is true.
pub(crate) fn matmul(
    [lhs, rhs]: [TensorIr; 2],
    scales: [TensorIr; 2],
    bias: Option<TensorIr>,
    spec: MatmulSpec,
    amax: bool,
) -> Description {
    let shape = matmul_shape(&lhs.shape, &rhs.shape);
    let mut outputs = vec![(shape, spec.output.into())];
    outputs.extend(amax.then(single));
    let inputs: Vec<_> = [lhs, rhs].into_iter().chain(scales).chain(bias).collect();
    let name = if amax { MATMUL_AMAX } else { MATMUL };
    op(name, inputs, outputs, spec_ir(spec))
}

pub(crate) fn update_scale(
    history: TensorIr,
    scale: TensorIr,
    amax: TensorIr,
    update: ScaleUpdate,
) -> Description {
    let outputs = [(history.shape.clone(), DType::F32), single()];
    let scalars = [
        ScalarIr::Float(f64::from(update.fp8_max)),
        ScalarIr::Int(i64::from(update.margin)),
        ScalarIr::Bool(update.algorithm == AmaxCompute::Max),
    ];
    op(UPDATE_SCALE, [history, scale, amax], outputs, scalars)
}

pub(crate) fn quantize_blocks(input: TensorIr, cast: Fp8Cast) -> Description {
    cast.assert_several_scales();
    let codes = (input.shape.clone(), DType::U8);
    let scales = cast.granularity.scale_shape(&input.shape);
    let [rows, columns] = granularity_ir(cast.granularity);
    let power_of_two = ScalarIr::Bool(cast.power_of_two);
    let scalars = [rows, columns, format_ir(cast.format), power_of_two];
    let outputs = [codes, (scales.into(), DType::F32)];
    op(QUANTIZE_BLOCKS, [input], outputs, scalars)
}

/// The shape with its last two dimensions swapped.
fn transposed(shape: &Shape) -> Shape {
    let rank = shape.num_dims();
    let mut dims: Vec<_> = shape.iter().copied().collect();
    dims.swap(rank - 2, rank - 1);
    Shape::from(dims)
}
