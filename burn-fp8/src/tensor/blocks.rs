//! Tensors with a scale per row, column or block.

use burn::tensor::Tensor;

use super::{Fp8Tensor, Granularity};
use crate::{Fp8Cast, Fp8Error, Fp8Format, functions};

impl<const D: usize> Fp8Tensor<D> {
    /// Quantizes with a scale for each row (of the last dimension), from its own amax.
    ///
    /// # Panics
    /// If CubeCL's kernels cannot count the elements (see [`quantize_as`](Self::quantize_as), which returns an error instead).
    pub fn quantize_rows(tensor: Tensor<D>, format: Fp8Format) -> Self {
        Self::cast(tensor, Fp8Cast::new(Granularity::Row, format))
    }

    /// Quantizes with a scale for each column, from its own amax. Columns are the rows of the transpose.
    ///
    /// # Panics
    /// If the tensor has rank 1, or CubeCL's kernels cannot count the elements (see [`quantize_as`](Self::quantize_as), which
    /// returns an error instead).
    pub fn quantize_columns(tensor: Tensor<D>, format: Fp8Format) -> Self {
        assert!(D > 1, "quantize_columns: a tensor of rank 1 has no columns");
        Self::cast(tensor, Fp8Cast::new(Granularity::Column, format))
    }

    /// Quantizes with a scale for each block of `[rows, columns]` of the last two dimensions, from its own amax. DeepSeek-V3 uses
    /// `[1, 128]` for activations and `[128, 128]` for weights.
    ///
    /// # Errors
    /// [`Fp8Error::EmptyBlock`] for a block without rows or columns, [`Fp8Error::NoMatrix`] for tensors of rank 1,
    /// [`Fp8Error::TooLarge`] if CubeCL's kernels cannot count the elements.
    pub fn quantize_blocks(
        tensor: Tensor<D>,
        [rows, columns]: [usize; 2],
        format: Fp8Format,
    ) -> Result<Self, Fp8Error> {
        Self::quantize_as(
            tensor,
            Fp8Cast::new(Granularity::Block { rows, columns }, format),
        )
    }

    /// Quantizes with scales from the tensor's own amaxes, as `cast` says.
    ///
    /// # Errors
    /// [`Fp8Error::EmptyBlock`] for a block without rows or columns, [`Fp8Error::NoMatrix`] for columns or blocks of a tensor of
    /// rank 1, [`Fp8Error::TooLarge`] if CubeCL's kernels cannot count the elements.
    pub fn quantize_as(tensor: Tensor<D>, cast: Fp8Cast) -> Result<Self, Fp8Error> {
        cast.granularity.check(D)?;
        functions::check_cast(&tensor, cast.granularity)?;
        Ok(Self::cast(tensor, cast))
    }
}
