//! Benches over a driver that computes nothing.

use std::env;

/// The environment variable with which benches do not judge what devices compute. `scripts/gpu-compile` sets it: there only the
/// kernels matter, which are compiled, and not run.
pub const BENCH_UNCHECKED: &str = "BENCH_UNCHECKED";

/// Whether [`BENCH_UNCHECKED`] is set.
///
/// ```
/// assert!(!benches::is_unchecked());
/// ```
pub fn is_unchecked() -> bool {
    env::var_os(BENCH_UNCHECKED).is_some()
}
