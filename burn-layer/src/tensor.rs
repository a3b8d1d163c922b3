//! [`LayeredTensor`]: the other tensors of a layered backend.

use crate::{LayerSet, LayeredDevice, LayeredFloat, float::Origin, held::Held};
use burn_backend::{Backend, DType, Shape, TensorMetadata};
use core::fmt;
use std::sync::Arc;

/// An int, bool or quantized tensor of a layered backend.
#[derive(Clone)]
pub struct LayeredTensor<P> {
    primitive: P,
    /// Shared by all clones of the tensor, which are recognized by it.
    identity: Arc<()>,
    /// If this is a mask of the elements of a float tensor that are not above 0: that one.
    not_positive_of: Option<Origin>,
    layer: Held,
}

impl<P> LayeredTensor<P> {
    pub(crate) fn new(primitive: P, layer: Arc<LayerSet>) -> Self {
        Self {
            primitive,
            identity: Arc::new(()),
            not_positive_of: None,
            layer: Held::new(layer),
        }
    }

    pub(crate) fn layer(&self) -> &Arc<LayerSet> {
        &self.layer
    }

    /// A number that the clones of a tensor share while one of them lives.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.identity) as usize
    }

    pub(crate) fn with_not_positive_of(self, not_positive_of: Option<Origin>) -> Self {
        Self {
            not_positive_of,
            ..self
        }
    }

    /// Whether this is a mask of the elements of `tensor` that are not above 0.
    pub(crate) fn is_not_positive_of<B: Backend>(&self, tensor: &LayeredFloat<B>) -> bool {
        let of = self.not_positive_of.as_ref();
        of.is_some_and(|of| of.as_ptr() as usize == tensor.identity())
    }

    /// The tensor of the backend underneath.
    pub fn into_storage(self) -> P {
        self.primitive
    }
}

impl<P: fmt::Debug> fmt::Debug for LayeredTensor<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LayeredTensor")
            .field(&self.primitive)
            .finish()
    }
}

impl<P: TensorMetadata> TensorMetadata for LayeredTensor<P> {
    type Device = LayeredDevice<P::Device>;

    fn dtype(&self) -> DType {
        self.primitive.dtype()
    }

    fn shape(&self) -> Shape {
        self.primitive.shape()
    }

    fn device(&self) -> Self::Device {
        LayeredDevice::with_shared(self.primitive.device(), self.layer().clone())
    }

    fn can_mut(&self) -> bool {
        self.primitive.can_mut()
    }
}
