//! A training step that overlaps part of its communication with backward.

use std::time::Duration;

use crate::ddp::{BUCKET, FIRST_BUCKET};

/// A training step: how long it takes on a single rank, and how its gradients are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct Step {
    compute: f64,
    gradient_bytes: u64,
    bucket_bytes: u64,
    first_bucket_bytes: u64,
    overlap: bool,
}

impl Step {
    /// A step that computes for `compute` and produces `gradient_bytes` bytes of gradients. They are sent while backward
    /// still runs, in buckets of the default sizes of [`DdpConfig`](crate::DdpConfig).
    ///
    /// Backward takes two thirds of the time, and produces gradients at a steady rate.
    pub fn new(compute: Duration, gradient_bytes: u64) -> Self {
        Self {
            compute: compute.as_secs_f64(),
            gradient_bytes,
            bucket_bytes: BUCKET as u64,
            first_bucket_bytes: FIRST_BUCKET as u64,
            overlap: true,
        }
    }

    /// Sets the sizes in bytes of the first bucket and of the others.
    ///
    /// # Panics
    ///
    /// Panics if one is 0.
    pub fn buckets(mut self, first: u64, others: u64) -> Self {
        assert!(first > 0 && others > 0, "a bucket has at least one byte");
        (self.first_bucket_bytes, self.bucket_bytes) = (first, others);
        self
    }

    /// Whether buckets are sent while backward still runs. If not, all are sent after it.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// The seconds that the step takes. `all_reduce` returns the seconds of an all-reduce of the given number of bytes. Buckets
    /// are sent one after the other, each as soon as it is full.
    pub fn seconds(&self, all_reduce: impl Fn(u64) -> f64) -> f64 {
        let forward = self.compute / 3.0;
        let backward = self.compute - forward;
        let mut free: f64 = 0.0;
        let mut sent = 0;
        while sent < self.gradient_bytes {
            let limit = match sent {
                0 => self.first_bucket_bytes,
                _ => self.bucket_bytes,
            };
            let bytes = limit.min(self.gradient_bytes - sent);
            sent += bytes;
            let full = match self.overlap {
                true => forward + backward * sent as f64 / self.gradient_bytes as f64,
                false => self.compute,
            };
            free = free.max(full) + all_reduce(bytes);
        }
        free.max(self.compute)
    }

    /// The fraction of the step's time that is spent computing. 1 is perfect weak scaling (each rank keeps its batch size).
    pub fn efficiency(&self, all_reduce: impl Fn(u64) -> f64) -> f64 {
        match self.seconds(all_reduce) {
            seconds if seconds > 0.0 => self.compute / seconds,
            _ => 1.0,
        }
    }
}
