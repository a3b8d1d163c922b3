//! Random steps of layers beside those of their model.

use burn::tensor::Device;
use proptest::prelude::*;

use super::check;
use super::runner::Runner;
#[cfg(feature = "cpu")]
use super::steps::Case;
use super::steps::cases;

#[test]
fn layers_follow_their_model() {
    check(100, cases(), |case| {
        let devices = [Device::flex()];
        let kept = Runner::run(case, &devices, false)?;
        // A record in between changes nothing.
        prop_assert_eq!(kept, Runner::run(case, &devices, true)?);
        Ok(())
    });
}

#[cfg(feature = "cpu")]
#[test]
fn layers_on_kernels_follow_their_model() {
    // Every fused kernel is compiled anew.
    let few = cases().prop_map(|case| Case {
        ranks: 1,
        steps: case.steps.into_iter().take(2).collect(),
        ..case
    });
    check(1, few, |case| {
        Runner::run(case, &[Device::cpu(), Device::flex()], true).map(drop)
    });
}

#[cfg(feature = "remote")]
#[test]
fn layers_over_a_wire_follow_their_model() {
    let servers = [false, true].map(super::serve);
    check(10, (cases(), 0..2usize), |(case, server)| {
        let devices = [servers[*server].1.clone(), Device::flex()];
        Runner::run(case, &devices, true).map(drop)
    });
}
