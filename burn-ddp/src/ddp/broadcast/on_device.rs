//! The same with a separate call for each tensor, so that no tensor leaves its device.

use std::any::Any;

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{
        Bool, Int, Tensor,
        kind::{Autodiff, Numeric},
    },
};

use super::{CHUNK, Part, Places, chunks};
use crate::{DdpError, ProcessGroup, TensorOp, ddp::parameters::Signature};

/// Replaces the tensors of a model, or a part of them, by those of rank 0.
pub(in crate::ddp) fn broadcast<M: Module>(
    group: &ProcessGroup,
    model: M,
    signatures: &[Signature],
    part: Part,
) -> Result<M, DdpError> {
    in_chunks(group, model, signatures, part, CHUNK)
}

/// The same, with two copies of at most `limit` bytes of the model, or of one larger tensor, at a time.
pub(super) fn in_chunks<M: Module>(
    group: &ProcessGroup,
    mut model: M,
    signatures: &[Signature],
    part: Part,
    limit: usize,
) -> Result<M, DdpError> {
    let sizes: Vec<usize> = signatures.iter().map(|it| part.bytes(it)).collect();
    for chunk in chunks(&sizes, limit) {
        let mut sender = Sender {
            places: Places::new(&sizes, chunk.clone()),
            calls: Vec::new(),
        };
        model.visit(&mut sender);
        // No waiting for other ranks while the model is visited: see `super::in_chunks`.
        let received = sender.calls.into_iter().map(|call| call(group));
        let received = received.collect::<Result<Vec<_>, _>>()?;
        model = model.map(&mut Receiver {
            places: Places::new(&sizes, chunk),
            received: received.into_iter(),
        });
    }
    Ok(model)
}

/// A call that returns the tensor of rank 0.
type Call = Box<dyn FnOnce(&ProcessGroup) -> Result<Box<dyn Any>, DdpError>>;

/// Collects the calls for the tensors of a chunk.
struct Sender<'a> {
    places: Places<'a>,
    calls: Vec<Call>,
}

impl Sender<'_> {
    fn add<const D: usize, K>(&mut self, own: impl FnOnce() -> Tensor<D, K>)
    where
        K: Numeric + Autodiff + 'static,
    {
        if self.places.next().is_some() {
            let own = own().without_autodiff();
            self.calls.push(Box::new(move |group| {
                let received = group.collective(TensorOp::Broadcast { root: 0 }, own)?;
                Ok(Box::new(received))
            }));
        }
    }
}

impl ModuleVisitor for Sender<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(|| param.base());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(|| param.base());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(|| param.base().int());
    }
}

/// Replaces tensors by those of rank 0.
struct Receiver<'a> {
    places: Places<'a>,
    received: std::vec::IntoIter<Box<dyn Any>>,
}

impl Receiver<'_> {
    /// Rank 0's version of the next tensor, if it is in this chunk.
    fn next<const D: usize, K: Numeric + 'static>(&mut self) -> Option<Tensor<D, K>> {
        self.places.next()?;
        let received = self.received.next().expect("one for each that travels");
        Some(*received.downcast().expect("the same order"))
    }
}

/// `new` with the autodiff settings of `old`.
fn in_place_of<const D: usize, K: Numeric + Autodiff>(
    old: &Tensor<D, K>,
    new: Tensor<D, K>,
) -> Tensor<D, K> {
    match old.gradient_checkpointing_strategy() {
        Some(strategy) => new
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
        None => new,
    }
}

impl ModuleMapper for Receiver<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(new) = self.next() else { return param };
        param.map(|old| {
            let new = in_place_of(&old, new);
            match old.is_require_grad() {
                true => new.require_grad(),
                false => new,
            }
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.next() {
            Some(new) => param.map(|old| in_place_of(&old, new)),
            None => param,
        }
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        match self.next::<D, Int>() {
            Some(new) => param.map(|old| in_place_of(&old.int(), new).bool()),
            None => param,
        }
    }
}
