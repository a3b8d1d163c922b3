//! Averages gradients while backward still runs, with the layer of an [`Overlap`].

use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{
        Device, Tensor,
        distributed::{ReduceOperation, all_reduce},
    },
};
use burn_layer::device_under;

use super::{
    DdpStats, Overlap, Timeline,
    agreement::check_whole,
    gradient::Gradient,
    hook::is_plain,
    overlap::is_layered,
    parameters::Signature,
    presence::{NOT_STATIC, Presence},
    reducer::Taken,
    server::GradientServer,
    step::Step,
};
use crate::{DdpError, ProcessGroup};

/// Averages the gradients of a model on a layered device.
pub(super) struct During {
    group: ProcessGroup,
    overlap: Overlap,
    device: Device,
    /// `None` on a rank that is alone, whose gradients nobody waits for: if its hook does more than average them, it gets them
    /// after backward.
    server: Option<GradientServer>,
    /// Whether backward may have run without averaging since the last step.
    unheard: bool,
    /// Whether the program wants averages during backward, outside `no_sync`.
    wanted: bool,
    /// Whether all ranks have a batch for this step.
    all_have_batches: bool,
    warned: bool,
    /// The arrivals of gradients in a static graph, once all ranks were found to have the same.
    fixed: Option<Vec<u32>>,
    /// Tells which gradients any rank has, if backward did not average them.
    presence: Presence,
}

impl During {
    /// The device of a model, if it is a single one with layers.
    pub(super) fn device<M: Module>(model: &M) -> Result<Device, String> {
        let devices = model.devices();
        let [device] = &devices[..] else {
            return Err(format!(
                "the model is on {} devices; expected one",
                devices.len()
            ));
        };
        let device = device.clone().autodiff();
        match is_layered(&device) {
            true => Ok(device),
            false => Err(format!(
                "the model's device, {device:?}, has no layers; make it by `Overlap::serve`"
            )),
        }
    }

    pub(super) fn new(
        group: &ProcessGroup,
        overlap: Overlap,
        device: Device,
    ) -> Result<Self, DdpError> {
        let server = match group.world_size() {
            1 => None,
            _ => Some(GradientServer::take(group, device.clone())?),
        };
        // Done here, where all ranks are: in backward, each rank runs its ops in an order of its own.
        if let Some(under) = device_under(&device) {
            overlap.reducer.group().tensor_backend(&under)?;
        }
        let presence = Presence::new(overlap.reducer.config().static_graph);
        Ok(Self {
            group: group.clone(),
            overlap,
            device,
            server,
            unheard: false,
            wanted: true,
            all_have_batches: true,
            warned: false,
            fixed: None,
            presence,
        })
    }

    /// Sets whether the program wants averages during backward from now on, and whether all ranks have a batch.
    pub(super) fn want(&mut self, wanted: bool, all_have_batches: bool) {
        self.wanted = wanted;
        self.all_have_batches = all_have_batches;
        if !all_have_batches {
            self.overlap.reducer.set_uneven(true);
        }
        self.listen();
    }

    /// Sets whether backward averages from now on. After a step in which only some ranks had a batch, it does not in the next one,
    /// which takes all ranks through backward.
    fn listen(&mut self) {
        let uneven = self.overlap.reducer.is_uneven();
        let listen = self.wanted && self.all_have_batches && !uneven;
        self.unheard |= !listen;
        if let Some(server) = &mut self.server {
            server.listen(listen);
        }
    }

    /// Waits for the averages, and averages the gradients now if backward did not.
    pub(super) fn average<M: Module>(
        &mut self,
        step: &Step<'_, M>,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, DdpError> {
        let averages = self.averages(step, gradients)?;
        if self.all_have_batches {
            self.overlap.reducer.set_uneven(false);
            self.listen();
        }
        Ok(averages)
    }

    fn averages<M: Module>(
        &mut self,
        step: &Step<'_, M>,
        mut gradients: GradientsParams,
    ) -> Result<GradientsParams, DdpError> {
        let arrivals = step.arrivals(&mut gradients);
        let explain = |error: &DdpError| explain(error, step.trained, &arrivals);
        let taken = self.overlap.taken(&self.device)?;
        // Backward ran once, and averaged all gradients, if there are any.
        let whole = taken
            == Taken {
                passes: gradients.len().min(1),
                gradients: gradients.len(),
                elements: step.elements(&arrivals),
            };
        let heard = !std::mem::take(&mut self.unheard);
        // Compare first: waiting for a bucket that other ranks do not have would be in vain.
        let whole = heard
            && self
                .is_whole(step, &arrivals, whole, taken.gradients)
                .inspect_err(explain)?;
        self.overlap.reducer.finish().inspect_err(explain)?;
        if whole {
            return Ok(gradients);
        }
        if taken.gradients > 0 {
            self.check_repeatable(step.trained)?;
        }
        if heard && self.server.is_some() && !self.warned && !step.is_marked() {
            self.warned = true;
            log::warn!(
                "burn-ddp: gradients are averaged after backward, not during it, since the model's parameters are \
                 not marked; pass it through Ddp::broadcast_parameters, again when a record was loaded"
            );
        }
        // Some or all gradients were computed inside `no_sync`, or while a rank had no batch, or in a second pass over the
        // same parameters. Those that backward did average are equal on all ranks, so that averaging again changes nothing.
        self.average_now(step, gradients)
    }

    /// Checks that averages may be averaged again together with later gradients. Not so with the program's own
    /// hook, which may compute sums, for example.
    fn check_repeatable(&self, trained: &[Signature]) -> Result<(), DdpError> {
        let hook = &self.overlap.reducer.config().hook;
        match is_plain(&**hook, trained) {
            true => Ok(()),
            false => Err(DdpError::InvalidArgument(format!(
                "the hook {hook:?} has averaged a part of these gradients during backward, and would do so again with \
                 the rest of them; run all backward passes of a step inside `Ddp::no_sync`"
            ))),
        }
    }

    /// Whether backward has averaged all gradients of all ranks.
    fn is_whole<M: Module>(
        &mut self,
        step: &Step<'_, M>,
        arrivals: &[u32],
        own: bool,
        submitted: usize,
    ) -> Result<bool, DdpError> {
        if let Some(known) = &self.fixed {
            return match own && known != arrivals {
                true => Err(self.group.abort(NOT_STATIC)),
                false => Ok(own),
            };
        }
        let whole = check_whole(&self.group, step.trained, arrivals, own, submitted)?;
        let promised = self.overlap.reducer.config().static_graph;
        self.fixed = (whole && promised).then(|| arrivals.to_vec());
        Ok(whole)
    }

    /// Averages gradients that have all been computed. They go to the layer as backward's do, so that they
    /// travel in the same way.
    fn average_now<M: Module>(
        &mut self,
        step: &Step<'_, M>,
        mut gradients: GradientsParams,
    ) -> Result<GradientsParams, DdpError> {
        let taken = step.take(&mut gradients)?;
        let present: Vec<u8> = taken.iter().map(|it| it.is_some().into()).collect();
        // A rank that ran backward once more than the others would be alone in this call in a static graph.
        self.presence.tell_again();
        let anywhere = self
            .presence
            .agree(self.overlap.reducer.group(), &present)?;
        let device = self.device.clone().without_autodiff();
        let slots = taken.into_iter().zip(step.trained).zip(anywhere);
        let started: Vec<_> = slots
            .map(|((gradient, Signature { shape, dtype, .. }), anywhere)| {
                let zeros = || Tensor::zeros([shape.num_elements()], (&device, *dtype));
                let gradient = || gradient.unwrap_or_else(zeros);
                (anywhere == 1).then(|| all_reduce(gradient(), ReduceOperation::Mean, Vec::new()))
            })
            .collect();
        // The first one to be resolved sends the last bucket.
        let averages = started
            .into_iter()
            .map(|it| it.map(|it| Gradient::Device(it.resolve().into())));
        let averages: Vec<Option<Gradient>> = averages.collect();
        let taken = self.overlap.taken(&self.device)?;
        self.overlap.reducer.finish()?;
        if taken.gradients != averages.iter().flatten().count() {
            return Err(DdpError::InvalidArgument(format!(
                "the model's device, {device:?}, has not the layer of this `Ddp`'s `Overlap`"
            )));
        }
        step.give(&mut gradients, averages);
        Ok(gradients)
    }

    pub(super) fn timeline(&self) -> Timeline {
        self.overlap.reducer.timeline()
    }

    pub(super) fn stats(&self) -> DdpStats {
        self.overlap.reducer.stats()
    }
}

/// Logs what may have led to different buckets. They travel before a rank knows which gradients it will have,
/// and after the fault the ranks cannot communicate any more.
fn explain(error: &DdpError, trained: &[Signature], arrivals: &[u32]) {
    if !matches!(error, DdpError::Diverged { .. }) {
        return;
    }
    let lacking = trained.iter().zip(arrivals).filter(|(_, it)| **it == 0);
    let lacking: Vec<&str> = lacking.map(|(it, _)| it.path.as_str()).collect();
    log::error!(
        "burn-ddp: this rank has no gradients of {lacking:?}; parameters that only some ranks use, or that the ranks \
         use in another order, need `Ddp::new` instead of `Ddp::overlapped`"
    );
}
