//! Mistakes in the arguments of a call.

use serde::{Deserialize, Serialize};
use strum::{Display, VariantArray};

/// A mistake in the arguments of a call that the number and type of the elements do not show.
///
/// A rank that is given such arguments tells the other ranks in place of sending data, so that they do not wait
/// for data that never comes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Display, VariantArray,
)]
#[non_exhaustive]
#[repr(u8)]
pub enum Flaw {
    /// There are no tensors.
    #[strum(to_string = "of no tensors")]
    NoTensors = 1,
    /// The tensors are of several types.
    #[strum(to_string = "of tensors of several types")]
    SeveralTypes = 2,
    /// The tensors are on several devices.
    #[strum(to_string = "of tensors on several devices")]
    SeveralDevices = 3,
    /// The tensors have a type that no call supports.
    #[strum(to_string = "of tensors of a type that is neither integers nor floats")]
    TypeUnsupported = 4,
    /// The ranks have not agreed yet on how tensors travel, which the two ranks of a message cannot do alone.
    #[strum(to_string = "before the ranks have settled how tensors travel")]
    Unsettled = 5,
    /// The list of ranks is empty.
    #[strum(to_string = "of no ranks")]
    NoRanks = 6,
    /// The list of ranks contains one that does not exist.
    #[strum(to_string = "of a rank that does not exist")]
    UnknownRank = 7,
    /// The list of ranks contains one twice.
    #[strum(to_string = "with a rank named twice")]
    RankTwice = 8,
}
