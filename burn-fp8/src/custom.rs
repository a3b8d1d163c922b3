//! The ops as custom operations, for lazy backends (fusion) and remote ones: how they are described, and how the
//! backend at the end of the road runs them.

use burn::tensor::{DType, FloatDType, Shape};
use burn_ir::{BackendIr, CustomOpIr, HandleContainer, ScalarIr, TensorId, TensorIr};

use crate::{
    Bias, Fp8Format, Fp8Ops, MatmulSpec,
    recipe::{AmaxCompute, ScaleUpdate},
};

pub(crate) const AMAX: &str = "fp8::amax";
pub(crate) const QUANTIZE: &str = "fp8::quantize";
pub(crate) const DEQUANTIZE: &str = "fp8::dequantize";
pub(crate) const MATMUL: &str = "fp8::matmul";
pub(crate) const UPDATE_SCALE: &str = "fp8::update_scale";

/// The names of all ops.
#[cfg(feature = "remote")]
pub(crate) const ALL: [&str; 5] = [AMAX, QUANTIZE, DEQUANTIZE, MATMUL, UPDATE_SCALE];

pub(crate) fn amax(input: TensorIr, mut id: impl FnMut() -> TensorId) -> CustomOpIr {
    let output = TensorIr::uninit(id(), Shape::new([1]), DType::F32);
    CustomOpIr::with_scalars(AMAX, &[input], &[output], vec![])
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

pub(crate) fn matmul(
    lhs: TensorIr,
    rhs: TensorIr,
    lhs_scale: TensorIr,
    rhs_scale: TensorIr,
    bias: Option<TensorIr>,
    spec: MatmulSpec,
    mut id: impl FnMut() -> TensorId,
) -> CustomOpIr {
    let shape = matmul_shape(&lhs.shape, &rhs.shape);
    let output = TensorIr::uninit(id(), shape, spec.output.into());
    let scalars = vec![
        format_ir(spec.lhs),
        format_ir(spec.rhs),
        dtype_ir(spec.output),
        ScalarIr::Bool(bias.is_some()),
    ];
    let inputs: Vec<_> = [lhs, rhs, lhs_scale, rhs_scale]
        .into_iter()
        .chain(bias)
        .collect();
    CustomOpIr::with_scalars(MATMUL, &inputs, &[output], scalars)
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

/// Run a described op with the backend's own kernels.
///
/// # Panics
/// For a description that none of the functions above made.
pub(crate) fn execute<B: BackendIr + Fp8Ops>(
    handles: &mut HandleContainer<B::Handle>,
    desc: &CustomOpIr,
) {
    execute_with::<B, Native>(handles, desc);
}

/// Run a described op with the kernels `K`. See [`execute`].
pub(crate) fn execute_with<B: BackendIr, K: Kernels<B>>(
    handles: &mut HandleContainer<B::Handle>,
    desc: &CustomOpIr,
) {
    match (desc.id.as_str(), desc.scalars.as_slice()) {
        (AMAX, []) => {
            let ([input], [output]) = desc.as_fixed();
            let input = handles.get_float_tensor::<B>(input);
            handles.register_float_tensor::<B>(&output.id, K::amax(input));
        }
        (QUANTIZE, [format]) => {
            let ([input, scale], [codes_ir, amax_ir]) = desc.as_fixed();
            let input = handles.get_float_tensor::<B>(input);
            let scale = handles.get_float_tensor::<B>(scale);
            let (codes, amax) = K::quantize(input, scale, format_of(format));
            handles.register_int_tensor::<B>(&codes_ir.id, codes);
            handles.register_float_tensor::<B>(&amax_ir.id, amax);
        }
        (DEQUANTIZE, [format, dtype]) => {
            let ([codes, scale], [output]) = desc.as_fixed();
            let codes = handles.get_int_tensor::<B>(codes);
            let scale = handles.get_float_tensor::<B>(scale);
            let values = K::dequantize(codes, scale, format_of(format), dtype_of(dtype));
            handles.register_float_tensor::<B>(&output.id, values);
        }
        (MATMUL, [lhs_format, rhs_format, dtype, ScalarIr::Bool(_)]) => {
            let spec = MatmulSpec {
                lhs: format_of(lhs_format),
                rhs: format_of(rhs_format),
                output: dtype_of(dtype),
            };
            let lhs = handles.get_int_tensor::<B>(&desc.inputs[0]);
            let rhs = handles.get_int_tensor::<B>(&desc.inputs[1]);
            let lhs_scale = handles.get_float_tensor::<B>(&desc.inputs[2]);
            let rhs_scale = handles.get_float_tensor::<B>(&desc.inputs[3]);
            let bias = match desc.inputs.get(4) {
                Some(bias) => Bias::Row(handles.get_float_tensor::<B>(bias)),
                None => Bias::None,
            };
            let product = K::matmul(lhs, rhs, lhs_scale, rhs_scale, bias, spec);
            handles.register_float_tensor::<B>(&desc.outputs[0].id, product);
        }
        (
            UPDATE_SCALE,
            [
                ScalarIr::Float(fp8_max),
                ScalarIr::Int(margin),
                ScalarIr::Bool(max),
            ],
        ) => {
            let ([history, scale, amax], [history_ir, scale_ir]) = desc.as_fixed();
            let update = ScaleUpdate {
                fp8_max: *fp8_max as f32,
                margin: *margin as i32,
                algorithm: if *max {
                    AmaxCompute::Max
                } else {
                    AmaxCompute::MostRecent
                },
            };
            let history = handles.get_float_tensor::<B>(history);
            let scale = handles.get_float_tensor::<B>(scale);
            let amax = handles.get_float_tensor::<B>(amax);
            let (history, scale) = K::update_scale(history, scale, amax, update);
            handles.register_float_tensor::<B>(&history_ir.id, history);
            handles.register_float_tensor::<B>(&scale_ir.id, scale);
        }
        (id, scalars) => {
            panic!("not an fp8 operation of this version of burn-fp8: {id} {scalars:?}")
        }
    }
}

/// Where the kernels come from.
pub(crate) trait Kernels<B: burn::backend::Backend> {
    fn amax(input: B::FloatTensorPrimitive) -> B::FloatTensorPrimitive;
    fn quantize(
        input: B::FloatTensorPrimitive,
        scale: B::FloatTensorPrimitive,
        format: Fp8Format,
    ) -> (B::IntTensorPrimitive, B::FloatTensorPrimitive);
    fn dequantize(
        codes: B::IntTensorPrimitive,
        scale: B::FloatTensorPrimitive,
        format: Fp8Format,
        dtype: FloatDType,
    ) -> B::FloatTensorPrimitive;
    fn matmul(
        lhs: B::IntTensorPrimitive,
        rhs: B::IntTensorPrimitive,
        lhs_scale: B::FloatTensorPrimitive,
        rhs_scale: B::FloatTensorPrimitive,
        bias: Bias<B>,
        spec: MatmulSpec,
    ) -> B::FloatTensorPrimitive;
    fn update_scale(
        history: B::FloatTensorPrimitive,
        scale: B::FloatTensorPrimitive,
        amax: B::FloatTensorPrimitive,
        update: ScaleUpdate,
    ) -> (B::FloatTensorPrimitive, B::FloatTensorPrimitive);
}

macro_rules! kernels {
    ($name:ident, [$($bound:path)?], $amax:path, $quantize:path, $dequantize:path, $matmul:path, $update:path) => {
        impl<B: burn::backend::Backend $(+ $bound)?> Kernels<B> for $name {
            fn amax(input: B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
                $amax(input)
            }

            fn quantize(
                input: B::FloatTensorPrimitive,
                scale: B::FloatTensorPrimitive,
                format: Fp8Format,
            ) -> (B::IntTensorPrimitive, B::FloatTensorPrimitive) {
                $quantize(input, scale, format)
            }

            fn dequantize(
                codes: B::IntTensorPrimitive,
                scale: B::FloatTensorPrimitive,
                format: Fp8Format,
                dtype: FloatDType,
            ) -> B::FloatTensorPrimitive {
                $dequantize(codes, scale, format, dtype)
            }

            fn matmul(
                lhs: B::IntTensorPrimitive,
                rhs: B::IntTensorPrimitive,
                lhs_scale: B::FloatTensorPrimitive,
                rhs_scale: B::FloatTensorPrimitive,
                bias: Bias<B>,
                spec: MatmulSpec,
            ) -> B::FloatTensorPrimitive {
                $matmul(lhs, rhs, lhs_scale, rhs_scale, bias, spec)
            }

            fn update_scale(
                history: B::FloatTensorPrimitive,
                scale: B::FloatTensorPrimitive,
                amax: B::FloatTensorPrimitive,
                update: ScaleUpdate,
            ) -> (B::FloatTensorPrimitive, B::FloatTensorPrimitive) {
                $update(history, scale, amax, update)
            }
        }
    };
}

/// The backend's own kernels.
pub(crate) struct Native;

kernels!(
    Native,
    [Fp8Ops],
    B::fp8_amax,
    B::fp8_quantize,
    B::fp8_dequantize,
    B::fp8_matmul,
    B::fp8_update_scale
);

/// Burn's standard ops, for backends that have no kernels of their own.
#[cfg(feature = "remote")]
pub(crate) struct Portable;

#[cfg(feature = "remote")]
kernels!(
    Portable,
    [],
    crate::portable::amax::<B>,
    crate::portable::quantize::<B>,
    crate::portable::dequantize::<B>,
    crate::portable::matmul::<B>,
    crate::portable::update_scale::<B>
);

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

fn format_ir(format: Fp8Format) -> ScalarIr {
    ScalarIr::Bool(format == Fp8Format::E5M2)
}

fn format_of(scalar: &ScalarIr) -> Fp8Format {
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

fn dtype_ir(dtype: FloatDType) -> ScalarIr {
    let index = DTYPES.iter().position(|&other| other == dtype);
    ScalarIr::UInt(index.expect("every float dtype is in the list") as u64)
}

fn dtype_of(scalar: &ScalarIr) -> FloatDType {
    match scalar {
        ScalarIr::UInt(index) if (*index as usize) < DTYPES.len() => DTYPES[*index as usize],
        other => panic!("not a float dtype: {other:?}"),
    }
}
