//! Tensors through the host: their elements are read, sent over the group's connections, and uploaded again.

use burn::tensor::{Shape, Tensor, TensorData, kind::Numeric};

use super::{TensorOp, row, with_type};
use crate::{DdpError, Element, ProcessGroup, ReduceOp, group::order::Place};

/// Runs code on the elements of several tensors' data, in their common type. If they cannot be read, the job ends.
macro_rules! with_elements {
    ($group:expr, $data:expr, |$elements:ident| $body:expr) => {{
        let data: Vec<TensorData> = $data;
        with_type!(data[0].dtype(), T => {
            let read = data.into_iter().map(TensorData::try_into_vec::<T>);
            let read: Result<Vec<Vec<T>>, _> = read.collect();
            let $elements = read.map_err(|error| $group.give_up(error.into()))?;
            $body
        })
    }};
}

pub(super) use with_elements;

impl ProcessGroup {
    /// Makes a call over tensors of one type and device, at least one. If `place` is `None`, it takes one after
    /// the tensors were read, because computing them may involve calls too.
    pub(super) fn through_host<const D: usize, K: Numeric>(
        &self,
        place: Option<Place>,
        op: TensorOp,
        tensors: Vec<Tensor<D, K>>,
    ) -> Result<Vec<Tensor<D, K>>, DdpError> {
        let device = tensors[0].device().without_autodiff();
        let dtype = tensors[0].dtype();
        let shapes: Vec<Shape> = tensors.iter().map(|tensor| tensor.shape()).collect();
        // The caller of an asynchronous call goes on. CubeCL's devices read elements when they are first used, and until
        // then no op on a clone of a tensor may work in place.
        let kept = place.is_some().then(|| tensors.clone());
        let data: Result<Vec<TensorData>, _> =
            tensors.into_iter().map(Tensor::try_into_data).collect();
        let data = data.map_err(|error| self.give_up(error.into()))?;
        with_elements!(self, data, |elements| {
            drop(kept);
            let place = place.unwrap_or_else(|| self.inner.order.take());
            let results = self.on_host(place, op, elements, &shapes)?;
            let results = results.into_iter().zip(&shapes).map(|(result, shape)| {
                let rows = result.len() / row(shape).max(1);
                let shape = op.result(shape, std::iter::once(rows), self.world_size());
                Tensor::from_data(TensorData::new(result, shape), (&device, dtype))
            });
            Ok(results.collect())
        })
    }

    fn on_host<T: Element>(
        &self,
        place: Place,
        op: TensorOp,
        mut tensors: Vec<Vec<T>>,
        shapes: &[Shape],
    ) -> Result<Vec<Vec<T>>, DdpError> {
        let reduction = op.reduction().unwrap_or(ReduceOp::Sum);
        let own: usize = tensors.iter().map(|tensor| size_of_val(&tensor[..])).sum();
        // With one rank, each result is the rank's own data.
        self.run_at(
            place,
            (op.kind(), reduction, op.len(shapes), op.root()),
            T::TYPE,
            |call| {
                call.check_shapes(op, shapes)?;
                tensors.iter_mut().try_for_each(|data| {
                    match op {
                        TensorOp::AllReduce(op) => call.all_reduce(data, op)?,
                        TensorOp::Reduce { op, root } => call.reduce(data, op, root)?,
                        TensorOp::Broadcast { root } => call.broadcast(data, root)?,
                        TensorOp::AllGather => *data = call.all_gather_uneven(data)?.concat(),
                        TensorOp::ReduceScatter(op) => *data = call.reduce_scatter(data, op)?,
                        TensorOp::AllToAll => *data = call.all_to_all(data)?,
                    }
                    Ok(())
                })
            },
            || (),
        )?;
        self.count(op, own as u64);
        Ok(tensors)
    }
}
