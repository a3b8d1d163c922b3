//! The two methods of averaging gradients: after backward, or during it.

use burn::{module::Module, optim::GradientsParams};

use super::{DdpStats, Timeline, after::After, during::During, step::Step};
use crate::DdpError;

pub(super) enum Method {
    /// Averages after backward.
    After(After),
    /// Averages during backward.
    During(During),
}

impl Method {
    pub(super) fn average<M: Module>(
        &mut self,
        step: &Step<'_, M>,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, DdpError> {
        match self {
            Self::After(after) => after.average(step, gradients),
            Self::During(during) => during.average(step, gradients),
        }
    }

    /// The cost so far, without the number of steps.
    pub(super) fn stats(&self) -> DdpStats {
        match self {
            Self::After(after) => after.stats(),
            Self::During(during) => during.stats(),
        }
    }

    pub(super) fn timeline(&self) -> Option<Timeline> {
        match self {
            Self::After(_) => None,
            Self::During(during) => Some(during.timeline()),
        }
    }
}
