//! The bindings to cuBLASLt. All unsafe code of the crate is in here.

mod apart;
mod clock;
mod library;
mod problem;
mod sample;
mod submit;

use std::fmt::Display;

pub use library::Library;
pub(crate) use library::library;

fn text(error: impl Display) -> String {
    error.to_string()
}
