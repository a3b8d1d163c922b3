//! The time limit of a bench.

use std::{
    env,
    sync::LazyLock,
    time::{Duration, Instant},
};

/// The environment variable with the number of seconds that a bench may take. `scripts/gpu-run` sets it.
pub const BENCH_SECONDS: &str = "BENCH_SECONDS";

/// When this process began to measure: when it first called [`time_left`].
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The rest of the seconds that [`BENCH_SECONDS`] gives to this process, counted from the first call. If time is short, a bench
/// skips rounds, but no rows of its table. `None` if the time is not limited.
///
/// ```
/// assert_eq!(benches::time_left(), None);
/// ```
pub fn time_left() -> Option<Duration> {
    let seconds = env::var(BENCH_SECONDS).ok()?;
    let start = *START;
    left(&seconds, start.elapsed())
}

fn left(seconds: &str, passed: Duration) -> Option<Duration> {
    let all = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
    Some(all.saturating_sub(passed))
}

/// The share of [`time_left`] for each of the `tables` tables that are still to be measured.
///
/// ```
/// assert_eq!(benches::share_of_time(3), None);
/// ```
pub fn share_of_time(tables: usize) -> Option<Duration> {
    time_left().map(|left| left / tables.max(1) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_passed_is_not_left() {
        let seconds = Duration::from_secs;
        assert_eq!(left("90", seconds(30)), Some(seconds(60)));
        assert_eq!(left("90", seconds(100)), Some(seconds(0)));
        assert_eq!(left("long", seconds(1)), None);
        assert_eq!(left("-1", seconds(1)), None);
    }
}
