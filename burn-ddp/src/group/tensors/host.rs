//! Tensors through the host: their elements are read, travel over the group's connections, and are
//! written again.

use burn::tensor::{DType, Shape, Tensor, TensorData, kind::Numeric};

use super::{TensorOp, row, unsupported};
use crate::{DdpError, Element, ProcessGroup, ReduceOp, group::order::Place};

/// Runs code on the elements of tensor data, in their type.
macro_rules! with_elements {
    ($data:expr, |$elements:ident| $body:expr) => {{
        let data = $data;
        macro_rules! typed {
            ($t:ty) => {{
                let read = data.try_into_vec::<$t>();
                let $elements = read.map_err(|error| DdpError::Device(format!("{error:?}")))?;
                $body
            }};
        }
        match data.dtype() {
            DType::F64 => typed!(f64),
            DType::F32 => typed!(f32),
            DType::F16 => typed!(half::f16),
            DType::BF16 => typed!(half::bf16),
            DType::I64 => typed!(i64),
            DType::I32 => typed!(i32),
            DType::I16 => typed!(i16),
            DType::I8 => typed!(i8),
            DType::U64 => typed!(u64),
            DType::U32 => typed!(u32),
            DType::U16 => typed!(u16),
            DType::U8 => typed!(u8),
            other => Err(unsupported(other)),
        }
    }};
}

pub(super) use with_elements;

impl ProcessGroup {
    pub(super) fn through_host<const D: usize, K: Numeric>(
        &self,
        place: Place,
        op: TensorOp,
        tensor: Tensor<D, K>,
    ) -> Result<Tensor<D, K>, DdpError> {
        let (device, dtype) = (tensor.device().without_autodiff(), tensor.dtype());
        let shape = tensor.shape();
        let data = tensor
            .try_into_data()
            .map_err(|error| self.give_up(DdpError::Device(error.to_string())))?;
        with_elements!(data, |elements| {
            let result = self.on_host(place, op, elements, &shape)?;
            let rows = result.len() / row(&shape).max(1);
            let shape = op.result(&shape, std::iter::once(rows), self.world_size());
            let data = TensorData::new(result, shape);
            Ok(Tensor::from_data(data, (&device, dtype)))
        })
    }

    fn on_host<T: Element>(
        &self,
        place: Place,
        op: TensorOp,
        mut data: Vec<T>,
        shape: &Shape,
    ) -> Result<Vec<T>, DdpError> {
        let shapes = std::slice::from_ref(shape);
        let reduction = op.reduction().unwrap_or(ReduceOp::Sum);
        let own = data.len() as u64 * size_of::<T>() as u64;
        let result = self.run_at(
            place,
            (op.kind(), reduction, op.len(shapes), op.root()),
            T::TYPE,
            |call| {
                call.check_shapes(op, shapes)?;
                match op {
                    TensorOp::AllReduce(op) => call.all_reduce(&mut data, op)?,
                    TensorOp::Reduce { op, root } => call.reduce(&mut data, op, root)?,
                    TensorOp::Broadcast { root } => call.broadcast(&mut data, root)?,
                    TensorOp::AllGather => data = call.all_gather_uneven(&data)?.concat(),
                    TensorOp::ReduceScatter(op) => data = call.reduce_scatter(&data, op)?,
                    TensorOp::AllToAll => data = call.all_to_all(&data)?,
                }
                Ok(Some(std::mem::take(&mut data)))
            },
            || None,
        )?;
        self.count(op, own);
        // Alone, everyone's data are one's own.
        Ok(result.unwrap_or(data))
    }
}
