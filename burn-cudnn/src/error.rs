//! Why a convolution is not computed: [`ConvolutionError`].

use thiserror::Error;

/// Why the library does not compute a convolution.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConvolutionError {
    /// The sizes are not those of a convolution, or one is 0.
    #[error(
        "the sizes are not those of a convolution of one to three dimensions, or one is 0: see `Convolution`"
    )]
    Sizes,
    /// An address is no multiple of [`ALIGNMENT`](crate::ALIGNMENT).
    #[error("an address is no multiple of {}: copy the tensor", crate::ALIGNMENT)]
    Unaligned,
    /// A tensor reaches further than its memory.
    #[error("a tensor of {needed} bytes is in memory of {size}")]
    TooLarge {
        /// The bytes of the tensor.
        needed: u64,
        /// The bytes that there are.
        size: u64,
    },
    /// The library has no plan for such a convolution. Another way has to compute it.
    #[error("cuDNN has no plan: {reason}")]
    NoPlan {
        /// What the library says.
        reason: String,
    },
}
