use serde::{Deserialize, Serialize};

use crate::Fp8Error;

/// Which elements of a tensor share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Granularity {
    /// All elements.
    Tensor,
    /// The elements of a row (of the last dimension).
    Row,
    /// The elements of a column. The transpose of a tensor that is scaled by rows is scaled by columns.
    Column,
    /// The elements of a block of the last two dimensions. Blocks at the edges may be smaller.
    Block {
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        columns: usize,
    },
}

impl Granularity {
    /// The number of rows that share a scale; `None` if all rows do.
    pub(crate) fn rows(self) -> Option<usize> {
        match self {
            Self::Tensor | Self::Column => None,
            Self::Row => Some(1),
            Self::Block { rows, .. } => Some(rows),
        }
    }

    /// The number of columns that share a scale; `None` if all columns do.
    pub(crate) fn columns(self) -> Option<usize> {
        self.transposed().rows()
    }

    /// Whether products probably sum along the columns of a matrix with such scales, as they do for a right side: in that
    /// direction its scales change less often. Square blocks count, because weights have them.
    #[cfg(feature = "cubecl")]
    pub(crate) fn is_summed_down(self) -> bool {
        match self {
            Self::Tensor | Self::Row => false,
            Self::Column => true,
            Self::Block { rows, columns } => rows >= columns,
        }
    }

    /// Checks that a tensor of this rank can have such scales.
    pub(crate) fn check(self, rank: usize) -> Result<(), Fp8Error> {
        match self {
            Self::Block { rows, columns } if rows == 0 || columns == 0 => {
                Err(Fp8Error::EmptyBlock { rows, columns })
            }
            Self::Block { .. } | Self::Column if rank < 2 => Err(Fp8Error::NoMatrix {
                granularity: self,
                rank,
            }),
            _ => Ok(()),
        }
    }

    /// The numbers of rows and of columns that share a scale, or 0 if all do, as op descriptions and records store them.
    pub(crate) fn sides(self) -> [u64; 2] {
        [self.rows(), self.columns()].map(|side| side.unwrap_or(0) as u64)
    }

    /// The inverse of [`sides`](Self::sides).
    pub(crate) fn from_sides(sides: [u64; 2]) -> Self {
        match sides.map(|side| side as usize) {
            [0, 0] => Self::Tensor,
            [1, 0] => Self::Row,
            [0, 1] => Self::Column,
            [rows, columns] => Self::Block { rows, columns },
        }
    }

    /// The shape of the scales for codes of shape `codes`.
    pub(crate) fn scale_shape(self, codes: &[usize]) -> Vec<usize> {
        if self == Self::Tensor {
            return vec![1; codes.len()];
        }
        let mut shape = codes.to_vec();
        for (length, side) in shape.iter_mut().rev().zip([self.columns(), self.rows()]) {
            *length = side.map_or(1, |side| length.div_ceil(side));
        }
        shape
    }

    /// The granularity of the transpose.
    ///
    /// ```
    /// use burn_fp8::Granularity;
    ///
    /// assert_eq!(Granularity::Row.transposed(), Granularity::Column);
    /// ```
    #[must_use]
    pub fn transposed(self) -> Self {
        match self {
            Self::Tensor => Self::Tensor,
            Self::Row => Self::Column,
            Self::Column => Self::Row,
            Self::Block { rows, columns } => Self::Block {
                rows: columns,
                columns: rows,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn granularities_come_back() {
        let block = |rows, columns| Granularity::Block { rows, columns };
        for (granularity, sides) in [
            (Granularity::Tensor, [0, 0]),
            (Granularity::Row, [1, 0]),
            (Granularity::Column, [0, 1]),
            (block(1, 1), [1, 1]),
            (block(3, 128), [3, 128]),
        ] {
            assert_eq!(granularity.sides(), sides);
            assert_eq!(Granularity::from_sides(sides), granularity);
        }
    }
}
