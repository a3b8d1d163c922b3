use burn::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::FloatDType;

use crate::{
    Bias, Fp8Format, Fp8Ops, Granularity, MatmulSpec, flex, granular, portable, provider::Native,
    recipe::ScaleUpdate,
};

const WHOLE: [Granularity; 2] = [Granularity::Tensor; 2];

impl Fp8Ops for Flex {
    fn fp8_amax(input: FloatTensor<Self>) -> FloatTensor<Self> {
        flex::amax(input)
    }

    fn fp8_scales(
        amax: FloatTensor<Self>,
        format: Fp8Format,
        power_of_two: bool,
    ) -> FloatTensor<Self> {
        flex::scales(amax, format, power_of_two)
    }

    fn fp8_quantize(
        input: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        flex::quantize(input, &scale, format)
    }

    fn fp8_dequantize(
        codes: IntTensor<Self>,
        scale: FloatTensor<Self>,
        granularity: Granularity,
        format: Fp8Format,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        match granularity {
            Granularity::Tensor => flex::dequantize(codes, &scale, format, dtype),
            _ => granular::dequantize::<Self, Native>(codes, scale, granularity, format, dtype),
        }
    }

    fn fp8_matmul(
        lhs: IntTensor<Self>,
        rhs: IntTensor<Self>,
        lhs_scale: FloatTensor<Self>,
        rhs_scale: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: MatmulSpec,
    ) -> FloatTensor<Self> {
        match spec.granularities {
            WHOLE => flex::matmul_amax(lhs, rhs, &lhs_scale, &rhs_scale, bias, spec).0,
            _ => granular::matmul::<Self, Native>(lhs, rhs, lhs_scale, rhs_scale, bias, spec),
        }
    }

    fn fp8_matmul_amax(
        lhs: IntTensor<Self>,
        rhs: IntTensor<Self>,
        lhs_scale: FloatTensor<Self>,
        rhs_scale: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: MatmulSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match spec.granularities {
            WHOLE => flex::matmul_amax(lhs, rhs, &lhs_scale, &rhs_scale, bias, spec),
            _ => portable::matmul_amax::<Self, Native>(lhs, rhs, lhs_scale, rhs_scale, bias, spec),
        }
    }

    fn fp8_update_scale(
        history: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        update: ScaleUpdate,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        flex::update_scale(history, &scale, &amax, update)
    }
}
