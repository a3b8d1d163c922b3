//! An fp8 tensor of a backend.

use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{FloatDType, Shape};

use crate::{Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, MatmulSpec};

/// Codes and scales of a backend: what [`Fp8Tensor`](crate::Fp8Tensor) is below Burn's `Tensor`, for backward passes and
/// for layers over a backend.
///
/// ```
/// use burn::backend::{Flex, ops::FloatTensorOps};
/// use burn::tensor::{FloatDType, TensorData};
/// use burn_fp8::{Bias, Fp8Cast, Fp8Format, Granularity, Operand};
///
/// let x = Flex::float_from_data(TensorData::from([[1.0f32, 2.0], [4.0, 8.0]]), &Default::default());
/// let x = Operand::<Flex>::cast(x, Fp8Cast::new(Granularity::Tensor, Fp8Format::E4M3));
/// let product = x.clone().matmul(x.transpose(), Bias::None, FloatDType::F32);
/// assert_eq!(product.storage::<f32>(), [5.0, 20.0, 20.0, 80.0]);
/// ```
#[derive(Clone, Debug)]
pub struct Operand<B: Backend> {
    /// The codes, one byte an element.
    pub codes: IntTensor<B>,
    /// The scales, in f32: `[1]` for one scale, otherwise as [`Fp8Ops::fp8_quantize_blocks`] gives them.
    pub scale: FloatTensor<B>,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// The format of the codes.
    pub format: Fp8Format,
}

impl<B: Backend + Fp8Ops> Operand<B> {
    /// Cast with scales from the tensor's own amaxes.
    pub fn cast(tensor: FloatTensor<B>, cast: Fp8Cast) -> Self {
        let Fp8Cast {
            format,
            granularity,
            power_of_two,
        } = cast;
        let (codes, scale) = match granularity {
            Granularity::Tensor => {
                let amax = B::fp8_amax(tensor.clone());
                let scale = B::fp8_scales(amax, format, power_of_two);
                (B::fp8_quantize(tensor, scale.clone(), format).0, scale)
            }
            _ => B::fp8_quantize_blocks(tensor, cast),
        };
        Self {
            codes,
            scale,
            granularity,
            format,
        }
    }

    /// Cast with a scale (`[1]`) that is known already, and return the tensor's amax (`[1]`) from the same read.
    pub fn cast_with(
        tensor: FloatTensor<B>,
        scale: FloatTensor<B>,
        format: Fp8Format,
    ) -> (Self, FloatTensor<B>) {
        let (codes, amax) = B::fp8_quantize(tensor, scale.clone(), format);
        let operand = Self {
            codes,
            scale,
            granularity: Granularity::Tensor,
            format,
        };
        (operand, amax)
    }

    /// Swap the last two dimensions.
    #[must_use]
    pub fn transpose(self) -> Self {
        let rank = self.codes.shape().num_dims();
        let scale = match self.granularity {
            Granularity::Tensor => self.scale,
            _ => B::float_swap_dims(self.scale, rank - 2, rank - 1),
        };
        Self {
            codes: B::int_swap_dims(self.codes, rank - 2, rank - 1),
            scale,
            granularity: self.granularity.transposed(),
            ..self
        }
    }

    /// The matrix product, accumulated in f32, with a bias of as many elements as it has columns.
    pub fn matmul(self, rhs: Self, bias: Bias<B>, output: FloatDType) -> FloatTensor<B> {
        let spec = MatmulSpec::new(self.format, rhs.format, output);
        match [self.granularity, rhs.granularity] {
            [Granularity::Tensor, Granularity::Tensor] => {
                B::fp8_matmul(self.codes, rhs.codes, self.scale, rhs.scale, bias, spec)
            }
            granularities => {
                let [left, right] = [self.block_scale(), rhs.block_scale()];
                B::fp8_matmul_blocks(
                    self.codes,
                    rhs.codes,
                    left,
                    right,
                    bias,
                    granularities,
                    spec,
                )
            }
        }
    }

    /// The scales with as many dimensions as the codes have.
    fn block_scale(&self) -> FloatTensor<B> {
        let scale = self.scale.clone();
        match self.granularity {
            Granularity::Tensor => {
                let rank = self.codes.shape().num_dims();
                B::float_reshape(scale, Shape::from(vec![1; rank]))
            }
            _ => scale,
        }
    }
}
