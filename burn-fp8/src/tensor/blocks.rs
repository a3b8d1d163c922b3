//! Tensors with a scale per row, column or block.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::{Fp8Tensor, Granularity};
use crate::{Fp8Error, Fp8Format, Fp8Ops};

impl<const D: usize> Fp8Tensor<D> {
    /// Quantize every row (of the last dimension) with a scale of its own, from its amax.
    pub fn quantize_rows(tensor: Tensor<D>, format: Fp8Format) -> Self {
        Self::quantize_by(tensor, Granularity::Row, format)
    }

    /// Quantize every column with a scale of its own: the rows of the transpose.
    ///
    /// # Panics
    /// For tensors of rank 1.
    pub fn quantize_columns(tensor: Tensor<D>, format: Fp8Format) -> Self {
        assert!(D > 1, "quantize_columns: a tensor of rank 1 has no columns");
        Self::quantize_by(tensor, Granularity::Column, format)
    }

    /// Quantize every block of `[rows, columns]` of the last two dimensions with a scale of its own. DeepSeek-V3 takes
    /// `[1, 128]` for activations and `[128, 128]` for weights.
    ///
    /// # Errors
    /// [`Fp8Error::EmptyBlock`] for a block without rows or columns, [`Fp8Error::Rank`] for tensors of rank 1.
    pub fn quantize_blocks(
        tensor: Tensor<D>,
        [rows, columns]: [usize; 2],
        format: Fp8Format,
    ) -> Result<Self, Fp8Error> {
        if rows == 0 || columns == 0 {
            return Err(Fp8Error::EmptyBlock { rows, columns });
        }
        if D < 2 {
            return Err(Fp8Error::Rank { rank: D });
        }
        let granularity = Granularity::Block { rows, columns };
        Ok(Self::quantize_by(tensor, granularity, format))
    }

    fn quantize_by(tensor: Tensor<D>, granularity: Granularity, format: Fp8Format) -> Self {
        let tensor = tensor.without_autodiff().into_dispatch();
        let (codes, scale) = Dispatch::fp8_quantize_blocks(tensor, granularity, format);
        Self {
            codes: Tensor::from_dispatch(codes),
            scale: Tensor::from_dispatch(scale),
            granularity,
            format,
        }
    }
}
