//! Gradients averaged after backward, on the host.

use burn::{module::Module, optim::GradientsParams};

use super::{Bucketer, DdpConfig, Values, gradient::Gradient, parameters::Signature, step::Step};
use crate::{DdpError, ProcessGroup};

/// Buckets for the gradients of trained parameters.
pub(super) fn bucketer(group: ProcessGroup, trained: &[Signature], config: &DdpConfig) -> Bucketer {
    let slots = trained.iter().map(Signature::slot).collect();
    Bucketer::new(group, slots, config.sizes(), config.hook.clone())
        .static_graph(config.static_graph)
}

/// Averages gradients that are all there.
pub(super) fn average<M: Module>(
    bucketer: &mut Bucketer,
    step: &Step<'_, M>,
    mut gradients: GradientsParams,
) -> Result<GradientsParams, DdpError> {
    for (slot, gradient) in step.take(&mut gradients).into_iter().enumerate() {
        // Read as late as it is needed: buckets that are full travel meanwhile.
        let values = match gradient {
            Some(gradient) => Some(Values::from_data(gradient.try_into_data()?)?),
            None => None,
        };
        bucketer.submit(slot, values)?;
    }
    let averages = bucketer.finish()?.into_iter();
    let averages = averages.map(|average| average.map(Gradient::Host));
    step.give(&mut gradients, averages.collect());
    Ok(gradients)
}
