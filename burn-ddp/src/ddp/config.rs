//! Settings of data parallel training.

use std::sync::Arc;

use super::{Average, CommHook, Compression};

/// Settings of [`Ddp`](super::Ddp): the same on all ranks.
#[derive(Clone, Debug)]
#[must_use]
pub struct DdpConfig {
    bucket_bytes: usize,
    first_bucket_bytes: usize,
    pub(super) hook: Arc<dyn CommHook>,
    pub(super) divide_by_initial_world_size: bool,
    pub(super) static_graph: bool,
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
            hook: Arc::new(Average),
            divide_by_initial_world_size: true,
            static_graph: false,
        }
    }

    /// The size of a bucket in bytes. A gradient larger than that has a bucket of its own, and gradients
    /// of different types have different buckets.
    ///
    /// With an [`Overlap`](super::Overlap), buckets are filled in the order in which gradients arrive, in
    /// each step anew, where PyTorch takes the order of the first step. After backward, when all gradients
    /// are there, they are filled from the last parameter to the first, and nothing is gained by another
    /// order.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// The size of the first bucket in bytes.
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = bytes;
        self
    }

    /// How buckets are averaged. Default: [`Average`].
    pub fn hook(mut self, hook: impl CommHook) -> Self {
        self.hook = Arc::new(hook);
        self
    }

    /// Sends `f32` gradients in a 16-bit type: a [hook](Self::hook) that is often wanted.
    pub fn compression(self, compression: Compression) -> Self {
        self.hook(compression)
    }

    /// What gradients are divided by while some ranks have run out of batches (see
    /// [`Ddp::join`](super::Ddp::join)): by the number of all ranks (`true`, the default, as in
    /// PyTorch), so that every item weighs the same in the whole epoch, or by the number of ranks that
    /// still have batches, so that the last steps are as long as the others. Gradients that were added up over
    /// several micro-steps are divided by what the last call of `join` has said
    /// (`DdpStrategy` divides those of each micro-step by what was said for it).
    pub fn divide_by_initial_world_size(mut self, divide: bool) -> Self {
        self.divide_by_initial_world_size = divide;
        self
    }

    /// Promises that each step uses the same parameters, whatever that is on which rank: PyTorch's
    /// `static_graph`. Ranks then tell each other in the first step which gradients they have, and not again,
    /// which saves a small collective call a step. A rank that breaks the promise ends the job. Default: no.
    pub fn static_graph(mut self, static_graph: bool) -> Self {
        self.static_graph = static_graph;
        self
    }

    pub(super) fn bucket_limit(&self, first: bool) -> usize {
        match first {
            true => self.first_bucket_bytes,
            false => self.bucket_bytes,
        }
    }
}
