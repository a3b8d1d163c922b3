//! Training steps of a model in several precisions and in PyTorch: timed in turn, each in spite of what became of the others.
//!
//! A way that fails may take its process along, or leave the GPU to no other use. So [one process](measure) measures, and
//! prints what it [finds](Event) as soon as it has found it; [another](Bench) starts it, keeps what arrives, and starts it
//! again without the way that failed.

mod child;
mod event;
mod findings;
mod parent;
mod report;
mod torch;

pub use child::measure;
pub use event::{Event, Job};
pub use findings::{Alone, Findings};
pub use parent::Bench;
pub use report::Report;
pub use torch::{TORCH_WAYS, Theirs};
