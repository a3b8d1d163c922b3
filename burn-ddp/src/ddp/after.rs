//! Averages gradients after backward, when all of them have been computed.

use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{Device, Tensor},
};

use super::{
    DdpConfig, DdpStats, Values,
    gradient::Gradient,
    hook::is_plain,
    parameters::Signature,
    presence::Presence,
    reducer::{Place, Reducer},
    step::Step,
};
use crate::{Backend, DdpError, ProcessGroup};

/// Averages gradients on their device if possible, else on the host.
pub(super) struct After {
    reducer: Reducer,
    /// The device that gradients stay on, if they do not go through the host.
    device: Option<Device>,
    presence: Presence,
}

impl After {
    pub(super) fn new<M: Module>(
        group: ProcessGroup,
        config: DdpConfig,
        trained: &[Signature],
        model: &M,
    ) -> Result<Self, DdpError> {
        let device = device(&group, &config, trained, model)?;
        Ok(Self::on(device, group, config))
    }

    fn on(device: Option<Device>, group: ProcessGroup, config: DdpConfig) -> Self {
        Self {
            device,
            presence: Presence::new(config.static_graph),
            reducer: Reducer::new(group, config),
        }
    }

    /// The group in which the model's tensors travel without leaving their device, if they do.
    pub(super) fn on_device(&self) -> Option<&ProcessGroup> {
        self.device.as_ref().map(|_| self.reducer.group())
    }

    pub(super) fn average<M: Module>(
        &mut self,
        step: &Step<'_, M>,
        mut gradients: GradientsParams,
    ) -> Result<GradientsParams, DdpError> {
        let taken = step.take(&mut gradients)?;
        // A gradient that some ranks lack counts as zeros there; one that all ranks lack stays absent.
        let present: Vec<u8> = taken.iter().map(|it| it.is_some().into()).collect();
        let anywhere = self.presence.agree(self.reducer.group(), &present)?;
        let slots = taken.into_iter().zip(step.trained).zip(anywhere);
        let places = slots.map(|((gradient, signature), anywhere)| match anywhere {
            0 => Ok(None),
            // Read each gradient only when needed: full buckets travel meanwhile.
            _ => {
                let gradient = self.gradient(gradient, signature)?;
                Ok(Some(self.reducer.add(gradient, signature.shape.clone())))
            }
        });
        let places: Vec<Option<Place>> = places.collect::<Result<_, DdpError>>()?;
        self.reducer.end();
        self.reducer.finish()?;
        let averages = places
            .iter()
            .map(|place| place.as_ref().map(Place::average).transpose());
        step.give(&mut gradients, averages.collect::<Result<_, _>>()?);
        Ok(gradients)
    }

    /// A gradient, or zeros, on the device or host where it is averaged.
    fn gradient(
        &self,
        gradient: Option<Tensor<1>>,
        Signature { shape, dtype, .. }: &Signature,
    ) -> Result<Gradient, DdpError> {
        let len = shape.num_elements();
        Ok(match (&self.device, gradient) {
            (Some(device), Some(it)) => Gradient::Device(it.to_device(device).into()),
            (Some(device), None) => Gradient::Device(Tensor::zeros([len], (device, *dtype)).into()),
            (None, Some(it)) => Gradient::Host(Values::from_data(it.try_into_data()?)?),
            (None, None) => Gradient::Host(Values::zeros(len, *dtype)?),
        })
    }

    pub(super) fn stats(&self) -> DdpStats {
        self.reducer.stats()
    }
}

/// The device of a model whose gradients travel by NCCL, unless the hook is one that NCCL cannot replace.
fn device<M: Module>(
    group: &ProcessGroup,
    config: &DdpConfig,
    trained: &[Signature],
    model: &M,
) -> Result<Option<Device>, DdpError> {
    // A model without tensors is on no device.
    let Some(device) = model.devices().into_iter().next() else {
        return Ok(None);
    };
    let device = device.without_autodiff();
    let by_nccl = group.tensor_backend(&device)? == Backend::Nccl;
    if !by_nccl && group.is_main() && group.world_size() > 1 && group.hides_gpu(&device) {
        log::warn!(
            "burn-ddp: {device:?} is a layered device over an NVIDIA GPU, such as autocast, so `Ddp::new` copies gradients \
             through the host. For NCCL, make the device by `Overlap::serve`, and use `Ddp::overlapped`, also to accumulate \
             gradients. (The backend `host` silences this.)"
        );
    }
    Ok((by_nccl && is_plain(&*config.hook, trained)).then_some(device))
}

#[cfg(test)]
mod tests;
