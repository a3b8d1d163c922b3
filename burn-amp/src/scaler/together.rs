//! [`Together`]: several losses of one step, on several threads, update the scale once.

use super::{LossScaler, LossScalerState, ScaledStep};

/// How the losses of the last step have updated the scaler so far.
#[derive(Debug, Default)]
pub(super) struct Together(Option<Last>);

#[derive(Debug)]
struct Last {
    before: LossScalerState,
    after: LossScalerState,
    overflow: bool,
}

impl Together {
    /// Updates `scaler` after `step`. The first loss of a step updates it. If a later loss is the first that overflows, it
    /// takes that update back and makes one with the overflow.
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
        // A loss of an older step only counts if it overflows and the scale is still the one that it had.
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
