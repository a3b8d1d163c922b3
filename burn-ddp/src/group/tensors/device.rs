//! Collective calls and messages by NCCL: tensors never leave the device.

use std::iter;

use burn::tensor::Shape;

use super::{TensorOp, row};
use crate::{
    Call, DdpError, ElementType, ProcessGroup, ReduceOp,
    collective::Collective,
    group::order::Place,
    nccl::{Errand, Link, Resident, on_wire, run},
};

impl TensorOp {
    /// The shape of the memory to allocate for a rank's result before the call. `None` if the result takes the
    /// place of the rank's own elements, or for an all-gather, where the ranks must meet before the shape is known.
    pub(super) fn room(self, own: &Shape, rank: usize, ranks: usize) -> Option<Shape> {
        let known = self != Self::AllGather && !Errand::All(self).stays(rank);
        known.then(|| self.result(own, iter::empty(), ranks))
    }
}

impl ProcessGroup {
    pub(super) fn by_nccl<T: Resident>(
        &self,
        place: Place,
        op: TensorOp,
        link: &Link,
        sources: Vec<T>,
        dtype: ElementType,
    ) -> Result<Vec<T>, DdpError> {
        let wire = on_wire(dtype, op.reduction().is_some()).expect("it was asked for before");
        let shapes: Vec<Shape> = sources.iter().map(Resident::shape).collect();
        let len = op.len(&shapes);
        let reduction = op.reduction().unwrap_or(ReduceOp::Sum);
        let results = self.run_at(
            place,
            (op.kind(), reduction, len, op.root()),
            dtype,
            |call| {
                let call = call.by_nccl();
                // Whatever happens now, all ranks are in the same call.
                let lens = lens(&call, op, &shapes)?;
                let results = shapes.iter().zip(&lens).map(|(shape, lens)| {
                    let rows = lens.iter().map(|len| len / row(shape).max(1));
                    op.result(shape, rows, call.world_size)
                });
                let results = results.collect();
                run(link, &call, Errand::All(op), wire, sources, &lens, results)
                    .map_err(|error| self.give_up(error))
            },
            || unreachable!("NCCL is for several ranks"),
        )?;
        self.count(op, wire.bytes(len) as u64);
        Ok(results)
    }

    pub(super) fn message_by_nccl<T: Resident>(
        &self,
        source: T,
        dtype: ElementType,
        peer: usize,
        sends: bool,
        link: &Link,
    ) -> Result<T, DdpError> {
        let shape = source.shape();
        let wire = on_wire(dtype, false).expect("every type can be moved");
        let (_turn, call) = self.message_call(dtype, shape.num_elements(), peer, sends)?;
        let call = call.by_nccl();
        // NCCL is entered once both ranks are in the call. The answer has another `root`, so that a message
        // from a peer that also sends is not taken for an answer.
        let answer = Collective {
            call: Call {
                root: 1,
                ..call.call
            },
            ..call
        };
        let errand = match sends {
            true => {
                call.send_shape(&shape, peer)?;
                answer.receive::<u8>(&mut [], peer)?;
                Errand::Send { to: peer }
            }
            false => {
                call.receive_shape(&shape, peer)?;
                answer.send::<u8>(&[], peer)?;
                Errand::Receive { from: peer }
            }
        };
        let lens = [vec![shape.num_elements(); call.world_size]];
        let result = run(link, &call, errand, wire, vec![source], &lens, vec![shape]);
        let mut result = result.map_err(|error| self.give_up(error))?;
        Ok(result.pop().expect("one for one"))
    }
}

/// The number of elements that each rank contributes to each tensor. The ranks meet here, and check that their shapes match.
fn lens(
    call: &Collective<'_>,
    op: TensorOp,
    shapes: &[Shape],
) -> Result<Vec<Vec<usize>>, DdpError> {
    call.check_shapes(op, shapes)?;
    let own = shapes.iter().map(Shape::num_elements);
    if op != TensorOp::AllGather {
        return Ok(own.map(|len| vec![len; call.world_size]).collect());
    }
    let own: Vec<u64> = own.map(|len| len as u64).collect();
    let all = call.all_gather_direct(&own)?;
    let of = |tensor: usize| {
        let lens = all.iter().skip(tensor).step_by(own.len());
        lens.map(|len| *len as usize).collect()
    };
    Ok((0..own.len()).map(of).collect())
}

#[cfg(test)]
mod tests;
