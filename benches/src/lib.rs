//! What the benches share.

mod by_hand;
mod comparison;
pub mod models;
mod precision;
mod selection;
mod torch;
mod two_ranks;

pub use by_hand::cast_by_hand;
pub use comparison::{Comparison, Row, Table};
pub use precision::Precision;
pub use selection::is_selected;
pub use torch::torch_script;
pub use two_ranks::{Partner, tcp_groups};
