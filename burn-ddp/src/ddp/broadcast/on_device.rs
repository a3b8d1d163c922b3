//! The same, each tensor by a call of its own: none leaves its device.

use std::slice;

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{
        Bool, Int, Tensor,
        kind::{Autodiff, Numeric},
    },
};

use super::Part;
use crate::{DdpError, ProcessGroup, TensorOp, ddp::parameters::Signature};

/// The model with the tensors of rank 0, or a part of them.
pub(in crate::ddp) fn broadcast<M: Module>(
    group: &ProcessGroup,
    model: M,
    signatures: &[Signature],
    part: Part,
) -> Result<M, DdpError> {
    let mut receiver = Receiver {
        group,
        signatures: signatures.iter(),
        part,
        error: None,
    };
    let model = model.map(&mut receiver);
    receiver.error.map_or(Ok(model), Err)
}

/// Puts rank 0's tensors in the place of others.
struct Receiver<'a> {
    group: &'a ProcessGroup,
    signatures: slice::Iter<'a, Signature>,
    part: Part,
    error: Option<DdpError>,
}

impl Receiver<'_> {
    /// Whether the next tensor travels.
    fn next(&mut self) -> bool {
        let next = self.signatures.next();
        self.error.is_none() && next.is_some_and(|it| self.part.bytes(it) > 0)
    }

    /// The tensor of rank 0, on this one's device and with its autodiff settings.
    fn receive<const D: usize, K>(&mut self, old: Tensor<D, K>) -> Tensor<D, K>
    where
        K: Numeric + Autodiff + 'static,
    {
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
        if !self.next() {
            return param;
        }
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
        match self.next() {
            true => param.map(|old| self.receive(old)),
            false => param,
        }
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        match self.next() {
            true => param.map(|old| self.receive(old.int()).bool()),
            false => param,
        }
    }
}
