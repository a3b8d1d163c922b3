//! Gradients averaged where they are: buckets are made, averaged and taken apart on the device.

use std::{
    collections::HashMap,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{
        Bool, Device, Int, Tensor,
        kind::{Autodiff, Numeric},
    },
};

use super::{CommHook, DdpConfig, Slot, bucketer::layout, parameters::Signature};
use crate::{Backend, DdpError, Pending, ProcessGroup, ReduceOp, TensorOp};

/// Averages gradients that never leave their device.
pub(super) struct OnDevice {
    group: ProcessGroup,
    device: Device,
    hook: Arc<dyn CommHook>,
    buckets: Vec<Range<usize>>,
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
            waited: Duration::ZERO,
        }
    }

    /// Averages gradients that are all there, and multiplies the averages by `factor`.
    pub(super) fn average<M: Module>(
        &mut self,
        trained: &[Signature],
        slots: &HashMap<ParamId, usize>,
        gradients: GradientsParams,
        model: &M,
        factor: f64,
    ) -> Result<GradientsParams, DdpError> {
        let mut taker = Taker {
            slots,
            device: &self.device,
            gradients,
            taken: trained.iter().map(|_| None).collect(),
        };
        model.visit(&mut taker);
        let Taker {
            gradients,
            mut taken,
            ..
        } = taker;
        // A gradient that some ranks lack counts as zeros there; one that all lack stays absent.
        let mut present: Vec<u8> = taken.iter().map(|it| it.is_some().into()).collect();
        self.group.all_reduce(&mut present, ReduceOp::Max)?;

        let started: Result<Vec<_>, DdpError> = self
            .buckets
            .iter()
            .map(|bucket| {
                let members = bucket.clone().filter(|slot| present[*slot] == 1);
                let members: Vec<usize> = members.collect();
                let parts = members.iter().map(|slot| {
                    let Signature { shape, dtype, .. } = &trained[*slot];
                    let zeros = || Tensor::zeros([shape.num_elements()], (&self.device, *dtype));
                    taken[*slot].take().unwrap_or_else(zeros)
                });
                let parts: Vec<Tensor<1>> = parts.collect();
                Ok(match parts.is_empty() {
                    true => None,
                    false => Some((members, self.start(Tensor::cat(parts, 0))?)),
                })
            })
            .collect();
        let start = Instant::now();
        let mut averages: Vec<Option<Tensor<1>>> = trained.iter().map(|_| None).collect();
        for (members, pending) in started?.into_iter().flatten() {
            let dtype = trained[members[0]].dtype;
            let mut average = pending.wait()?.cast(dtype);
            if factor != 1.0 {
                average = average.mul_scalar(factor);
            }
            let mut at = 0;
            for slot in members {
                let len = trained[slot].shape.num_elements();
                averages[slot] = Some(average.clone().slice(at..at + len));
                at += len;
            }
        }
        self.waited += start.elapsed();
        let mut giver = Giver {
            slots,
            trained,
            gradients,
            averages,
        };
        model.visit(&mut giver);
        Ok(giver.gradients)
    }

    fn start(&self, bucket: Tensor<1>) -> Result<Pending<Tensor<1>>, DdpError> {
        let dtype = bucket.dtype();
        let carried = self.hook.plain(dtype).expect("the hook was asked before");
        let bucket = bucket.cast(carried);
        self.group
            .collective_async(TensorOp::AllReduce(ReduceOp::Mean), bucket)
    }

    /// The time spent waiting for averages so far.
    pub(super) fn waited(&self) -> Duration {
        self.waited
    }

    /// The number of buckets.
    pub(super) fn buckets(&self) -> usize {
        self.buckets.len()
    }

    pub(super) fn bytes_reduced(&self) -> u64 {
        self.group.stats().bytes_reduced
    }

    /// The model with the tensors of rank 0.
    pub(super) fn broadcast<M: Module>(&self, model: M) -> Result<M, DdpError> {
        let mut receiver = Receiver {
            group: &self.group,
            error: None,
        };
        let model = model.map(&mut receiver);
        receiver.error.map_or(Ok(model), Err)
    }
}

/// Takes the gradients out, flat.
struct Taker<'a> {
    slots: &'a HashMap<ParamId, usize>,
    device: &'a Device,
    gradients: GradientsParams,
    taken: Vec<Option<Tensor<1>>>,
}

impl ModuleVisitor for Taker<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let len = gradient.shape().num_elements();
            self.taken[*slot] = Some(gradient.to_device(self.device).reshape([len]));
        }
    }
}

/// Puts the averages in, in their shapes.
struct Giver<'a> {
    slots: &'a HashMap<ParamId, usize>,
    trained: &'a [Signature],
    gradients: GradientsParams,
    averages: Vec<Option<Tensor<1>>>,
}

impl ModuleVisitor for Giver<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        if let Some(average) = self.averages[*slot].take() {
            let device = param.base().device().without_autodiff();
            let gradient = average.reshape::<D, _>(self.trained[*slot].shape.clone());
            self.gradients
                .register(param.id, gradient.to_device(&device));
        }
    }
}

/// Puts rank 0's tensors in the place of others.
struct Receiver<'a> {
    group: &'a ProcessGroup,
    error: Option<DdpError>,
}

impl Receiver<'_> {
    /// The tensor of rank 0, on this one's device and with its autodiff settings.
    fn receive<const D: usize, K>(&mut self, old: Tensor<D, K>) -> Tensor<D, K>
    where
        K: Numeric + Autodiff + 'static,
    {
        if self.error.is_some() {
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
