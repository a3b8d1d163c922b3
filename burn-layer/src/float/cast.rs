//! Casts of a float tensor, and the copies in other dtypes that it keeps.

use super::LayeredFloat;
use crate::{Cast, ops::kernel_end::alone_in_kernel, recent::GiveUp};
use burn_backend::{Backend, DType, Shape, TensorMetadata, tensor::FloatTensor};
use std::sync::Arc;

impl<B: Backend> LayeredFloat<B> {
    /// The copy in another dtype, if there is one.
    pub(crate) fn copy(&self) -> Option<(DType, FloatTensor<B>)> {
        let (dtype, copy) = self.copied.lock().clone()?;
        Some((dtype, in_shape::<B>(copy, self.shape())))
    }

    /// The tensor in `dtype`, or as it is stored for `None`, without keeping a copy.
    pub(crate) fn in_dtype(&self, dtype: Option<DType>) -> FloatTensor<B> {
        let from = self.storage_dtype();
        match dtype.filter(|dtype| *dtype != from) {
            Some(to) => {
                let source = self.source.clone();
                source.cast(&self.layer, to, |stored| {
                    self.layer().cast(Cast {
                        from,
                        to,
                        elements: self.shape().num_elements(),
                        saved: false,
                    });
                    B::float_cast(stored, to.into())
                })
            }
            None => self.clone().into_storage(),
        }
    }

    /// The tensor of the backend underneath, as it is stored.
    pub fn into_storage(self) -> FloatTensor<B> {
        self.source.get(&self.layer)
    }

    /// The tensor of the backend underneath in the dtype that it was computed in, which may be narrower than the one it is stored in.
    pub(crate) fn into_computed(self) -> FloatTensor<B> {
        let exact = self.exact().cloned();
        exact.unwrap_or_else(|| self.into_storage())
    }

    /// The tensor of the backend underneath in `dtype`. Uses an earlier cast of the same tensor if there
    /// is one.
    pub fn into_dtype(self, dtype: DType) -> FloatTensor<B> {
        self.cast(dtype, true)
    }

    /// The same, but keeps no copy. This is for ops that are wide only inside: a backend that fuses ops does not write a copy
    /// that nobody keeps.
    pub(crate) fn into_dtype_once(self, dtype: DType) -> FloatTensor<B> {
        self.cast(dtype, false)
    }

    fn cast(self, dtype: DType, keep: bool) -> FloatTensor<B> {
        let from = self.storage_dtype();
        if from == dtype {
            return self.into_storage();
        }
        let cast = Cast {
            from,
            to: dtype,
            elements: self.shape().num_elements(),
            saved: false,
        };
        // The last holder has no use for a copy beyond this op.
        let is_shared = keep && Arc::strong_count(&self.copied) > 1;
        // A tensor that can be computed again gives up its wider elements below, so that only the narrower copy takes memory.
        let narrower = dtype.size() < from.size();
        let of_parameter = narrower && !self.computed && !self.gradient;
        let lasts = narrower && (!self.computed || self.recomputed().is_some());
        let copied = self.copied.clone();
        let layer = self.layer().clone();
        let copy = copied.lock().clone();
        let exact = self.exact().cloned();
        let copy = copy.or_else(|| exact.map(|exact| (exact.dtype(), exact)));
        if let Some((at, tensor)) = copy
            && at == dtype
        {
            layer.cast(Cast {
                saved: true,
                ..cast
            });
            return in_shape::<B>(tensor, self.shape());
        }
        let value = self.value().cloned();
        let tensor = self.source.cast(&layer, dtype, |stored| {
            layer.cast(cast);
            if let Some(value) = value.filter(|_| is_shared && lasts) {
                // The copy is all that products need.
                value.give_up();
            }
            B::float_cast(stored, dtype.into())
        });
        // The next ops of the network use the copy, and none of them goes on in its kernel.
        let tensor = match is_shared && of_parameter && layer.is_fused() {
            true => alone_in_kernel::<B>(tensor),
            false => tensor,
        };
        if is_shared {
            *copied.lock() = Some((dtype, tensor.clone()));
            if !lasts {
                layer.keep_for_now(&copied);
            }
        }
        tensor
    }

    /// The tensor of the backend underneath in the dtype that the program sees.
    pub fn into_nominal(self) -> FloatTensor<B> {
        let nominal = self.nominal;
        self.into_dtype(nominal)
    }
}

fn in_shape<B: Backend>(tensor: FloatTensor<B>, shape: Shape) -> FloatTensor<B> {
    if tensor.shape() == shape {
        return tensor;
    }
    B::float_reshape(tensor, shape)
}
