//! The bindings to cuDNN's backend API. All unsafe code of the crate is in here.

mod descriptor;
mod functions;
mod known_answer;
mod library;
mod plan;

use std::fmt::Display;

pub use library::Library;
pub(crate) use library::library;

fn text(error: impl Display) -> String {
    error.to_string()
}
