//! Settings of data parallel training.

use burn::tensor::DType;

use super::{BucketSizes, Compression};

/// Settings of [`Ddp`](super::Ddp).
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct DdpConfig {
    pub(super) bucket_bytes: usize,
    pub(super) first_bucket_bytes: usize,
    pub(super) compression: Option<Compression>,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl DdpConfig {
    /// Buckets of 25 MiB, the first of 1 MiB, no compression: PyTorch's defaults.
    pub fn new() -> Self {
        Self {
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            compression: None,
        }
    }

    /// The size of a bucket in bytes. A gradient larger than that has a bucket of its own.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// The size of the first bucket in bytes.
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = bytes;
        self
    }

    /// Sends `f32` gradients in a 16-bit type.
    pub fn compression(mut self, compression: Compression) -> Self {
        self.compression = Some(compression);
        self
    }

    pub(super) fn sizes(&self) -> BucketSizes {
        BucketSizes {
            first: self.first_bucket_bytes,
            others: self.bucket_bytes,
        }
    }

    /// The type in which gradients of a type travel.
    pub(super) fn carried(&self, dtype: DType) -> DType {
        Compression::carried(self.compression, dtype)
    }
}
