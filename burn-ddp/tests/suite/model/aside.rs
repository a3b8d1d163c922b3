//! What else happens in a step of training, none of which changes its averages.

use burn::tensor::{Device, Tensor};
use proptest::prelude::*;

/// What is new before a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Renewed {
    Nothing,
    /// The `Ddp`.
    Ddp,
    /// The parameters, from a checkpoint.
    Parameters,
}

/// What happens in a step on the side.
#[derive(Clone, Debug)]
pub(crate) struct Aside {
    pub(crate) renewed: Renewed,
    /// A pass before all others whose gradients nobody takes, inside `no_sync` or not.
    pub(crate) wasted: Option<bool>,
    /// The pass before which another model runs backward on the same device.
    other_model: Option<usize>,
    /// Whether averages are averaged again.
    pub(crate) again: bool,
    /// Whether the model is not updated, as where a loss scaler finds an overflow.
    pub(crate) skipped: bool,
}

pub(crate) fn asides() -> impl Strategy<Value = Aside> {
    let renewed = prop_oneof![
        8 => Just(Renewed::Nothing),
        1 => Just(Renewed::Ddp),
        1 => Just(Renewed::Parameters),
    ];
    let wasted = prop_oneof![5 => Just(None), 1 => any::<bool>().prop_map(Some)];
    let other_model = prop_oneof![3 => Just(None), 1 => (0usize..5).prop_map(Some)];
    let rarely = || prop_oneof![4 => Just(false), 1 => Just(true)];
    (renewed, wasted, other_model, rarely(), rarely()).prop_map(
        |(renewed, wasted, other_model, again, skipped)| Aside {
            renewed,
            wasted,
            other_model,
            again,
            skipped,
        },
    )
}

impl Aside {
    /// Leaves out what makes gradients be averaged twice.
    pub(crate) fn keep_sums(&mut self) {
        self.wasted = self.wasted.map(|_| true);
        self.other_model = self.other_model.map(|_| 0);
    }

    /// Runs backward of another model, if it is its turn.
    pub(crate) fn before_pass(&self, pass: usize, device: &Device) {
        if self.other_model == Some(pass) {
            let parameter = Tensor::<1>::ones([3], device).require_grad();
            let gradients = parameter.clone().powi_scalar(2).sum().backward();
            assert!(parameter.grad(&gradients).is_some());
        }
    }
}
