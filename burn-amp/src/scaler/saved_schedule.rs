//! Saves a loss scaler in the checkpoints of a learning rate schedule.

use super::{LossScalerState, SharedLossScaler};
use burn::{
    lr_scheduler::{LrScheduler, LrSchedulerRecord, module_lr_scheduler::ModuleLrScheduler},
    module::ParamGroup,
    optim::LearningRate,
};

/// `schedule` with one more group, which has no parameters and whose state is that of the scaler.
pub(super) fn with_scaler(
    schedule: ModuleLrScheduler,
    scaler: SharedLossScaler,
) -> ModuleLrScheduler {
    let nothing = ParamGroup::from_paths(Vec::<String>::new());
    schedule.with_group(nothing, Saved(scaler))
}

#[derive(Clone)]
struct Saved(SharedLossScaler);

impl LrScheduler for Saved {
    /// A learning rate that no parameter uses.
    fn step(&mut self) -> LearningRate {
        0.0
    }

    fn to_record(&self) -> LrSchedulerRecord {
        self.0.with(|scaler| scaler.to_record())
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        let loaded = self.0.with(|scaler| {
            let state = LossScalerState::from_record(&record)?;
            *scaler = scaler.clone().load_state(state)?;
            Ok::<_, super::LossScalerError>(())
        });
        if let Err(error) = loaded {
            log::warn!(
                "the loss scaler goes on with the scale {}, for the checkpoint has none: {error}",
                self.0.current_scale()
            );
        }
    }
}
