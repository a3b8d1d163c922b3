//! The forward and the backward pass, in the standard operations of any backend and with one exchange each.

use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{DType, FloatDType, Shape},
};
use burn_layer::{fuses_ops, sum_by_channel};

use super::exchange::Exchange;
use crate::ProcessGroup;

/// The type in which statistics are computed for inputs of this type.
pub(super) fn wide(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    }
}

fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    match tensor.dtype() == dtype.into() {
        true => tensor,
        false => B::float_cast(tensor, dtype),
    }
}

/// Reshapes `[C]` to `[1, C, 1, ...]`, to broadcast over tensors of `rank` dimensions.
fn along_channels<B: Backend>(tensor: FloatTensor<B>, rank: usize) -> FloatTensor<B> {
    let mut shape = vec![1; rank];
    shape[1] = tensor.shape().num_elements();
    B::float_reshape(tensor, Shape::from(shape))
}

/// Reshapes `[1, C, 1, ...]` to `[C]`.
fn flat<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let channels = tensor.shape().num_elements();
    B::float_reshape(tensor, Shape::new([channels]))
}

/// Two numbers per channel, concatenated, for one exchange.
fn both<B: Backend>(first: FloatTensor<B>, second: FloatTensor<B>) -> FloatTensor<B> {
    B::float_cat(vec![flat::<B>(first), flat::<B>(second)], 0)
}

/// Elements that are needed more than once.
enum Elements<T, F> {
    Kept(T),
    /// A backend that fuses ops computes them in each kernel that needs them, and never writes them.
    Made(F),
}

impl<T: Clone, F: Fn() -> T> Elements<T, F> {
    fn new(fused: bool, make: F) -> Self {
        match fused {
            true => Self::Made(make),
            false => Self::Kept(make()),
        }
    }

    fn get(&self) -> T {
        match self {
            Self::Kept(elements) => elements.clone(),
            Self::Made(make) => make(),
        }
    }

    /// The last time: the backend may compute in place of what was kept.
    fn take(self) -> T {
        match self {
            Self::Kept(elements) => elements,
            Self::Made(make) => make(),
        }
    }
}

/// The output, and the mean and biased variance over all ranks' batches.
pub(super) fn forward<B: Backend>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    beta: FloatTensor<B>,
    group: &ProcessGroup,
    epsilon: f64,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let dtype = wide(x.dtype());
    let output_dtype: FloatDType = x.dtype().into();
    let (device, shape) = (x.device(), x.shape());
    let (channels, rank) = (shape[1], shape.num_dims());
    let exchange = Exchange::<B> {
        group,
        channels,
        dtype,
        device: &device,
    };
    if shape.num_elements() == 0 {
        let (mean, variance) = exchange.statistics(None);
        return (x, mean, variance);
    }
    let x = Elements::new(fuses_ops::<B>(&device), move || cast::<B>(x.clone(), dtype));
    let samples = shape.num_elements() / channels;
    let mean_of = |tensor| sum_by_channel::<B>(tensor, 1.0 / samples as f64);

    let mean = mean_of(x.get());
    let centered = B::float_sub(x.get(), mean.clone());
    let variance = mean_of(B::float_mul(centered.clone(), centered));
    let own = both::<B>(mean, variance);
    let (mean, variance) = exchange.statistics(Some((own, samples)));

    // Views end a kernel, so they come before what is computed of elements.
    let along = |tensor| along_channels::<B>(tensor, rank);
    let [gamma, beta, mean_along, variance_along] =
        [gamma, beta, mean.clone(), variance.clone()].map(along);
    let [gamma, beta] = [gamma, beta].map(|tensor| cast::<B>(tensor, dtype));
    let deviation = B::float_sqrt(B::float_add_scalar(variance_along, epsilon.into()));
    let scale = B::float_div(gamma, deviation);
    let centered = B::float_sub(x.take(), mean_along);
    let output = B::float_add(B::float_mul(centered, scale), beta);
    (cast::<B>(output, output_dtype), mean, variance)
}

/// The gradient of the input, and this rank's share of the gradients of gamma and beta.
pub(super) fn backward<B: Backend>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    mean: FloatTensor<B>,
    variance: FloatTensor<B>,
    grad: FloatTensor<B>,
    group: &ProcessGroup,
    epsilon: f64,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let dtype = wide(x.dtype());
    let (x_dtype, gamma_dtype): (FloatDType, FloatDType) = (x.dtype().into(), gamma.dtype().into());
    let (device, shape) = (x.device(), x.shape());
    let (channels, rank) = (shape[1], shape.num_dims());
    let exchange = Exchange::<B> {
        group,
        channels,
        dtype,
        device: &device,
    };
    if shape.num_elements() == 0 {
        // The other ranks still expect this one to take part.
        exchange.means(None);
        let zeros = B::float_zeros(Shape::new([channels]), &device, gamma_dtype);
        return (grad, zeros.clone(), zeros);
    }
    // Views end a kernel, so they come before what is computed of elements.
    let along = |tensor| along_channels::<B>(tensor, rank);
    let variance = B::float_add_scalar(along(variance), epsilon.into());
    let inverse = B::float_recip(B::float_sqrt(variance));
    let scale = B::float_mul(cast::<B>(along(gamma), dtype), inverse.clone());
    let mean = along(mean);
    let fused = fuses_ops::<B>(&device);
    let centered = Elements::new(fused, move || {
        B::float_sub(cast::<B>(x.clone(), dtype), mean.clone())
    });
    let grad = Elements::new(fused, move || cast::<B>(grad.clone(), dtype));

    let beta_grad = sum_by_channel::<B>(grad.get(), 1.0);
    let product = B::float_mul(grad.get(), centered.get());
    let gamma_grad = B::float_mul(sum_by_channel::<B>(product, 1.0), inverse.clone());
    let own = both::<B>(beta_grad.clone(), gamma_grad.clone());
    let samples = shape.num_elements() / channels;

    // dx = γ / σ (dy - Σ dy / n - (x - µ) / σ Σ (dy x̂) / n)
    let [grad_mean, product_mean] = exchange.means(Some((own, samples))).map(along);
    let slope = B::float_mul(product_mean, inverse);
    let drift = B::float_add(B::float_mul(centered.take(), slope), grad_mean);
    let x_grad = B::float_mul(B::float_sub(grad.take(), drift), scale);
    let of_parameter = |tensor| cast::<B>(flat::<B>(tensor), gamma_dtype);
    (
        cast::<B>(x_grad, x_dtype),
        of_parameter(gamma_grad),
        of_parameter(beta_grad),
    )
}
