//! Tests `scripts/gpu-run` and `scripts/gpu-compile` with programs that only print, and a driver that is only a name.

mod compile;
mod files;
mod machine;
mod summary;
mod time;
