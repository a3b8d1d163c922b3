//! The ops with several scales per tensor, for fusion over a backend with kernels of its own. A remote backend gets the ops that
//! they are composed of instead.

use burn::tensor::{DType, FloatDType};
use burn_ir::{BackendIr, CustomOpIr, HandleContainer, ScalarIr, TensorId, TensorIr};

use super::{
    describe::matmul_shape,
    scalar::{
        dtype_ir, dtype_of, format_ir, format_of, granularity_ir, granularity_of, spec_ir, spec_of,
    },
};
use crate::{Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, MatmulSpec};

const QUANTIZE: &str = "fp8::quantize_blocks";
const DEQUANTIZE: &str = "fp8::dequantize_blocks";
const MATMUL: &str = "fp8::matmul_blocks";

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
    CustomOpIr::with_scalars(QUANTIZE, &[input], &outputs, scalars)
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
    CustomOpIr::with_scalars(DEQUANTIZE, &[codes, scale], &[output], scalars)
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
    CustomOpIr::with_scalars(MATMUL, &inputs, &[output], scalars)
}

/// Runs an op that one of these functions described. Returns `false` for any other op.
pub(super) fn execute<B: BackendIr + Fp8Ops>(
    handles: &mut HandleContainer<B::Handle>,
    desc: &CustomOpIr,
) -> bool {
    match (desc.id.as_str(), desc.scalars.as_slice()) {
        (QUANTIZE, [rows, columns, format, ScalarIr::Bool(power_of_two)]) => {
            let ([input], [codes_ir, scale_ir]) = desc.as_fixed();
            let cast = Fp8Cast::new(granularity_of([rows, columns]), format_of(format))
                .with_power_of_two(*power_of_two);
            let input = handles.get_float_tensor::<B>(input);
            let (codes, scale) = B::fp8_quantize_blocks(input, cast);
            handles.register_int_tensor::<B>(&codes_ir.id, codes);
            handles.register_float_tensor::<B>(&scale_ir.id, scale);
        }
        (DEQUANTIZE, [rows, columns, format, dtype]) => {
            let ([codes, scale], [output]) = desc.as_fixed();
            let codes = handles.get_int_tensor::<B>(codes);
            let scale = handles.get_float_tensor::<B>(scale);
            let granularity = granularity_of([rows, columns]);
            let (format, dtype) = (format_of(format), dtype_of(dtype));
            let values = B::fp8_dequantize_blocks(codes, scale, granularity, format, dtype);
            handles.register_float_tensor::<B>(&output.id, values);
        }
        (
            MATMUL,
            [
                left_rows,
                left_columns,
                rows,
                columns,
                lhs,
                rhs,
                output,
                fast,
            ],
        ) => {
            let side = |index: usize| &desc.inputs[index];
            let product = B::fp8_matmul_blocks(
                handles.get_int_tensor::<B>(side(0)),
                handles.get_int_tensor::<B>(side(1)),
                handles.get_float_tensor::<B>(side(2)),
                handles.get_float_tensor::<B>(side(3)),
                match desc.inputs.get(4) {
                    Some(bias) => Bias::Row(handles.get_float_tensor::<B>(bias)),
                    None => Bias::None,
                },
                [[left_rows, left_columns], [rows, columns]].map(granularity_of),
                spec_of([lhs, rhs, output, fast]),
            );
            handles.register_float_tensor::<B>(&desc.outputs[0].id, product);
        }
        _ => return false,
    }
    true
}

/// The methods of [`Fp8Ops`] with several scales per tensor. [`lazy_ops`](super::lazy_ops) defines the others.
macro_rules! lazy_block_ops {
    ($submit:expr) => {
        fn fp8_quantize_blocks(
            input: FloatTensor<Self>,
            cast: Fp8Cast,
        ) -> (IntTensor<Self>, FloatTensor<Self>) {
            let client = input.client.clone();
            let desc =
                custom::quantize_blocks(input.into_ir(), cast, || client.create_empty_handle());
            let [codes, scale] = $submit(&client, desc);
            (codes, scale)
        }

        fn fp8_dequantize_blocks(
            codes: IntTensor<Self>,
            scale: FloatTensor<Self>,
            granularity: Granularity,
            format: Fp8Format,
            dtype: FloatDType,
        ) -> FloatTensor<Self> {
            let client = codes.client.clone();
            let inputs = [codes.into_ir(), scale.into_ir()];
            let desc = custom::dequantize_blocks(inputs, granularity, format, dtype, || {
                client.create_empty_handle()
            });
            let [values] = $submit(&client, desc);
            values
        }

        fn fp8_matmul_blocks(
            lhs: IntTensor<Self>,
            rhs: IntTensor<Self>,
            lhs_scale: FloatTensor<Self>,
            rhs_scale: FloatTensor<Self>,
            bias: Bias<Self>,
            granularities: [Granularity; 2],
            spec: MatmulSpec,
        ) -> FloatTensor<Self> {
            let client = lhs.client.clone();
            let sides = [lhs.into_ir(), rhs.into_ir()];
            let scales = [lhs_scale.into_ir(), rhs_scale.into_ir()];
            let bias = match bias {
                Bias::None => None,
                Bias::Row(bias) => Some(bias.into_ir()),
            };
            let desc = custom::matmul_blocks(sides, scales, bias, granularities, spec, || {
                client.create_empty_handle()
            });
            let [product] = $submit(&client, desc);
            product
        }
    };
}

pub(crate) use lazy_block_ops;
