//! Gradients averaged after backward.

use std::collections::HashMap;

use burn::{
    module::{Module, ParamId},
    optim::GradientsParams,
};

use super::{
    Bucketer, DdpConfig,
    parameters::Signature,
    take::{Giver, Taker},
};
use crate::{DdpError, ProcessGroup};

/// Buckets for the gradients of trained parameters.
pub(super) fn bucketer(group: ProcessGroup, trained: &[Signature], config: &DdpConfig) -> Bucketer {
    let slots = trained.iter().map(Signature::slot).collect();
    Bucketer::new(group, slots, config.sizes(), config.hook.clone())
        .static_graph(config.static_graph)
}

/// Averages gradients that are all there, and multiplies the averages by `factor`.
pub(super) fn average<M: Module>(
    bucketer: &mut Bucketer,
    trained: &[Signature],
    slots: &HashMap<ParamId, usize>,
    gradients: GradientsParams,
    model: &M,
    factor: f64,
) -> Result<GradientsParams, DdpError> {
    let mut taker = Taker {
        slots,
        gradients,
        taken: trained.iter().map(|_| None).collect(),
    };
    model.visit(&mut taker);
    let Taker {
        gradients, taken, ..
    } = taker;
    for (slot, read) in taken.into_iter().enumerate() {
        let values = read.map(|read| read()).transpose()?;
        bucketer.submit(slot, values)?;
    }
    let mut averages = bucketer.finish()?;
    if factor != 1.0 {
        let present = averages.iter_mut().flatten();
        present.for_each(|average| average.scale(factor));
    }
    let mut giver = Giver {
        slots,
        trained,
        gradients,
        averages,
    };
    model.visit(&mut giver);
    Ok(giver.gradients)
}
