//! The kernels that run described ops.

use burn::backend::{
    Backend,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::FloatDType;

use crate::{Bias, Fp8Format, Fp8Ops, MatmulSpec, recipe::ScaleUpdate};

/// Defines the trait [`Kernels`] and its implementations from one list of functions.
macro_rules! kernels {
    ($($name:ident($($arg:ident: $type:ty),*) -> $ret:ty = $native:ident, $portable:path;)*) => {
        /// The ops of a backend, by any kernels.
        pub(crate) trait Kernels<B: Backend> {
            $(fn $name($($arg: $type),*) -> $ret;)*
        }

        /// The backend's own kernels.
        pub(crate) struct Native;

        impl<B: Backend + Fp8Ops> Kernels<B> for Native {
            $(fn $name($($arg: $type),*) -> $ret {
                B::$native($($arg),*)
            })*
        }

        /// Burn's standard ops, for backends that have no kernels of their own.
        #[cfg(feature = "remote")]
        pub(crate) struct Portable;

        #[cfg(feature = "remote")]
        impl<B: Backend> Kernels<B> for Portable {
            $(fn $name($($arg: $type),*) -> $ret {
                $portable($($arg),*)
            })*
        }
    };
}

kernels! {
    amax(input: FloatTensor<B>) -> FloatTensor<B>
        = fp8_amax, crate::portable::amax::<B>;
    scales(amax: FloatTensor<B>, format: Fp8Format, power_of_two: bool) -> FloatTensor<B>
        = fp8_scales, crate::portable::scales::<B>;
    quantize(
        input: FloatTensor<B>, scale: FloatTensor<B>, format: Fp8Format
    ) -> (IntTensor<B>, FloatTensor<B>)
        = fp8_quantize, crate::portable::quantize::<B>;
    quantize_transposed(
        input: FloatTensor<B>, scale: FloatTensor<B>, format: Fp8Format
    ) -> (IntTensor<B>, IntTensor<B>, FloatTensor<B>)
        = fp8_quantize_transposed, crate::portable::quantize_transposed::<B>;
    dequantize(
        codes: IntTensor<B>, scale: FloatTensor<B>, format: Fp8Format, dtype: FloatDType
    ) -> FloatTensor<B>
        = fp8_dequantize, crate::portable::dequantize::<B>;
    matmul(
        lhs: IntTensor<B>, rhs: IntTensor<B>, lhs_scale: FloatTensor<B>,
        rhs_scale: FloatTensor<B>, bias: Bias<B>, spec: MatmulSpec
    ) -> FloatTensor<B>
        = fp8_matmul, crate::portable::matmul::<B>;
    matmul_amax(
        lhs: IntTensor<B>, rhs: IntTensor<B>, lhs_scale: FloatTensor<B>,
        rhs_scale: FloatTensor<B>, bias: Bias<B>, spec: MatmulSpec
    ) -> (FloatTensor<B>, FloatTensor<B>)
        = fp8_matmul_amax, crate::portable::matmul_amax::<B>;
    update_scale(
        history: FloatTensor<B>, scale: FloatTensor<B>, amax: FloatTensor<B>, update: ScaleUpdate
    ) -> (FloatTensor<B>, FloatTensor<B>)
        = fp8_update_scale, crate::portable::update_scale::<B>;
}
