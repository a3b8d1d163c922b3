//! A gradient, or a bucket of them, on the host or on its device.

use std::sync::Arc;

use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use burn_layer::{FloatView, Reduced};

use super::Values;
use crate::{DdpError, group::Location};

/// The numbers of a gradient or bucket.
#[derive(Clone, Debug)]
pub(super) enum Gradient {
    Host(Values),
    Device(Box<Tensor<1>>),
}

impl Gradient {
    /// The gradient behind a view. It stays on its device if `stays`.
    pub(super) fn of_view(view: FloatView<'_>, stays: bool) -> Result<Self, DdpError> {
        #[cfg(feature = "nccl")]
        if stays && let Some(tensor) = crate::nccl::view_tensor(view) {
            return Ok(Self::Device(tensor.into()));
        }
        let _ = stays;
        let read = view.read();
        let data = read.map_err(|error| DdpError::Device(error.to_string()))?;
        Values::from_data(data).map(Self::Host)
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device(tensor) => tensor.shape().num_elements(),
        }
    }

    pub(super) fn dtype(&self) -> DType {
        match self {
            Self::Host(values) => values.dtype(),
            Self::Device(tensor) => tensor.dtype(),
        }
    }

    pub(super) fn is_on_device(&self) -> bool {
        matches!(self, Self::Device(_))
    }

    /// Concatenates gradients: at least one, all in the same place and of the same type.
    pub(super) fn join(parts: Vec<Self>, dtype: DType) -> Self {
        let len = parts.iter().map(Self::len).sum();
        let mut values = None;
        let mut tensors = Vec::new();
        let mut at = 0;
        for part in parts {
            let width = part.len();
            match part {
                Self::Device(part) => tensors.push(*part),
                Self::Host(part) => values
                    .get_or_insert_with(|| Values::zeros(len, dtype).expect("gradients are floats"))
                    .put(at, &part),
            }
            at += width;
        }
        match values {
            Some(values) => Self::Host(values),
            None => Self::Device(Tensor::cat(tensors, 0).into()),
        }
    }

    /// A part of the numbers.
    pub(super) fn slice(&self, at: usize, len: usize) -> Self {
        match self {
            Self::Host(values) => Self::Host(values.slice(at, len)),
            Self::Device(tensor) => {
                Self::Device(tensor.as_ref().clone().slice(at..at + len).into())
            }
        }
    }

    /// All numbers multiplied by a factor.
    pub(super) fn scaled(self, factor: f64) -> Self {
        match self {
            same if factor == 1.0 => same,
            Self::Host(mut values) => {
                values.scale(factor);
                Self::Host(values)
            }
            Self::Device(tensor) => Self::Device(tensor.mul_scalar(factor).into()),
        }
    }

    /// A tensor with this shape and type.
    pub(super) fn into_tensor<const D: usize>(
        self,
        shape: Shape,
        dtype: DType,
        device: &Device,
    ) -> Tensor<D> {
        match self {
            Self::Host(values) => {
                Tensor::from_data(values.into_data(shape, dtype), (device, dtype))
            }
            Self::Device(tensor) => tensor.reshape(shape).to_device(device),
        }
    }

    /// Returns a function that creates zeros of the same size, type and place.
    pub(super) fn zeros(&self) -> impl Fn() -> Self + Send + Sync + use<> {
        let (len, dtype, device) = match self {
            Self::Host(values) => (values.len(), values.dtype(), None),
            Self::Device(tensor) => (self.len(), tensor.dtype(), Some(tensor.device())),
        };
        move || match &device {
            None => Self::Host(Values::zeros(len, dtype).expect("gradients are floats")),
            Some(device) => Self::Device(Tensor::zeros([len], (device, dtype)).into()),
        }
    }

    /// The result that a layer returns for a gradient whose average is still being computed: `wait` is called
    /// when the value is needed.
    pub(super) fn deferred(
        on_device: bool,
        shape: Shape,
        dtype: DType,
        wait: impl Fn() -> Self + Send + Sync + 'static,
    ) -> Reduced {
        match on_device {
            false => Reduced::Deferred(Arc::new(move || {
                host(wait()).into_data(shape.clone(), dtype)
            })),
            #[cfg(feature = "nccl")]
            true => Reduced::DeferredPrimitive(Arc::new(move || match wait() {
                Self::Device(tensor) => crate::nccl::boxed_primitive(*tensor, shape.clone()),
                Self::Host(_) => unreachable!("a gradient of the device stays there"),
            })),
            #[cfg(not(feature = "nccl"))]
            true => unreachable!("without NCCL, gradients are on the host"),
        }
    }

    /// The result that a layer returns to leave a gradient unchanged.
    pub(super) fn unchanged(self, shape: Shape, dtype: DType) -> Reduced {
        match self {
            Self::Host(values) => Reduced::Ready(values.into_data(shape, dtype)),
            device => Self::deferred(true, shape, dtype, move || device.clone()),
        }
    }
}

fn host(gradient: Gradient) -> Values {
    match gradient {
        Gradient::Host(values) => values,
        Gradient::Device(_) => unreachable!("a gradient of the host stays there"),
    }
}

/// The location of the tensor behind a view.
pub(super) fn location(view: FloatView<'_>) -> Location {
    #[cfg(feature = "nccl")]
    if let Some(device) = crate::nccl::view_device(view) {
        return Location::of_primitives::<burn_cubecl::Cube>(&device);
    }
    let _ = view;
    Location::elsewhere("a device that is not CubeCL's")
}

/// Zeros in place of a gradient that cannot be read.
pub(super) fn unreadable(shape: Shape, dtype: DType) -> Reduced {
    Reduced::Ready(TensorData::full_dtype(shape, 0.0, dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(gradient: Gradient) -> Vec<f32> {
        match gradient {
            Gradient::Host(Values::F32(values)) => values,
            Gradient::Device(tensor) => tensor.into_data().try_to_vec().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_was_joined_is_found_again_in_either_place() {
        let parts = [vec![1.0f32, 2.0], vec![3.0], vec![4.0, 5.0, 6.0]];
        let device = Device::flex();
        let host = parts.clone().map(|part| Gradient::Host(Values::F32(part)));
        let tensors = parts
            .clone()
            .map(|part| Gradient::Device(Tensor::from_data(&part[..], &device).into()));
        for gradients in [host, tensors] {
            let lens = gradients.clone().map(|it| it.len());
            let bucket = Gradient::join(gradients.into(), DType::F32);
            assert_eq!(bucket.len(), 6);
            let mut at = 0;
            for (part, len) in parts.iter().zip(lens) {
                assert_eq!(&read(bucket.slice(at, len)), part);
                at += len;
            }
            assert_eq!(read(bucket.zeros()()), [0.0; 6]);
            let doubled = bucket.scaled(2.0);
            let tensor = doubled.into_tensor::<2>([2, 3].into(), DType::F32, &device);
            let expected = [[2.0f32, 4.0, 6.0], [8.0, 10.0, 12.0]];
            assert_eq!(tensor.into_data(), TensorData::from(expected));
        }
    }
}
