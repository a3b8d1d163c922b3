//! The forward and the backward pass, in the standard operations of any backend and with one exchange each.

use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{DType, FloatDType, Shape, Slice},
};

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

/// Reshapes `[N, C, ...]` to `[C, N * ...]`.
fn by_channel<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let channels = shape[1];
    let flat = Shape::new([channels, shape.num_elements() / channels]);
    B::float_reshape(B::float_swap_dims(tensor, 0, 1), flat)
}

/// Reshapes `[C]` to `[1, C, 1, ...]`, to broadcast over tensors of `rank` dimensions.
fn along_channels<B: Backend>(tensor: FloatTensor<B>, rank: usize) -> FloatTensor<B> {
    let mut shape = vec![1; rank];
    shape[1] = tensor.shape().num_elements();
    B::float_reshape(tensor, Shape::from(shape))
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
    let x = cast::<B>(x, dtype);

    let own = (shape.num_elements() > 0).then(|| {
        let mean = B::float_mean_dim(by_channel::<B>(x.clone()), 1);
        let mean = B::float_reshape(mean, Shape::new([channels]));
        let centered = B::float_sub(x.clone(), along_channels::<B>(mean.clone(), rank));
        let squares = B::float_mul(centered.clone(), centered);
        let variance = B::float_mean_dim(by_channel::<B>(squares), 1);
        let variance = B::float_reshape(variance, Shape::new([channels]));
        let samples = shape.num_elements() / channels;
        (B::float_cat(vec![mean, variance], 0), samples)
    });
    let exchange = Exchange::<B> {
        group,
        channels,
        dtype,
        device: &device,
    };
    let (mean, variance) = exchange.statistics(own);
    if shape.num_elements() == 0 {
        return (cast::<B>(x, output_dtype), mean, variance);
    }
    let output = B::batch_norm(
        x,
        cast::<B>(gamma, dtype),
        cast::<B>(beta, dtype),
        mean.clone(),
        variance.clone(),
        epsilon,
    );
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
    let (x, grad) = (cast::<B>(x, dtype), cast::<B>(grad, dtype));
    let variance = B::float_add_scalar(variance, epsilon.into());
    let inverse = along_channels::<B>(B::float_recip(B::float_sqrt(variance)), rank);
    let centered = B::float_sub(x, along_channels::<B>(mean, rank));
    let normalized = B::float_mul(centered, inverse.clone());

    let sum = |tensor| {
        let sums = B::float_sum_dim(by_channel::<B>(tensor), 1);
        B::float_reshape(sums, Shape::new([channels]))
    };
    let beta_grad = sum(grad.clone());
    let gamma_grad = sum(B::float_mul(grad.clone(), normalized.clone()));
    let own = B::float_cat(vec![beta_grad.clone(), gamma_grad.clone()], 0);
    let samples = shape.num_elements() / channels;

    // dx = γ / σ (dy - Σ dy / n - x̂ Σ (dy x̂) / n)
    let means = exchange.means(Some((own, samples)));
    let part = |range: std::ops::Range<usize>| {
        along_channels::<B>(B::float_slice(means.clone(), &[Slice::from(range)]), rank)
    };
    let drift = B::float_add(
        part(0..channels),
        B::float_mul(normalized, part(channels..2 * channels)),
    );
    let scale = B::float_mul(along_channels::<B>(cast::<B>(gamma, dtype), rank), inverse);
    let x_grad = B::float_mul(B::float_sub(grad, drift), scale);
    (
        cast::<B>(x_grad, x_dtype),
        cast::<B>(gamma_grad, gamma_dtype),
        cast::<B>(beta_grad, gamma_dtype),
    )
}
