//! [`LossScalerError`].

/// Why a loss scaler could not do what it was asked to.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LossScalerError {
    /// A value is invalid.
    #[error("the loss scaler's {what} is {found}; expected {expected}")]
    Invalid {
        /// The name of the value.
        what: &'static str,
        /// What the value must be.
        expected: &'static str,
        /// The value.
        found: f64,
    },
    /// The scale was updated without any step, or only with steps of modules without gradients.
    #[error(
        "nothing was checked for overflow since the last update of the loss scale: unscale and \
         step at least one optimizer, with gradients of its module, then update with what the steps returned"
    )]
    NothingChecked,
    /// The scale was updated with a step that was unscaled before the last update.
    #[error(
        "step {step}, unscaled with the loss scale {scale}, says nothing about step {next} and the scale {current}: \
         update the scale once after all steps of one backward pass, and before the next one"
    )]
    Stale {
        /// The number of the step.
        step: u64,
        /// The scale that it was unscaled with.
        scale: f32,
        /// The number of the scaler's next step.
        next: u64,
        /// The scale of the scaler.
        current: f32,
    },
    /// The scale was updated with a step that was unscaled before the scale was set.
    #[error(
        "the loss scale was set to {current} since step {step} was unscaled with {scale}: \
         setting the scale replaces the update; do one or the other"
    )]
    SetSince {
        /// The number of the step.
        step: u64,
        /// The scale that it was unscaled with.
        scale: f32,
        /// The scale of the scaler.
        current: f32,
    },
    /// The record is not that of a loss scaler.
    #[error(
        "the record has no loss scaler's {missing}: load what LossScaler::to_record returned, \
         or begin anew with LossScalerConfig::init"
    )]
    Record {
        /// The name of the first entry that is missing or of another type.
        missing: &'static str,
    },
}
