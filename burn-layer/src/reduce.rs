//! What a layer that reduces gradients is given and what it returns.

use burn_backend::{Backend, tensor::FloatTensor};
use burn_backend::{DType, ExecutionError, Shape, TensorData, TensorMetadata};
use core::{any::Any, fmt};
use std::sync::Arc;

/// A float tensor of the backend underneath, whichever that is.
#[derive(Clone, Copy)]
pub struct FloatView<'a>(&'a dyn Float);

trait Float {
    fn dtype(&self) -> DType;
    fn shape(&self) -> Shape;
    fn read(&self) -> Result<TensorData, ExecutionError>;
    fn is_finite(&self) -> Result<bool, ExecutionError>;
    fn primitive(&self) -> &dyn Any;
}

/// The tensor of one backend behind a [`FloatView`].
pub(crate) struct Viewed<B: Backend>(pub(crate) FloatTensor<B>);

impl<B: Backend> Viewed<B> {
    pub(crate) fn view(&self) -> FloatView<'_> {
        FloatView(self)
    }
}

impl<B: Backend> Float for Viewed<B> {
    fn dtype(&self) -> DType {
        self.0.dtype()
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn read(&self) -> Result<TensorData, ExecutionError> {
        burn_std::reader::try_read_sync(B::float_into_data(self.0.clone())).unwrap_or_else(|| {
            Err(ExecutionError::generic(
                "this platform cannot wait for a tensor to be read",
            ))
        })
    }

    fn is_finite(&self) -> Result<bool, ExecutionError> {
        // 0 times an infinity or a NaN is NaN, and a NaN stays in a sum.
        let zeros = B::float_mul_scalar(self.0.clone(), 0.0.into());
        let sum = Self(B::float_sum(zeros)).read()?;
        Ok(sum.iter::<f32>().all(f32::is_finite))
    }

    fn primitive(&self) -> &dyn Any {
        &self.0
    }
}

impl FloatView<'_> {
    /// The dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.0.dtype()
    }

    /// The shape.
    pub fn shape(&self) -> Shape {
        self.0.shape()
    }

    /// The elements. Waits until the device has computed them.
    ///
    /// # Errors
    ///
    /// When the device failed to compute them.
    pub fn read(&self) -> Result<TensorData, ExecutionError> {
        self.0.read()
    }

    /// Whether no element is infinite or NaN. Computed on the device; one number is read.
    ///
    /// # Errors
    ///
    /// When the device failed to compute the elements.
    pub fn is_finite(&self) -> Result<bool, ExecutionError> {
        self.0.is_finite()
    }

    /// The primitive of the backend, for layers that know the backend: `P` is the
    /// [`FloatTensorPrimitive`](burn_backend::BackendTypes::FloatTensorPrimitive) of the plain
    /// backend underneath.
    pub fn downcast_ref<P: 'static>(&self) -> Option<&P> {
        self.0.primitive().downcast_ref()
    }
}

impl fmt::Debug for FloatView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} tensor of {:?}", self.dtype(), self.shape())
    }
}

/// The result of [`Layer::all_reduce`](crate::Layer::all_reduce).
#[derive(Clone)]
pub enum Reduced {
    /// The reduced elements.
    Ready(TensorData),
    /// The reduction is under way. The first op that needs the elements calls this function, once, and waits for them.
    Deferred(Arc<dyn Fn() -> TensorData + Send + Sync>),
    /// The same, but the function returns a tensor that never left the device: the
    /// [`FloatTensorPrimitive`](burn_backend::BackendTypes::FloatTensorPrimitive) of the plain backend
    /// underneath, with the shape and dtype of the tensor that was given.
    DeferredPrimitive(Arc<dyn Fn() -> Box<dyn Any> + Send + Sync>),
}

impl fmt::Debug for Reduced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready(_) => "Ready",
            Self::Deferred(_) => "Deferred",
            Self::DeferredPrimitive(_) => "DeferredPrimitive",
        })
    }
}
