//! Runs the built example as a user does.

mod program;
mod suite;
