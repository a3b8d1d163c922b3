//! Autodiff: casts carry no gradient, and the linear layer has a backward pass of its own, in fp8.

mod bias;
mod linear;

use burn::backend::{
    AutodiffBackend, Backend,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::FloatDType;
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};

use crate::{
    Bias, BlockLinearSpec, Fp8Cast, Fp8Format, Fp8Ops, Granularity, LinearSpec, MatmulSpec,
    Operand, linear::GradAmaxSlot, recipe::ScaleUpdate,
};
use bias::with_bias;

impl<B: Backend + Fp8Ops, C: CheckpointStrategy> Fp8Ops for Autodiff<B, C> {
    fn fp8_amax(input: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::fp8_amax(input.into_primitive()))
    }

    fn fp8_scales(
        amax: FloatTensor<Self>,
        format: Fp8Format,
        power_of_two: bool,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::fp8_scales(amax.into_primitive(), format, power_of_two))
    }

    fn fp8_quantize(
        input: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        let (codes, amax) = B::fp8_quantize(input.into_primitive(), scale.into_primitive(), format);
        (codes, Self::from_inner(amax))
    }

    fn fp8_quantize_transposed(
        input: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
    ) -> (IntTensor<Self>, IntTensor<Self>, FloatTensor<Self>) {
        let (input, scale) = (input.into_primitive(), scale.into_primitive());
        let (codes, transposed, amax) = B::fp8_quantize_transposed(input, scale, format);
        (codes, transposed, Self::from_inner(amax))
    }

    fn fp8_dequantize(
        codes: IntTensor<Self>,
        scale: FloatTensor<Self>,
        granularity: Granularity,
        format: Fp8Format,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let scale = scale.into_primitive();
        let values = B::fp8_dequantize(codes, scale, granularity, format, dtype);
        Self::from_inner(values)
    }

    fn fp8_matmul(
        lhs: IntTensor<Self>,
        rhs: IntTensor<Self>,
        lhs_scale: FloatTensor<Self>,
        rhs_scale: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: MatmulSpec,
    ) -> FloatTensor<Self> {
        let [lhs_scale, rhs_scale] = [lhs_scale, rhs_scale].map(|scale| scale.into_primitive());
        let (product, ()) = with_bias::<B, C, _>(bias, |bias| {
            let product = B::fp8_matmul(lhs, rhs, lhs_scale, rhs_scale, bias, spec);
            (Self::from_inner(product), ())
        });
        product
    }

    fn fp8_matmul_amax(
        lhs: IntTensor<Self>,
        rhs: IntTensor<Self>,
        lhs_scale: FloatTensor<Self>,
        rhs_scale: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: MatmulSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [lhs_scale, rhs_scale] = [lhs_scale, rhs_scale].map(|scale| scale.into_primitive());
        with_bias::<B, C, _>(bias, |bias| {
            let (product, amax) = B::fp8_matmul_amax(lhs, rhs, lhs_scale, rhs_scale, bias, spec);
            (Self::from_inner(product), Self::from_inner(amax))
        })
    }

    fn fp8_update_scale(
        history: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        update: ScaleUpdate,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (history, scale) = B::fp8_update_scale(
            history.into_primitive(),
            scale.into_primitive(),
            amax.into_primitive(),
            update,
        );
        (Self::from_inner(history), Self::from_inner(scale))
    }

    fn fp8_quantize_blocks(
        input: FloatTensor<Self>,
        cast: Fp8Cast,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        let (codes, scale) = B::fp8_quantize_blocks(input.into_primitive(), cast);
        (codes, Self::from_inner(scale))
    }

    fn fp8_linear(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        weight_codes: Operand<Self>,
        input_scale: FloatTensor<Self>,
        gradient_scale: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: LinearSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let scales = [input_scale, gradient_scale];
        with_bias::<B, C, _>(bias, |bias| {
            linear::with_one_scale::<B, C>(input, weight, weight_codes, scales, bias, spec)
        })
    }

    fn fp8_linear_blocks(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        output_weight: Operand<Self>,
        gradient_weight: Operand<Self>,
        bias: Bias<Self>,
        spec: BlockLinearSpec,
    ) -> FloatTensor<Self> {
        let weights = [output_weight, gradient_weight];
        let (product, ()) = with_bias::<B, C, _>(bias, |bias| {
            let product = linear::with_scales::<B, C>(input, weight, weights, bias, spec);
            (product, ())
        });
        product
    }

    fn fp8_gradient_amax(like: FloatTensor<Self>, slot: GradAmaxSlot) -> FloatTensor<Self> {
        Self::from_inner(B::fp8_gradient_amax(like.into_primitive(), slot))
    }
}
