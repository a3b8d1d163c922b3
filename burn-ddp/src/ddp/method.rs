//! When and where gradients are averaged.

use burn::{module::Module, optim::GradientsParams};

use super::{
    Bucketer, DdpConfig, DdpStats, Timeline,
    after::{average, bucketer},
    during::During,
    on_device::OnDevice,
    parameters::Signature,
    step::Step,
};
use crate::{DdpError, ProcessGroup};

pub(super) enum Method {
    /// After backward, on the host.
    After(Bucketer),
    /// After backward, on the device.
    OnDevice(OnDevice),
    /// During backward.
    During(During),
}

impl Method {
    /// After backward, wherever tensors travel.
    pub(super) fn after<M: Module>(
        group: ProcessGroup,
        config: &DdpConfig,
        trained: &[Signature],
        model: &M,
    ) -> Result<Self, DdpError> {
        Ok(match OnDevice::new(&group, config, trained, model)? {
            Some(on_device) => Self::OnDevice(on_device),
            None => Self::After(bucketer(group, trained, config)),
        })
    }

    pub(super) fn average<M: Module>(
        &mut self,
        step: &Step<'_, M>,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, DdpError> {
        match self {
            Self::After(bucketer) => average(bucketer, step, gradients),
            Self::OnDevice(on_device) => on_device.average(step, gradients),
            Self::During(during) => during.average(step, gradients),
        }
    }

    /// What it has cost so far; it counts no steps.
    pub(super) fn stats(&self) -> DdpStats {
        match self {
            Self::After(bucketer) => DdpStats {
                steps: 0,
                buckets: bucketer.len(),
                bytes_reduced: bucketer.bytes_reduced(),
                waited: bucketer.waited(),
            },
            Self::OnDevice(on_device) => on_device.stats(),
            Self::During(during) => during.stats(),
        }
    }

    pub(super) fn timeline(&self) -> Option<Timeline> {
        match self {
            Self::After(_) | Self::OnDevice(_) => None,
            Self::During(during) => Some(during.timeline()),
        }
    }
}
