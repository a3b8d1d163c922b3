//! Training steps of a model in several precisions, timed in turn, and in PyTorch. A way is measured even if others fail.
//!
//! A way that fails may end its process, or leave the GPU unusable for it. So [one process](measure) measures, and
//! prints what it [finds](Event) at once. [Another](Bench) starts it, keeps what it prints, and starts it
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
pub use torch::{Theirs, torch_ways};
