//! Settings of data parallel training.

use std::sync::Arc;

use super::{Average, CommHook, Compression};

/// The default size of a bucket in bytes, as in PyTorch.
pub(crate) const BUCKET: usize = 25 << 20;

/// The default size of the first bucket in bytes, as in PyTorch: it is sent early.
pub(crate) const FIRST_BUCKET: usize = 1 << 20;

/// Settings of [`Ddp`](super::Ddp). They must be the same on all ranks.
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
    /// Buckets of 25 MiB, with a first one of 1 MiB, and no compression, as in PyTorch.
    pub fn new() -> Self {
        Self {
            bucket_bytes: BUCKET,
            first_bucket_bytes: FIRST_BUCKET,
            hook: Arc::new(Average),
            divide_by_initial_world_size: true,
            static_graph: false,
        }
    }

    /// The size of a bucket in bytes: it is sent with the gradient that fills it, as in PyTorch, and may be larger by
    /// nearly that gradient. Gradients of different types are in different buckets.
    ///
    /// With an [`Overlap`](super::Overlap), buckets are filled in the order in which gradients arrive, anew in
    /// each step (PyTorch keeps the order of the first step). Without one, they are filled after backward, from
    /// the last parameter to the first; the order makes no difference then.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// The size of the first bucket in bytes, which is sent early.
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = bytes;
        self
    }

    /// How buckets are averaged. Default: [`Average`].
    pub fn hook(mut self, hook: impl CommHook) -> Self {
        self.hook = Arc::new(hook);
        self
    }

    /// Sends `f32` gradients in a 16-bit type, with the [hook](Self::hook) of that type.
    pub fn compression(self, compression: Compression) -> Self {
        self.hook(compression)
    }

    /// What gradients are divided by when some ranks have run out of batches (see [`Ddp::join`](super::Ddp::join)):
    /// `true`, the default as in PyTorch, divides by the number of all ranks, so that every item has the same weight in
    /// the whole epoch; `false` divides by the number of ranks that still have batches, so that the last steps are as
    /// long as the others. Gradients that were accumulated over several micro-steps are divided by the number from the
    /// last call of `join` (`DdpStrategy` divides those of each micro-step by the number for that micro-step).
    pub fn divide_by_initial_world_size(mut self, divide: bool) -> Self {
        self.divide_by_initial_world_size = divide;
        self
    }

    /// Promises that each step uses the same parameters, though not necessarily the same ones on all ranks,
    /// like PyTorch's `static_graph`. Ranks then exchange which gradients they have in the first step only,
    /// which saves a small collective call per step. A rank that breaks the promise ends the job. (After [`join`](super::Ddp::join),
    /// a gradient of which all ranks that have it are without a batch is zeros, instead of absent.) Default: no.
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
