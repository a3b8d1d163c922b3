//! Random programs of all ranks beside simple models of what they must do.
//!
//! The cases are few, and the same in each run. `PROPTEST_CASES` sets their number, for each property, and `PROPTEST_RNG_SEED`
//! another seed.

mod aside;
mod call;
mod collectives;
mod faults;
pub(crate) mod gradients;
mod norms;
mod parameters;
mod program;
mod resumed;
mod samplers;
mod training;
mod values;

use std::{fmt::Debug, sync::mpsc, thread, time::Duration};

use proptest::{
    prelude::*,
    test_runner::{RngSeed, contextualize_config},
};

/// So many cases, unless the environment sets their number.
pub(crate) fn config(cases: u32) -> ProptestConfig {
    let given = contextualize_config(ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(0),
        ..ProptestConfig::default()
    });
    ProptestConfig {
        failure_persistence: None,
        // A case that fails may take a while.
        max_shrink_time: 300_000,
        ..given
    }
}

/// Runs a case that must end, and returns its result. What it says when it panics is the failure.
pub(crate) fn watched<C, R>(case: &C, body: impl FnOnce(&C) -> R + Send + 'static) -> R
where
    C: Clone + Debug + Send + 'static,
    R: Send + 'static,
{
    let (sender, result) = mpsc::channel();
    let own = case.clone();
    let thread = thread::spawn(move || sender.send(body(&own)));
    match result.recv_timeout(Duration::from_secs(180)) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs: {case:#?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => unreachable!("it has sent its result"),
        },
    }
}
