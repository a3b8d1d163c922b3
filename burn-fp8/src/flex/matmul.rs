//! The scaled matrix product: looks up the codes, multiplies by Flex's own f32 product, and applies scales and bias in one pass.

use burn::backend::ops::FloatTensorOps;
use burn::tensor::{FloatDType, Shape};
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::{
    CHUNK,
    cast::{decode, max_bits},
    scalar, tensor_f32,
};
use crate::{Bias, MatmulSpec, portable};

/// [`Fp8Ops::fp8_matmul_amax`](crate::Fp8Ops::fp8_matmul_amax) with one scale on each side.
pub(crate) fn matmul_amax(
    lhs: FlexTensor,
    rhs: FlexTensor,
    lhs_scale: &FlexTensor,
    rhs_scale: &FlexTensor,
    bias: Bias<Flex>,
    spec: MatmulSpec,
) -> (FlexTensor, FlexTensor) {
    let lhs = decode(&lhs, spec.lhs.values());
    let rhs = decode(&rhs, spec.rhs.values());
    let mut product = portable::product::<Flex>(lhs, rhs).to_contiguous();
    let inverse = [1.0 / scalar(lhs_scale), 1.0 / scalar(rhs_scale)];
    let columns = product.layout().shape().last().copied().unwrap_or(0);
    let bias = match bias {
        Bias::None => None,
        Bias::Row(bias) => Some(Flex::float_cast(bias, FloatDType::F32).to_contiguous()),
    };
    let bias = bias
        .as_ref()
        .map(|bias| bias.as_slice::<f32>().expect("a contiguous bias"));
    let values = product.storage_mut::<f32>();
    let rows = (CHUNK / columns.max(1)).max(1) * columns.max(1);
    let max = values
        .par_chunks_mut(rows)
        .map(|rows| {
            epilogue(rows, columns, inverse, bias);
            max_bits(rows)
        })
        .max();
    let amax = tensor_f32(vec![f32::from_bits(max.unwrap_or(0))], Shape::new([1]));
    // Rounding preserves the order, so the rounded amax is the amax of the rounded product.
    let rounded = Flex::float_cast(amax, spec.output);
    (
        Flex::float_cast(product, spec.output),
        Flex::float_cast(rounded, FloatDType::F32),
    )
}

fn epilogue(rows: &mut [f32], columns: usize, [lhs, rhs]: [f32; 2], bias: Option<&[f32]>) {
    for row in rows.chunks_exact_mut(columns) {
        match bias {
            Some(bias) => {
                for (value, bias) in row.iter_mut().zip(bias) {
                    *value = *value * lhs * rhs + bias;
                }
            }
            None => {
                for value in row {
                    *value = *value * lhs * rhs;
                }
            }
        }
    }
}
