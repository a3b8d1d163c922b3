//! [`LossScalerError`].

/// Why a loss scaler cannot do what it is asked to.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LossScalerError {
    /// A value that makes no sense.
    #[error("the loss scaler's {what} is {found}; expected {expected}")]
    Invalid {
        /// The name of the value.
        what: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What it is.
        found: f64,
    },
    /// An update after no step at all, or after steps of modules without gradients.
    #[error(
        "nothing was checked for overflow since the last update of the loss scale: unscale and \
         step at least one optimizer, with gradients of its module, then update with what the steps returned"
    )]
    NothingChecked,
    /// An update with a step that was unscaled before the last one.
    #[error(
        "step {step}, unscaled with the loss scale {scale}, says nothing about step {next} and the scale {current}: \
         update the scale once after all steps of one backward pass, and before the next one"
    )]
    Stale {
        /// The number of the step.
        step: u64,
        /// The scale that it was unscaled with.
        scale: f32,
        /// The number of the step that the scaler is at.
        next: u64,
        /// The scale of the scaler.
        current: f32,
    },
    /// An update of a scale that was set since the step was unscaled.
    #[error(
        "the loss scale was set to {current} since step {step} was unscaled with {scale}: \
         setting the scale stands in place of the update, do one of the two"
    )]
    SetSince {
        /// The number of the step.
        step: u64,
        /// The scale that it was unscaled with.
        scale: f32,
        /// The scale of the scaler.
        current: f32,
    },
    /// A record that is not that of a loss scaler.
    #[error(
        "the record has no loss scaler's {missing}: load what LossScaler::to_record returned, \
         or begin anew with LossScalerConfig::init"
    )]
    Record {
        /// The name of the first entry that is missing or of another type.
        missing: &'static str,
    },
}
