//! An fp8 tensor of a backend.

use burn::backend::{
    Backend, ExtensionType, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{FloatDType, Shape};

use crate::{Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, MatmulSpec};

/// The codes and scales of an fp8 tensor of a backend: what [`Fp8Tensor`](crate::Fp8Tensor) is for Burn's `Tensor`. It is meant
/// for backward passes and for layers over a backend.
///
/// Tensor cores read both sides of a product along its inner dimension. So the codes are stored twice, the second time
/// transposed: a left side is read from the first copy, a right side from the second, and no product of a layer has to copy
/// either. Where the device gains nothing from a second copy (see [`Fp8Ops::fp8_quantize_transposed`]), or there is a scale per
/// row, column or block, the transpose is a view of the same memory.
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
#[derive(Clone, Debug, ExtensionType)]
pub struct Operand<B: Backend> {
    /// The codes, one byte an element: the left side of a product.
    pub codes: IntTensor<B>,
    /// The transpose of the codes (of the last two dimensions): the right side of a product.
    pub transposed: IntTensor<B>,
    /// The scales, in f32: `[1]` for a single scale, otherwise as [`Fp8Ops::fp8_quantize_blocks`] returns them.
    pub scale: FloatTensor<B>,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// The format of the codes.
    pub format: Fp8Format,
}

impl<B: Backend + Fp8Ops> Operand<B> {
    /// Casts with scales from the tensor's own amaxes.
    pub fn cast(tensor: FloatTensor<B>, cast: Fp8Cast) -> Self {
        let Fp8Cast {
            format,
            granularity,
            power_of_two,
        } = cast;
        if granularity == Granularity::Tensor {
            let amax = B::fp8_amax(tensor.clone());
            let scale = B::fp8_scales(amax, format, power_of_two);
            return Self::cast_with(tensor, scale, format).0;
        }
        let (codes, scale) = B::fp8_quantize_blocks(tensor, cast);
        Self::new(codes, scale, granularity, format)
    }

    /// An operand whose codes are stored once.
    fn new(
        codes: IntTensor<B>,
        scale: FloatTensor<B>,
        granularity: Granularity,
        format: Fp8Format,
    ) -> Self {
        Self {
            transposed: swapped::<B>(codes.clone()),
            codes,
            scale,
            granularity,
            format,
        }
    }

    /// Casts with a known scale (`[1]`), and returns the tensor's amax (`[1]`). The tensor is read once for the codes, their
    /// transpose and the amax.
    pub fn cast_with(
        tensor: FloatTensor<B>,
        scale: FloatTensor<B>,
        format: Fp8Format,
    ) -> (Self, FloatTensor<B>) {
        let (codes, transposed, amax) = B::fp8_quantize_transposed(tensor, scale.clone(), format);
        let operand = Self {
            codes,
            transposed,
            scale,
            granularity: Granularity::Tensor,
            format,
        };
        (operand, amax)
    }

    /// [`cast_with`](Self::cast_with) for a tensor that is only a left side, so that its codes are stored once.
    pub(crate) fn cast_left(
        tensor: FloatTensor<B>,
        scale: FloatTensor<B>,
        format: Fp8Format,
    ) -> (Self, FloatTensor<B>) {
        let (codes, amax) = B::fp8_quantize(tensor, scale.clone(), format);
        (Self::new(codes, scale, Granularity::Tensor, format), amax)
    }

    /// The operand without the second copy of its codes.
    pub(crate) fn stored_once(self) -> Self {
        Self::new(self.codes, self.scale, self.granularity, self.format)
    }

    /// Swaps the last two dimensions.
    #[must_use]
    pub fn transpose(self) -> Self {
        let rank = self.codes.shape().num_dims();
        let scale = match self.granularity {
            Granularity::Tensor => self.scale,
            _ => B::float_swap_dims(self.scale, rank - 2, rank - 1),
        };
        Self {
            codes: self.transposed,
            transposed: self.codes,
            scale,
            granularity: self.granularity.transposed(),
            ..self
        }
    }

    /// Changes the leading dimensions; the order of rows and columns stays. The transpose becomes a view.
    ///
    /// # Panics
    /// If the operand has more than one scale, because a reshape would tear their rows or blocks apart.
    #[must_use]
    pub fn reshape(self, shape: Shape) -> Self {
        assert!(
            self.granularity == Granularity::Tensor,
            "reshape: an operand scaled by {:?} has its scales bound to its shape",
            self.granularity
        );
        let codes = B::int_reshape(self.codes, shape);
        Self::new(codes, self.scale, self.granularity, self.format)
    }

    /// The matrix product, summed in f32. A bias has one element for each column of the product.
    pub fn matmul(self, rhs: Self, bias: Bias<B>, output: FloatDType) -> FloatTensor<B> {
        let spec = MatmulSpec::new(self.format, rhs.format, output);
        self.matmul_by(spec, rhs, bias)
    }

    /// [`matmul`](Self::matmul), whose sums may be [less precise](MatmulSpec::fast_accumulation) for speed: the output of a layer,
    /// but not a gradient.
    pub fn matmul_fast(self, rhs: Self, bias: Bias<B>, output: FloatDType) -> FloatTensor<B> {
        let spec = MatmulSpec::new(self.format, rhs.format, output);
        self.matmul_by(spec.with_fast_accumulation(true), rhs, bias)
    }

    fn matmul_by(self, spec: MatmulSpec, rhs: Self, bias: Bias<B>) -> FloatTensor<B> {
        let mut spec = spec.with_granularities([self.granularity, rhs.granularity]);
        let columns = swapped::<B>(rhs.transposed);
        let wide = spec.output == FloatDType::F64;
        if wide {
            // Sums are of f32 anyway, and no fast routine stores f64.
            spec.output = FloatDType::F32;
        }
        let product = B::fp8_matmul(self.codes, columns, self.scale, rhs.scale, bias, spec);
        match wide {
            true => B::float_cast(product, FloatDType::F64),
            false => product,
        }
    }
}

/// Swaps the last two dimensions.
fn swapped<B: Backend>(codes: IntTensor<B>) -> IntTensor<B> {
    let rank = codes.shape().num_dims();
    B::int_swap_dims(codes, rank - 2, rank - 1)
}
