use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::FloatDType;
use burn_cubecl::CubeBackend;

use crate::{
    Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, MatmulSpec, kernels, recipe::ScaleUpdate,
};

impl Fp8Ops for CubeBackend {
    fn fp8_amax(input: FloatTensor<Self>) -> FloatTensor<Self> {
        kernels::amax(input)
    }

    fn fp8_scales(
        amax: FloatTensor<Self>,
        format: Fp8Format,
        power_of_two: bool,
    ) -> FloatTensor<Self> {
        kernels::scales(amax, format, power_of_two)
    }

    fn fp8_quantize(
        input: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        kernels::quantize(input, scale, format)
    }

    fn fp8_quantize_transposed(
        input: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
    ) -> (IntTensor<Self>, IntTensor<Self>, FloatTensor<Self>) {
        match kernels::codes_lie_along_sums(&input) {
            true => kernels::quantize_transposed(input, scale, format),
            false => {
                let (codes, amax) = kernels::quantize(input, scale, format);
                (codes.clone(), kernels::swapped(codes), amax)
            }
        }
    }

    fn fp8_dequantize(
        codes: IntTensor<Self>,
        scale: FloatTensor<Self>,
        granularity: Granularity,
        format: Fp8Format,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        match granularity {
            Granularity::Tensor => kernels::dequantize(codes, scale, format, dtype),
            _ => kernels::dequantize_blocks(codes, scale, granularity, format, dtype),
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
        let policy = kernels::matmul_policy();
        kernels::matmul_by(policy, [lhs, rhs], [lhs_scale, rhs_scale], bias, spec)
    }

    fn fp8_matmul_amax(
        lhs: IntTensor<Self>,
        rhs: IntTensor<Self>,
        lhs_scale: FloatTensor<Self>,
        rhs_scale: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: MatmulSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let policy = kernels::matmul_policy();
        kernels::matmul_amax_by(policy, [lhs, rhs], [lhs_scale, rhs_scale], bias, spec)
    }

    fn fp8_quantize_blocks(
        input: FloatTensor<Self>,
        cast: Fp8Cast,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        let by_columns = cast.granularity.is_summed_down() && kernels::codes_lie_along_sums(&input);
        kernels::quantize_blocks(input, cast, by_columns)
    }

    fn fp8_update_scale(
        history: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        update: ScaleUpdate,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        kernels::update_scale(history, scale, amax, update)
    }
}
