//! Tests `scripts/gpu-run` with programs that only print, and a driver that is only a name.

mod files;
mod machine;
mod summary;
mod time;
