//! Normalization.

use super::{Case, case, check};
use burn::{
    module::Module,
    nn::{
        BatchNormConfig, GroupNormConfig, InstanceNormConfig, LayerNormConfig,
        LocalResponseNormConfig, RmsNormConfig, norm::NormalizationConfig,
    },
};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            |device| BatchNormConfig::new(3).init(device),
            |m, feed| m.forward(feed.float([4, 3, 5, 5])),
        ),
        // With running statistics, as in validation.
        case(
            |device| {
                let norm = BatchNormConfig::new(3).init(device);
                norm.freeze().set_require_grad(true)
            },
            |m, feed| m.forward(feed.float([4, 3, 5, 5])),
        ),
        case(
            |device| GroupNormConfig::new(2, 4).init(device),
            |m, feed| m.forward(feed.float([2, 4, 6])),
        ),
        case(
            |device| InstanceNormConfig::new(3).init(device),
            |m, feed| m.forward(feed.float([2, 3, 8])),
        ),
        case(
            |device| LayerNormConfig::new(8).init(device),
            |m, feed| m.forward(feed.float([4, 8])),
        ),
        case(
            |device| RmsNormConfig::new(8).init(device),
            |m, feed| m.forward(feed.float([4, 8])),
        ),
        case(
            |_| LocalResponseNormConfig::new(3).with_alpha(0.5).init(),
            |m, feed| m.forward(feed.float([2, 6, 4, 4])),
        ),
        case(
            |device| NormalizationConfig::from(LayerNormConfig::new(8)).init(device),
            |m, feed| m.forward(feed.float([4, 8])),
        ),
    ]
}

#[test]
fn norms_are_near_f32() {
    check(cases());
}
