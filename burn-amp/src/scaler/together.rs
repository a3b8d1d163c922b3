//! [`Together`]: the losses of one step, on several threads, make one update of the scale.

use super::{LossScaler, LossScalerState, ScaledStep};

/// What the losses of the last step have made of the scaler so far.
#[derive(Debug, Default)]
pub(super) struct Together(Option<Last>);

#[derive(Debug)]
struct Last {
    before: LossScalerState,
    after: LossScalerState,
    overflow: bool,
}

impl Together {
    /// Update `scaler` after `step`: the first loss of a step does it, and one that overflows after others that did not
    /// does it anew in their place.
    pub(super) fn update(&mut self, scaler: &mut LossScaler, step: &ScaledStep) {
        if !step.checked {
            return;
        }
        let next = scaler.next_step();
        let overflow = step.overflow.is_some();
        if step.step + 1 == next.step
            && let Some(last) = &mut self.0
            && last.after == *scaler.state()
            && last.before.scale == step.scale
        {
            if overflow && !last.overflow {
                scaler.update_anew(last.before.clone(), overflow);
                last.after = scaler.state().clone();
                last.overflow = overflow;
            }
            return;
        }
        // A loss of a step that is long over tells of the scale only where it overflows, if that is the scale still.
        if step.scale == next.scale && (step.step == next.step || overflow) {
            let before = scaler.state().clone();
            scaler.update(overflow);
            let after = scaler.state().clone();
            self.0 = Some(Last {
                before,
                after,
                overflow,
            });
        }
    }
}
