//! [`Source`]: where the elements of a float tensor are.

use crate::{LayerSet, deferred::Deferred, recompute::Recomputed, view::View};
use burn_backend::{DType, Shape, TensorMetadata};
use core::fmt;
use std::sync::Arc;

/// Where the elements of a float tensor are.
#[derive(Clone, Debug)]
pub(crate) enum Source<P: TensorMetadata> {
    Ready(P),
    /// Elements that may not be there yet, with their shape, dtype and device, which are known in any case.
    Later(Later<P>, (Shape, DType), P::Device),
}

/// Elements that may have to be waited for, computed again, viewed or cast.
#[derive(Clone, Debug)]
pub(crate) enum Later<P: TensorMetadata> {
    Deferred(Deferred<P>),
    Recomputed(Arc<Recomputed<P>>),
    View(Arc<View<P>>),
    Widened(Widened<P>),
}

/// Elements in a wider dtype than they were computed in. They are cast wherever they are needed: a backend that fuses ops casts them
/// in the kernel that reads them, and does not write them.
#[derive(Clone)]
pub(crate) struct Widened<P> {
    pub(crate) narrow: P,
    pub(crate) widen: fn(P, &LayerSet, DType) -> P,
}

impl<P: TensorMetadata> fmt::Debug for Widened<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Widened")
            .field("from", &self.narrow.dtype())
            .finish()
    }
}

impl<P: TensorMetadata + 'static> Source<P> {
    pub(crate) fn shape(&self) -> Shape {
        match self {
            Self::Ready(tensor) => tensor.shape(),
            Self::Later(_, (shape, _), _) => shape.clone(),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Ready(tensor) => tensor.dtype(),
            Self::Later(_, (_, dtype), _) => *dtype,
        }
    }

    pub(crate) fn device(&self) -> P::Device {
        match self {
            Self::Ready(tensor) => tensor.device(),
            Self::Later(_, _, device) => device.clone(),
        }
    }

    /// The value that can be computed again, if the elements are one.
    pub(crate) fn value(&self) -> Option<&Arc<Recomputed<P>>> {
        match self {
            Self::Later(Later::Recomputed(value), ..) => Some(value),
            _ => None,
        }
    }

    /// The length of the chain of tensors that are computed from each other to compute this one again. `None` if it never has to
    /// be.
    pub(crate) fn depth(&self) -> Option<usize> {
        self.value().map(|value| value.depth)
    }

    /// The elements in the narrower dtype that they were computed in, if they are cast where they are needed.
    pub(crate) fn narrow(&self) -> Option<&P> {
        match self {
            Self::Later(Later::Widened(widened), ..) => Some(&widened.narrow),
            _ => None,
        }
    }

    /// The elements. Waits for them or computes them again if need be.
    pub(crate) fn get(self, layer: &LayerSet) -> P {
        match self {
            Self::Ready(tensor) => tensor,
            Self::Later(Later::Deferred(value), ..) => value.wait(),
            Self::Later(Later::Recomputed(value), ..) => value.get(layer),
            Self::Later(Later::View(view), ..) => view.get(),
            Self::Later(Later::Widened(Widened { narrow, widen }), (_, dtype), _) => {
                widen(narrow, layer, dtype)
            }
        }
    }

    /// The elements in `dtype`, to which `cast` casts them. A view is taken after the cast.
    pub(crate) fn cast(self, layer: &LayerSet, dtype: DType, cast: impl FnOnce(P) -> P) -> P {
        match self {
            Self::Later(Later::View(view), ..) => view.cast(cast),
            Self::Later(Later::Widened(widened), ..) if widened.narrow.dtype() == dtype => {
                widened.narrow
            }
            Self::Later(Later::Recomputed(value), ..) => match value.viewed_in(dtype) {
                Some(view) => view,
                None => cast(value.get(layer)),
            },
            other => cast(other.get(layer)),
        }
    }
}
