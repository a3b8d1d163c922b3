//! Runs described ops.

use burn_ir::{BackendIr, CustomOpIr, HandleContainer, ScalarIr};

use super::{
    AMAX, DEQUANTIZE, MATMUL, MATMUL_AMAX, QUANTIZE, QUANTIZE_BLOCKS, QUANTIZE_TRANSPOSED, SCALES,
    UPDATE_SCALE,
    scalar::{dtype_of, format_of, granularity_of, spec_of},
};
use crate::{
    Bias, Fp8Cast,
    provider::Provider,
    recipe::{AmaxCompute, ScaleUpdate},
};

/// Runs a described op with the ops of `P`.
///
/// # Panics
/// If no function of this version of the crate made the description.
pub(crate) fn execute<B: BackendIr, P: Provider<B>>(
    handles: &mut HandleContainer<B::Handle>,
    desc: &CustomOpIr,
) {
    match (desc.id.as_str(), desc.scalars.as_slice()) {
        (AMAX, []) => {
            let ([input], [output]) = desc.as_fixed();
            let input = handles.get_float_tensor::<B>(input);
            handles.register_float_tensor::<B>(&output.id, P::amax(input));
        }
        (SCALES, [format, ScalarIr::Bool(power_of_two)]) => {
            let ([amax], [output]) = desc.as_fixed();
            let amax = handles.get_float_tensor::<B>(amax);
            let scales = P::scales(amax, format_of(format), *power_of_two);
            handles.register_float_tensor::<B>(&output.id, scales);
        }
        (QUANTIZE, [format]) => {
            let ([input, scale], [codes_ir, amax_ir]) = desc.as_fixed();
            let input = handles.get_float_tensor::<B>(input);
            let scale = handles.get_float_tensor::<B>(scale);
            let (codes, amax) = P::quantize(input, scale, format_of(format));
            handles.register_int_tensor::<B>(&codes_ir.id, codes);
            handles.register_float_tensor::<B>(&amax_ir.id, amax);
        }
        (QUANTIZE_TRANSPOSED, [format]) => {
            let ([input, scale], [codes_ir, transposed_ir, amax_ir]) = desc.as_fixed();
            let input = handles.get_float_tensor::<B>(input);
            let scale = handles.get_float_tensor::<B>(scale);
            let (codes, transposed, amax) = P::quantize_transposed(input, scale, format_of(format));
            handles.register_int_tensor::<B>(&codes_ir.id, codes);
            handles.register_int_tensor::<B>(&transposed_ir.id, transposed);
            handles.register_float_tensor::<B>(&amax_ir.id, amax);
        }
        (DEQUANTIZE, [rows, columns, format, dtype]) => {
            let ([codes, scale], [output]) = desc.as_fixed();
            let codes = handles.get_int_tensor::<B>(codes);
            let scale = handles.get_float_tensor::<B>(scale);
            let granularity = granularity_of([rows, columns]);
            let (format, dtype) = (format_of(format), dtype_of(dtype));
            let values = P::dequantize(codes, scale, granularity, format, dtype);
            handles.register_float_tensor::<B>(&output.id, values);
        }
        (MATMUL | MATMUL_AMAX, scalars) => {
            let spec = spec_of(scalars);
            let [lhs, rhs] =
                [0, 1].map(|side: usize| handles.get_int_tensor::<B>(&desc.inputs[side]));
            let [lhs_scale, rhs_scale] =
                [2, 3].map(|scale: usize| handles.get_float_tensor::<B>(&desc.inputs[scale]));
            let bias = match desc.inputs.get(4) {
                Some(bias) => Bias::Row(handles.get_float_tensor::<B>(bias)),
                None => Bias::None,
            };
            let product = match desc.outputs.get(1) {
                Some(amax_ir) => {
                    let (product, amax) =
                        P::matmul_amax(lhs, rhs, lhs_scale, rhs_scale, bias, spec);
                    handles.register_float_tensor::<B>(&amax_ir.id, amax);
                    product
                }
                None => P::matmul(lhs, rhs, lhs_scale, rhs_scale, bias, spec),
            };
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
            let (history, scale) = P::update_scale(history, scale, amax, update);
            handles.register_float_tensor::<B>(&history_ir.id, history);
            handles.register_float_tensor::<B>(&scale_ir.id, scale);
        }
        (QUANTIZE_BLOCKS, [rows, columns, format, ScalarIr::Bool(power_of_two)]) => {
            let ([input], [codes_ir, scale_ir]) = desc.as_fixed();
            let cast = Fp8Cast::new(granularity_of([rows, columns]), format_of(format))
                .with_power_of_two(*power_of_two);
            let input = handles.get_float_tensor::<B>(input);
            let (codes, scale) = P::quantize_blocks(input, cast);
            handles.register_int_tensor::<B>(&codes_ir.id, codes);
            handles.register_float_tensor::<B>(&scale_ir.id, scale);
        }
        (id, scalars) => {
            panic!("not an fp8 operation of this version of burn-fp8: {id} {scalars:?}")
        }
    }
}
