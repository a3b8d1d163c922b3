//! Random programs of linear layers on devices of `Autocast::fp8`, beside histories and sums in plain floats.

mod model;
mod program;
#[allow(dead_code)]
#[path = "../../../../burn-fp8/tests/suite/random/reference.rs"]
mod reference;
mod run;

use burn::tensor::Device;
use proptest::{prelude::*, test_runner::TestCaseError};

use super::{alone::alone, random_cases::check};

type Outcome = Result<(), TestCaseError>;

#[test]
fn layers_follow_their_histories() {
    alone("suite::fp8_programs::layers_follow_their_histories", || {
        check(60, program::programs(), |program| {
            let whole = run::run(program, Device::flex(), false)?;
            // A checkpoint in between changes nothing.
            prop_assert_eq!(whole, run::run(program, Device::flex(), true)?);
            Ok(())
        });
    });
}
