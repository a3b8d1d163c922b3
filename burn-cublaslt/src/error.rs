//! Why a product is not computed: [`ProductError`].

use thiserror::Error;

/// Why the library does not compute a product.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProductError {
    /// An address is less aligned than the product says.
    #[error("an address is no multiple of {alignment}: give the product the alignment that it has")]
    Unaligned {
        /// The product's alignment, in bytes.
        alignment: u32,
    },
    /// The operands have what the product does not have, or lack what it has.
    #[error("the product and its operands do not agree on {what}: give both or none")]
    Disagreement {
        /// The factors or the bias.
        what: &'static str,
    },
    /// Matrices, factors or a bias reach further than their memory.
    #[error("operands of {needed} bytes are in memory of {size}")]
    TooLarge {
        /// The bytes up to the end of the last.
        needed: u64,
        /// The bytes that there are.
        size: u64,
    },
    /// The library has no algorithm for such a product. Another way has to compute it.
    #[error("cuBLASLt has no algorithm: {reason}")]
    NoAlgorithm {
        /// What the library says.
        reason: String,
    },
}
