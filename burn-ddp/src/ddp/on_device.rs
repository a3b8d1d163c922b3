//! Gradients averaged where they are: buckets are made, averaged and taken apart on the device.

use std::{
    slice,
    sync::Arc,
    time::{Duration, Instant},
};

use burn::{
    module::{Module, ModuleMapper, Param},
    optim::GradientsParams,
    tensor::{
        Bool, Device, Int, Tensor,
        kind::{Autodiff, Numeric},
    },
};

use super::{
    CommHook, DdpConfig, DdpStats, Part, Slot, bucketer::layout, gradient::Gradient,
    parameters::Signature, presence::Presence, step::Step,
};
use crate::{Backend, DdpError, Pending, ProcessGroup, ReduceOp, TensorOp};

/// Averages gradients that never leave their device.
pub(super) struct OnDevice {
    group: ProcessGroup,
    device: Device,
    hook: Arc<dyn CommHook>,
    buckets: Vec<Vec<usize>>,
    presence: Presence,
    waited: Duration,
}

impl OnDevice {
    /// For a model whose tensors travel by NCCL, and a hook that NCCL can stand in for.
    pub(super) fn new<M: Module>(
        group: &ProcessGroup,
        config: &DdpConfig,
        trained: &[Signature],
        model: &M,
    ) -> Result<Option<Self>, DdpError> {
        // A model without tensors has nothing to say.
        let Some(device) = model.devices().into_iter().next() else {
            return Ok(None);
        };
        let device = device.without_autodiff();
        let is_plain = |signature: &Signature| config.hook.plain(signature.dtype).is_some();
        let by_nccl = group.tensor_backend(&device)? == Backend::Nccl;
        let usable = by_nccl && trained.iter().all(is_plain);
        Ok(usable.then(|| Self::on(group, config, trained, device)))
    }

    fn on(group: &ProcessGroup, config: &DdpConfig, trained: &[Signature], device: Device) -> Self {
        let slots: Vec<Slot> = trained.iter().map(Signature::slot).collect();
        Self {
            group: group.clone(),
            device,
            hook: config.hook.clone(),
            buckets: layout(&slots, config.sizes()),
            presence: Presence::new(config.static_graph),
            waited: Duration::ZERO,
        }
    }

    /// Averages gradients that are all there.
    pub(super) fn average<M: Module>(
        &mut self,
        step: &Step<'_, M>,
        mut gradients: GradientsParams,
    ) -> Result<GradientsParams, DdpError> {
        let mut taken = step.take(&mut gradients);
        // A gradient that some ranks lack counts as zeros there; one that all lack stays absent.
        let present: Vec<u8> = taken.iter().map(|it| it.is_some().into()).collect();
        let anywhere = self.presence.agree(&self.group, &present)?;

        let mut started = Vec::with_capacity(self.buckets.len());
        for bucket in &self.buckets {
            let members = bucket.iter().copied().filter(|slot| anywhere[*slot] == 1);
            let members: Vec<usize> = members.collect();
            let parts = members.iter().map(|slot| {
                let Signature { shape, dtype, .. } = &step.trained[*slot];
                match taken[*slot].take() {
                    Some(gradient) => gradient.to_device(&self.device),
                    None => Tensor::zeros([shape.num_elements()], (&self.device, *dtype)),
                }
            });
            let parts: Vec<Tensor<1>> = parts.collect();
            if !parts.is_empty() {
                started.push((members, self.start(Tensor::cat(parts, 0))?));
            }
        }
        let start = Instant::now();
        let mut averages = vec![None; step.trained.len()];
        for (members, pending) in started {
            let dtype = step.trained[members[0]].dtype;
            let average = Gradient::Device(pending.wait()?.cast(dtype).into());
            let mut at = 0;
            for slot in members {
                let len = step.trained[slot].shape.num_elements();
                averages[slot] = Some(average.slice(at, len));
                at += len;
            }
        }
        self.waited += start.elapsed();
        step.give(&mut gradients, averages);
        Ok(gradients)
    }

    fn start(&self, bucket: Tensor<1>) -> Result<Pending<Tensor<1>>, DdpError> {
        let dtype = bucket.dtype();
        let carried = self.hook.plain(dtype).expect("the hook was asked before");
        let bucket = bucket.cast(carried);
        self.group
            .collective_async(TensorOp::AllReduce(ReduceOp::Mean), bucket)
    }

    pub(super) fn stats(&self) -> DdpStats {
        DdpStats {
            steps: 0,
            buckets: self.buckets.len(),
            bytes_reduced: self.group.stats().bytes_reduced,
            waited: self.waited,
        }
    }

    /// The model with the tensors of rank 0, or a part of them.
    pub(super) fn broadcast<M: Module>(
        &self,
        model: M,
        signatures: &[Signature],
        part: Part,
    ) -> Result<M, DdpError> {
        let mut receiver = Receiver {
            group: &self.group,
            signatures: signatures.iter(),
            part,
            error: None,
        };
        let model = model.map(&mut receiver);
        receiver.error.map_or(Ok(model), Err)
    }
}

/// Puts rank 0's tensors in the place of others.
struct Receiver<'a> {
    group: &'a ProcessGroup,
    signatures: slice::Iter<'a, Signature>,
    part: Part,
    error: Option<DdpError>,
}

impl Receiver<'_> {
    /// The tensor of rank 0, on this one's device and with its autodiff settings.
    fn receive<const D: usize, K>(&mut self, old: Tensor<D, K>) -> Tensor<D, K>
    where
        K: Numeric + Autodiff + 'static,
    {
        let travels = self.signatures.next().is_some_and(|it| self.part.has(it));
        if !travels || self.error.is_some() {
            return old;
        }
        let strategy = old.gradient_checkpointing_strategy();
        let ours = old.clone().without_autodiff();
        match self.group.collective(TensorOp::Broadcast { root: 0 }, ours) {
            Ok(new) => match strategy {
                Some(strategy) => new
                    .autodiff()
                    .with_gradient_checkpointing_strategy(strategy),
                None => new,
            },
            Err(error) => {
                self.error = Some(error);
                old
            }
        }
    }
}

impl ModuleMapper for Receiver<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let trained = old.is_require_grad();
            let new = self.receive(old);
            match trained {
                true => new.require_grad(),
                false => new,
            }
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|old| self.receive(old))
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        param.map(|old| self.receive(old.int()).bool())
    }
}

#[cfg(test)]
mod tests;
