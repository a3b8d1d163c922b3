//! Code that the benches share.

mod by_hand;
mod comparison;
mod goals;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod launches;
mod lines;
mod memory;
pub mod models;
mod precision;
mod quartiles;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod routines;
mod selection;
mod stderr_log;
pub mod steps;
mod time_left;
mod torch;
mod traffic;
mod training;
mod two_ranks;
mod unchecked;

pub use by_hand::{cast_all, cast_products};
pub use comparison::{Comparison, Row, Table};
pub use goals::{Goal, Goals, unpaired_ratio};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use launches::{Kernel, Launches};
pub use lines::{lines_of, problem_of};
pub use memory::{Memory, Peak, peak_memory};
pub use precision::Precision;
pub use quartiles::quartiles;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use routines::multiplied_by;
pub use selection::is_selected;
pub use stderr_log::log_warnings;
pub use time_left::{BENCH_SECONDS, share_of_time, time_left};
pub use torch::torch_script;
pub use traffic::{FusionLog, KernelTraffic, Traffic};
pub use training::{NoTraining, Training, training_of};
pub use two_ranks::{Partner, tcp_groups};
pub use unchecked::{BENCH_UNCHECKED, is_unchecked};

/// Held by tests that look at all launches of the process: one at a time.
#[cfg(all(test, feature = "cpu"))]
static LAUNCHES: std::sync::Mutex<()> = std::sync::Mutex::new(());
