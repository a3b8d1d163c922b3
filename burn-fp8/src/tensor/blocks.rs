//! Tensors with a scale per row, column or block, made of the per-tensor ops and Burn's own.

use core::ops::Range;

use burn::tensor::{DType, FloatDType, Int, Tensor};

use super::{Fp8Tensor, Granularity};
use crate::{Fp8Error, Fp8Format};

impl<const D: usize> Fp8Tensor<D> {
    /// Quantize every row (of the last dimension) with a scale of its own, from its amax.
    pub fn quantize_rows(tensor: Tensor<D>, format: Fp8Format) -> Self {
        Self::quantize_by(tensor, Granularity::Row, format)
    }

    /// Quantize every column with a scale of its own: rows of the transpose.
    ///
    /// # Panics
    /// For tensors of rank 1.
    pub fn quantize_columns(tensor: Tensor<D>, format: Fp8Format) -> Self {
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
        let tensor = tensor.without_autodiff().cast(FloatDType::F32);
        let dims = tensor.dims();
        let mut amax = maxima(tensor.clone().abs(), granularity.columns());
        if D > 1 {
            amax = maxima(amax.transpose(), granularity.rows()).transpose();
        }
        let usable = amax
            .clone()
            .greater_elem(0.0)
            .bool_and(amax.clone().lower_equal_elem(f32::MAX));
        let quotient = (amax.recip() * format.max()).clamp_max(f32::MAX);
        let scale = quotient.ones_like().mask_where(usable, quotient);

        let scaled = tensor * stretch(scale.clone(), granularity, dims);
        let unit = Tensor::ones([1], (&scale.device(), DType::F32));
        let (quantized, _) = Self::quantize_with_device_scale(scaled, unit, format);
        Self {
            scale,
            granularity,
            ..quantized
        }
    }

    /// The scales, one an element (or broadcastable to it).
    pub(super) fn expanded_scale(&self) -> Tensor<D> {
        stretch(self.scale.clone(), self.granularity, self.dims())
    }

    /// The codes of some columns.
    pub(crate) fn columns(&self, range: Range<usize>) -> Tensor<D, Int> {
        self.codes.clone().slice_dim(D - 1, range)
    }

    /// The scale of every row in column `column`, of shape `[..., rows or 1, 1]`.
    pub(crate) fn row_scales(&self, column: usize) -> Tensor<D> {
        let block = self.granularity.columns().map_or(0, |size| column / size);
        let scale = self.scale.clone().slice_dim(D - 1, block..block + 1);
        let rows = Granularity::Block {
            rows: self.granularity.rows().unwrap_or(usize::MAX),
            columns: usize::MAX,
        };
        let mut dims = self.dims();
        dims[D - 1] = 1;
        stretch(scale, rows, dims)
    }
}

/// The maximum of every `size` neighbours in the last dimension, of all of them for `None`.
fn maxima<const D: usize>(tensor: Tensor<D>, size: Option<usize>) -> Tensor<D> {
    let mut dims = tensor.dims();
    let length = dims[D - 1];
    let size = match size {
        None => return tensor.max_dim(D - 1),
        Some(1) => return tensor,
        Some(size) => size.min(length),
    };
    let blocks = length.div_ceil(size);
    dims[D - 1] = blocks * size - length;
    let padding = Tensor::zeros(dims, (&tensor.device(), tensor.dtype()));
    let padded = match dims[D - 1] {
        0 => tensor,
        _ => Tensor::cat(vec![tensor, padding], D - 1),
    };
    dims[D - 1] = blocks;
    let total = dims.iter().product::<usize>();
    padded.reshape([total, size]).max_dim(1).reshape(dims)
}

/// Repeat every scale over the rows and columns that share it. Dimensions of one scale are left to broadcasting.
fn stretch<const D: usize>(
    scale: Tensor<D>,
    granularity: Granularity,
    dims: [usize; D],
) -> Tensor<D> {
    let scale = repeat(scale, granularity.columns(), dims[D - 1]);
    match D {
        1 => scale,
        _ => repeat(scale.transpose(), granularity.rows(), dims[D - 2]).transpose(),
    }
}

/// Repeat every element of the last dimension `times` times, then cut to `length`.
fn repeat<const D: usize>(tensor: Tensor<D>, times: Option<usize>, length: usize) -> Tensor<D> {
    let mut dims = tensor.dims();
    let (Some(times), true) = (times.filter(|&times| times > 1), dims[D - 1] > 1) else {
        return tensor;
    };
    let total = dims.iter().product::<usize>();
    dims[D - 1] *= times;
    let repeated = tensor.reshape([total, 1]).expand([total, times]);
    repeated.reshape(dims).slice_dim(D - 1, 0..length)
}
