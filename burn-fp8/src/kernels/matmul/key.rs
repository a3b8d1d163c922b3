//! What products have in common that one measurement is for.

use std::fmt;

use burn::{backend::TensorMetadata, tensor::DType};
use cubecl::tune::AutotuneKey;
use serde::{Deserialize, Serialize};

use super::{MatmulRoutine, Outline, Product, Size, tile::is_copied};
use crate::{Fp8Format, Granularity};

/// What decides which routines compute a product, and which of them is the fastest.
///
/// Results are stored, and found again by other builds and on other machines. So a key also says what they would measure: a GPU by
/// another name, and another build of this crate, which has other routines, measure for themselves.
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
    /// Those that compute the product and are native to the device, which rounded sizes do not tell.
    pub(super) routines: Vec<MatmulRoutine>,
    /// The name of the device.
    pub(super) device: String,
}

impl Key {
    /// That of all products that one measurement is for: each size rounded up to a power of two; 0 stays, for a product of
    /// nothing is another matter.
    pub(super) fn of(product: &Product, outline: &Outline, routines: Vec<MatmulRoutine>) -> Self {
        let rank = product.lhs.shape().num_dims();
        let (outer, inner) = (rank - 2, rank - 1);
        let rounded = |size: usize| match size {
            0 => 0,
            size => size.next_power_of_two(),
        };
        let Size { m, n, k, batches } = outline.size;
        Self {
            copied: [
                is_copied(&product.lhs, outer, inner),
                is_copied(&product.rhs, inner, outer),
            ],
            size: Size {
                m: rounded(m),
                n: rounded(n),
                k: rounded(k),
                batches: rounded(batches),
            },
            formats: [product.spec.lhs, product.spec.rhs],
            granularities: outline.granularities,
            output: DType::from(product.spec.output),
            fast: product.spec.fast_accumulation,
            routines,
            device: product.lhs.client.properties().identity.name.clone(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl AutotuneKey for Key {}
