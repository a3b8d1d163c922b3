//! NCCL's version.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

/// The first version that allows ranks to share a GPU.
pub(super) const SHARING: NcclVersion = NcclVersion {
    major: 2,
    minor: 30,
    patch: 0,
};

/// A version of NCCL.
///
/// ```
/// use burn_ddp::NcclVersion;
///
/// let version = NcclVersion::from_code(22_803);
/// assert_eq!(version.to_string(), "2.28.3");
/// assert!(version > NcclVersion::from_code(2_708)); // 2.7.8, before codes had five digits
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct NcclVersion {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl NcclVersion {
    /// Decodes the number that `ncclGetVersion` returns (`NCCL_VERSION` in nccl.h). The major version is multiplied by 10,000
    /// since 2.9, and was multiplied by 1,000 before.
    pub fn from_code(code: u32) -> Self {
        let unit = if code < 10_000 { 1_000 } else { 10_000 };
        Self {
            major: code / unit,
            minor: code % unit / 100,
            patch: code % 100,
        }
    }
}

impl Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_nccl_h() {
        // #define NCCL_VERSION(X,Y,Z)
        //   (((X) <= 2 && (Y) <= 8) ? (X) * 1000 + (Y) * 100 + (Z) : (X) * 10000 + (Y) * 100 + (Z))
        for (major, minor, patch) in [
            (2, 4, 8),
            (2, 8, 4),
            (2, 9, 6),
            (2, 14, 3),
            (2, 32, 3),
            (3, 0, 0),
        ] {
            let code = match major <= 2 && minor <= 8 {
                true => major * 1_000 + minor * 100 + patch,
                false => major * 10_000 + minor * 100 + patch,
            };
            let version = NcclVersion::from_code(code);
            assert_eq!(
                (version.major, version.minor, version.patch),
                (major, minor, patch)
            );
        }
        assert!(SHARING > NcclVersion::from_code(22_907));
        assert!(SHARING <= NcclVersion::from_code(23_000));
    }
}
