//! The key of a measurement, shared by all products that the measurement is for.

use std::fmt;

use burn::backend::TensorMetadata;
use cubecl::tune::AutotuneKey;
use serde::{Deserialize, Serialize};

use super::{MatmulRoutine, Outline, Product, Size, cublaslt, tile::is_copied};
use crate::MatmulSpec;

/// What decides which routines can compute a product, and which of them is the fastest.
///
/// Results are stored, and other builds and machines find them. So a key also names the device and its routines: a GPU with
/// another name, or a build of this crate with other routines, measures for itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) size: Size,
    pub(super) spec: MatmulSpec,
    /// Which sides are copied first by routines that read along the inner dimension.
    pub(super) copied: [bool; 2],
    /// If cuBLASLt is one of the routines: whether it is given a padded `k`, and a padded `n`, by copies that others do without.
    pub(super) padded: [bool; 2],
    /// The routines that can compute the product and are native to the device. Rounded sizes alone do not determine them.
    pub(super) routines: Vec<MatmulRoutine>,
    /// The name of the device.
    pub(super) device: String,
}

impl Key {
    /// The key of a product. Sizes are rounded up to powers of two, so that similar products share a measurement. 0 stays 0,
    /// because an empty product is a different case.
    pub(super) fn of(product: &Product, outline: &Outline, routines: Vec<MatmulRoutine>) -> Self {
        let rank = product.lhs.shape().num_dims();
        let (outer, inner) = (rank - 2, rank - 1);
        let rounded = |size: usize| match size {
            0 => 0,
            size => size.next_power_of_two(),
        };
        let Size { m, n, k, batches } = outline.size;
        let library = routines.contains(&MatmulRoutine::CublasLt);
        Self {
            padded: [k, n].map(|size| library && cublaslt::is_padded(size)),
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
            spec: product.spec,
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
