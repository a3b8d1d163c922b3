//! What is gathered of a softmax's logarithms, such as a cross-entropy, and its gradient.

use super::super::call::Call;
use super::{
    is_of_rows,
    role::{Picked, Role},
};
use crate::{LayeredFloat, LayeredTensor};
use burn_backend::{
    DType, FloatDType, TensorMetadata,
    tensor::{FloatTensor, IndexingUpdateOp, IntTensor},
};
use burn_ir::BackendIr;
use std::sync::Arc;

impl<B: BackendIr> Call<B> {
    /// The logarithms of a softmax at indices.
    pub(in crate::ops) fn gathers(
        &mut self,
        x: &LayeredFloat<B>,
        dim: usize,
        indices: &LayeredTensor<IntTensor<B>>,
    ) -> Option<LayeredFloat<B>> {
        let Some(Role::LogSoftmax(of)) = x.role().map(|role| &**role) else {
            return None;
        };
        self.softmaxes(x.storage_dtype())?;
        if !is_of_rows(&indices.shape(), &x.shape()) || dim + 1 != x.shape().num_dims() {
            return None;
        }
        let indices = indices.clone().into_storage();
        let picked = B::float_gather(dim, of.x.clone().into_storage(), indices);
        let picked = match picked.dtype() {
            DType::F32 => picked,
            _ => B::float_cast(picked, FloatDType::F32),
        };
        let [maxima, sums] = of.statistics.get();
        let shifted = B::float_sub(picked, maxima);
        let picked = B::float_sub(shifted, B::float_log(sums));
        Some(self.float(picked))
    }

    /// The gradient of what was gathered, at one index of each row: it waits.
    pub(in crate::ops) fn scatters(
        &mut self,
        [x, value]: [&LayeredFloat<B>; 2],
        dim: usize,
        indices: &LayeredTensor<IntTensor<B>>,
        update: IndexingUpdateOp,
    ) -> Option<LayeredFloat<B>> {
        let zeros = x.role().is_some_and(|role| matches!(**role, Role::Zeros));
        self.softmaxes(x.storage_dtype())?;
        let rows = is_of_rows(&indices.shape(), &x.shape()) && indices.shape() == value.shape();
        let adds = matches!(update, IndexingUpdateOp::Add);
        if !(zeros && rows && adds) || dim + 1 != x.shape().num_dims() {
            return None;
        }
        let indices = indices.clone().into_storage();
        self.role = Some(Arc::new(Role::Picked(Arc::new(Picked {
            gradient: value.alone(),
            indices: indices.clone(),
            shape: x.shape(),
        }))));
        let run = move |mut tensors: Vec<FloatTensor<B>>| {
            let value = tensors.remove(1);
            B::float_scatter(dim, tensors.remove(0), indices.clone(), value, update)
        };
        self.again(&[x, value], Box::new(run));
        self.later()
    }
}
