//! Mistakes in the arguments of a call.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

/// A mistake in the arguments of a call that the number and type of the elements do not show.
///
/// A rank that is given such arguments tells the other ranks in place of sending data, so that they do not wait
/// for data that never comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[repr(u8)]
pub enum Flaw {
    /// There are no tensors.
    NoTensors = 1,
    /// The tensors are of several types.
    SeveralTypes = 2,
    /// The tensors are on several devices.
    SeveralDevices = 3,
    /// The tensors have a type that no call supports.
    TypeUnsupported = 4,
    /// The ranks have not agreed yet on how tensors travel, which the two ranks of a message cannot do alone.
    Unsettled = 5,
    /// The list of ranks is empty.
    NoRanks = 6,
    /// The list of ranks contains one that does not exist.
    UnknownRank = 7,
    /// The list of ranks contains one twice.
    RankTwice = 8,
}

impl Flaw {
    pub(crate) const ALL: [Self; 8] = [
        Self::NoTensors,
        Self::SeveralTypes,
        Self::SeveralDevices,
        Self::TypeUnsupported,
        Self::Unsettled,
        Self::NoRanks,
        Self::UnknownRank,
        Self::RankTwice,
    ];
}

impl Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoTensors => "of no tensors",
            Self::SeveralTypes => "of tensors of several types",
            Self::SeveralDevices => "of tensors on several devices",
            Self::TypeUnsupported => "of tensors of a type that is neither integers nor floats",
            Self::Unsettled => "before the ranks have settled how tensors travel",
            Self::NoRanks => "of no ranks",
            Self::UnknownRank => "of a rank that does not exist",
            Self::RankTwice => "with a rank named twice",
        })
    }
}
