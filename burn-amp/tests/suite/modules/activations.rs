//! Activations.

use super::{Case, case, check};
use burn::nn::activation::*;

/// An activation that `$init` makes, which changes every element by itself.
macro_rules! elementwise {
    ($($init:expr),* $(,)?) => {
        vec![$(case(|_| $init, |m, feed| m.forward(feed.float([4, 8])))),*]
    };
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = elementwise![
        CeluConfig::new().init(),
        EluConfig::new().init(),
        Gelu::new(),
        Gelu::new_approximate(),
        GLU::new(1),
        HardShrinkConfig::new().init(),
        HardSigmoidConfig::new().init(),
        HardSwish::new(),
        HardtanhConfig::new().init(),
        LeakyReluConfig::new().init(),
        LogSigmoid::new(),
        Mish::new(),
        Relu::new(),
        Relu6::new(),
        Selu::new(),
        ShrinkConfig::new().init(),
        Sigmoid::new(),
        SiLU::new(),
        SoftShrinkConfig::new().init(),
        SoftplusConfig::new().init(),
        Softsign::new(),
        Tanh::new(),
        Tanhshrink::new(),
        ThresholdConfig::new(0.1, 0.2).init(),
        ThresholdedReluConfig::new().init(),
    ];
    cases.extend([
        case(
            |device| PReluConfig::new().with_num_parameters(8).init(device),
            |m, feed| m.forward(feed.float([4, 8])),
        ),
        case(
            |device| SwiGluConfig::new(8, 6).with_bias(true).init(device),
            |m, feed| m.forward(feed.float([4, 8])),
        ),
        case(
            |device| ActivationConfig::Gelu.init(device),
            |m, feed| m.forward(feed.float([4, 8])),
        ),
    ]);
    cases
}

#[test]
fn activations_are_near_f32() {
    check(cases());
}
