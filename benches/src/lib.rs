//! What the benches share.

mod comparison;
mod precision;
mod resnet18;
mod selection;
mod two_ranks;

pub use comparison::{Comparison, Row, Table};
pub use precision::Precision;
pub use resnet18::ResNet18;
pub use selection::is_selected;
pub use two_ranks::{Partner, tcp_groups};
