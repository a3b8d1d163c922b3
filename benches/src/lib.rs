//! What the benches share.

mod by_hand;
mod comparison;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod launches;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod memory;
pub mod models;
mod precision;
mod selection;
mod torch;
mod training;
mod two_ranks;

pub use by_hand::cast_by_hand;
pub use comparison::{Comparison, Row, Table};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use launches::{Kernel, Launches};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use memory::peak_memory;
pub use precision::Precision;
pub use selection::is_selected;
pub use torch::torch_script;
pub use training::{model_step, training_step};
pub use two_ranks::{Partner, tcp_groups};
