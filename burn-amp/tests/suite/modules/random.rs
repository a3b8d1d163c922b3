//! Modules that draw random numbers in training.

use super::{Case, case, check};
use crate::suite::alone::alone;
use burn::nn::{DropoutConfig, GaussianNoiseConfig, activation::RReluConfig};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            |_| DropoutConfig::new(0.5).init(),
            |m, feed| m.forward(feed.float([4, 8])),
        )
        .beside_base(),
        case(
            |_| GaussianNoiseConfig::new(0.5).init(),
            |m, feed| m.forward(feed.float([4, 8])),
        )
        .beside_base(),
        case(
            |_| RReluConfig::new().init(),
            |m, feed| m.forward(feed.float([4, 8])),
        )
        .beside_base(),
    ]
}

/// The same seed, the same draws as on the plain device.
#[test]
fn modules_that_draw_random_numbers_are_near_f32() {
    alone(
        "suite::modules::random::modules_that_draw_random_numbers_are_near_f32",
        || check(cases()),
    );
}
