//! What products have in common that one measurement is for.

use std::fmt;

use burn::{backend::TensorMetadata, tensor::DType};
use cubecl::tune::AutotuneKey;
use serde::{Deserialize, Serialize};

use super::{Product, Size, cublaslt, tile::is_copied};
use crate::{Fp8Format, Granularity};

/// What decides which routines can compute a product, and which of them is the fastest.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) size: Size,
    pub(super) formats: [Fp8Format; 2],
    pub(super) granularities: [Granularity; 2],
    pub(super) output: DType,
    /// See [`MatmulSpec::fast_accumulation`](crate::MatmulSpec::fast_accumulation): some routines are faster with it.
    pub(super) fast: bool,
    /// Which sides routines that read along the sums copy first.
    pub(super) copied: [bool; 2],
    /// Whether cuBLASLt takes it, which rounded sizes do not tell.
    pub(super) library: bool,
}

impl Key {
    pub(super) fn of(product: &Product) -> Self {
        let rank = product.lhs.shape().num_dims();
        let (outer, inner) = (rank - 2, rank - 1);
        Self {
            copied: [
                is_copied(&product.lhs, outer, inner),
                is_copied(&product.rhs, inner, outer),
            ],
            size: product.size(),
            formats: [product.spec.lhs, product.spec.rhs],
            granularities: product.granularities(),
            output: DType::from(product.spec.output),
            fast: product.spec.fast_accumulation,
            library: cublaslt::takes(product),
        }
    }

    /// That of all products that one measurement is for: each size rounded up to a power of two; 0 stays, for a product of
    /// nothing is another matter.
    pub(super) fn rounded(self) -> Self {
        let rounded = |size: usize| match size {
            0 => 0,
            size => size.next_power_of_two(),
        };
        let Size { m, n, k, batches } = self.size;
        Self {
            size: Size {
                m: rounded(m),
                n: rounded(n),
                k: rounded(k),
                batches: rounded(batches),
            },
            ..self
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl AutotuneKey for Key {}
