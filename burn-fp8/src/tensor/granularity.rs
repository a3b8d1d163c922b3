use serde::{Deserialize, Serialize};

use crate::Fp8Error;

/// Which elements of a tensor share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Granularity {
    /// All of them.
    Tensor,
    /// Those of a row (of the last dimension).
    Row,
    /// Those of a column. The transpose of a row-scaled tensor has this one.
    Column,
    /// Those of a block of the last two dimensions. Blocks at the edges may be smaller.
    Block {
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        columns: usize,
    },
}

impl Granularity {
    /// Rows that share a scale; `None` where all of them do.
    pub(crate) fn rows(self) -> Option<usize> {
        match self {
            Self::Tensor | Self::Column => None,
            Self::Row => Some(1),
            Self::Block { rows, .. } => Some(rows),
        }
    }

    /// Columns that share a scale; `None` where all of them do.
    pub(crate) fn columns(self) -> Option<usize> {
        self.transposed().rows()
    }

    /// Whether products likely sum down the columns of a matrix with such scales, as they do those of a right side: its
    /// scales change less often that way. Square blocks are a weight's.
    #[cfg(feature = "cubecl")]
    pub(crate) fn is_summed_down(self) -> bool {
        match self {
            Self::Tensor | Self::Row => false,
            Self::Column => true,
            Self::Block { rows, columns } => rows >= columns,
        }
    }

    /// Check that a tensor of that rank can have its scales so.
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

    /// The rows and the columns that share a scale, 0 where all of them do: what descriptions and records have.
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

    /// The shape of the scales of codes of that shape.
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

    /// That of the transpose.
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
