//! Who provides the fp8 ops of a backend: the backend itself, or Burn's standard ops.

use burn::backend::{
    Backend,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::FloatDType;

use crate::{Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, MatmulSpec, recipe::ScaleUpdate};
#[cfg(feature = "remote")]
use crate::{granular, portable};

/// Defines the trait [`Provider`] and its implementations from one list of functions.
macro_rules! providers {
    ($($name:ident($($arg:ident: $type:ty),*) -> $ret:ty = $native:ident, $portable:path;)*) => {
        /// The fp8 ops of a backend.
        pub(crate) trait Provider<B: Backend> {
            $(fn $name($($arg: $type),*) -> $ret;)*
        }

        /// The backend's own ops.
        pub(crate) struct Native;

        impl<B: Backend + Fp8Ops> Provider<B> for Native {
            $(fn $name($($arg: $type),*) -> $ret {
                B::$native($($arg),*)
            })*
        }

        /// Burn's standard ops, for backends that have no kernels of their own.
        #[cfg(feature = "remote")]
        pub(crate) struct Portable;

        #[cfg(feature = "remote")]
        impl<B: Backend> Provider<B> for Portable {
            $(fn $name($($arg: $type),*) -> $ret {
                $portable($($arg),*)
            })*
        }
    };
}

providers! {
    amax(input: FloatTensor<B>) -> FloatTensor<B>
        = fp8_amax, portable::amax::<B>;
    scales(amax: FloatTensor<B>, format: Fp8Format, power_of_two: bool) -> FloatTensor<B>
        = fp8_scales, portable::scales::<B>;
    quantize(
        input: FloatTensor<B>, scale: FloatTensor<B>, format: Fp8Format
    ) -> (IntTensor<B>, FloatTensor<B>)
        = fp8_quantize, portable::quantize::<B>;
    quantize_transposed(
        input: FloatTensor<B>, scale: FloatTensor<B>, format: Fp8Format
    ) -> (IntTensor<B>, IntTensor<B>, FloatTensor<B>)
        = fp8_quantize_transposed, portable::quantize_transposed::<B, Portable>;
    dequantize(
        codes: IntTensor<B>, scale: FloatTensor<B>, granularity: Granularity, format: Fp8Format,
        dtype: FloatDType
    ) -> FloatTensor<B>
        = fp8_dequantize, portable::dequantize::<B, Portable>;
    matmul(
        lhs: IntTensor<B>, rhs: IntTensor<B>, lhs_scale: FloatTensor<B>,
        rhs_scale: FloatTensor<B>, bias: Bias<B>, spec: MatmulSpec
    ) -> FloatTensor<B>
        = fp8_matmul, portable::matmul::<B, Portable>;
    matmul_amax(
        lhs: IntTensor<B>, rhs: IntTensor<B>, lhs_scale: FloatTensor<B>,
        rhs_scale: FloatTensor<B>, bias: Bias<B>, spec: MatmulSpec
    ) -> (FloatTensor<B>, FloatTensor<B>)
        = fp8_matmul_amax, portable::matmul_amax::<B, Portable>;
    update_scale(
        history: FloatTensor<B>, scale: FloatTensor<B>, amax: FloatTensor<B>, update: ScaleUpdate
    ) -> (FloatTensor<B>, FloatTensor<B>)
        = fp8_update_scale, portable::update_scale::<B>;
    quantize_blocks(
        input: FloatTensor<B>, cast: Fp8Cast
    ) -> (IntTensor<B>, FloatTensor<B>)
        = fp8_quantize_blocks, granular::quantize::<B, Portable>;
}
