//! Random cases, the same ones each time.

use core::fmt::Debug;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestRunner, contextualize_config};

/// Checks that many random cases. `PROPTEST_CASES` sets another number, and `PROPTEST_RNG_SEED` picks others.
pub(crate) fn check<T: Debug>(
    cases: u32,
    strategy: impl Strategy<Value = T>,
    test: impl Fn(&T) -> Result<(), TestCaseError>,
) {
    let config = contextualize_config(Config {
        cases,
        rng_seed: RngSeed::Fixed(0),
        failure_persistence: None,
        max_shrink_iters: 4096,
        max_shrink_time: 60_000,
        ..Config::default()
    });
    if let Err(failed) = TestRunner::new(config).run(&strategy, |case| test(&case)) {
        panic!("{failed}");
    }
}
