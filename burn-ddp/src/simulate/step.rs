//! A training step, of which part of the communication hides behind backward.

use std::time::Duration;

/// A training step as one rank alone would take it, and how its gradients are sent.
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
    /// A step that computes for so long and makes gradients of so many bytes, sent in buckets as
    /// [`DdpConfig`](crate::DdpConfig) has them by default, while backward still runs.
    ///
    /// Backward takes two thirds of the time, and makes gradients at a steady rate.
    pub fn new(compute: Duration, gradient_bytes: u64) -> Self {
        Self {
            compute: compute.as_secs_f64(),
            gradient_bytes,
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            overlap: true,
        }
    }

    /// The sizes of the first bucket and of the others.
    ///
    /// # Panics
    ///
    /// Panics if one is 0.
    pub fn buckets(mut self, first: u64, others: u64) -> Self {
        assert!(first > 0 && others > 0, "a bucket has at least one byte");
        (self.first_bucket_bytes, self.bucket_bytes) = (first, others);
        self
    }

    /// Whether buckets are sent while backward still runs, or all after it.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// The seconds of the step, with `all_reduce` giving those of an all-reduce of so many bytes. Buckets
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

    /// The part of the time that is spent computing: 1 is perfect scaling, where each rank keeps its batch.
    pub fn efficiency(&self, all_reduce: impl Fn(u64) -> f64) -> f64 {
        match self.seconds(all_reduce) {
            seconds if seconds > 0.0 => self.compute / seconds,
            _ => 1.0,
        }
    }
}
