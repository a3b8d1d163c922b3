//! Batch normalization in training, on a backend that fuses ops.
//!
//! It does not reach a layered device as one op: Burn's client takes it apart. It takes means and sums by channel of tensors that
//! it turns from `[batch, channels, ..]` into `[channels, samples]`. That is a copy, and no kernel that computes elements goes on
//! beyond one: the squared differences from the mean, the normalized input and its product with the gradient are all written,
//! copied and read. Here these wait for the sum. Where it is all that they are needed for, the sum is taken as they lie, and
//! computing them is part of its kernel. Where they are needed by themselves, the kernel that needs them computes them.
//!
//! Of an input in bf16, forward then reads 2 + 2 bytes an element for the mean and the variance, and backward 2 + 4 for the two
//! sums, as much as these tensors have. Where there are [kernels](crate::batch_norm), forward reads 2 for both, and backward 4.

mod elements;

use super::call::Call;
use crate::{
    LayeredFloat, Op, channels::by_channel, float::Origin, recompute::Recomputed, source::Later,
};
use burn_backend::{Backend, DType, Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use core::any::Any;
use elements::{Centered, Elements, Normalized, Plain, Product};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// Recognizes the ops of a batch normalization, and computes its sums.
macro_rules! batch_norm {
    ($call:ident, float_swap_dims, $x:ident: Float, $a:ident: [usize], $b:ident: [usize]) => {
        $call.swaps_channels(&$x, $a, $b);
    };
    ($call:ident, float_reshape, $x:ident: Float, $shape:ident: [Shape]) => {
        if let Some(tensor) = $call.reshapes_channels(&$x, &$shape) {
            return tensor;
        }
    };
    ($call:ident, float_sub, $x:ident: Float, $y:ident: Float) => {
        $call.subtracts_by_channel(&$x, &$y);
    };
    ($call:ident, float_mul, $x:ident: Float, $y:ident: Float) => {
        $call.multiplies_by_channel(&$x, &$y);
    };
    ($call:ident, float_sum_dim, $x:ident: Float, $dim:ident: [usize]) => {
        if let Some(tensor) = $call.sums_channels(&$x, $dim) {
            return tensor;
        }
    };
    ($call:ident, float_mean_dim, $x:ident: Float, $dim:ident: [usize]) => {
        if let Some(tensor) = $call.sums_channels(&$x, $dim) {
            return tensor;
        }
    };
    (
        $call:ident, batch_norm,
        $x:ident: Float, $gamma:ident: Float, $beta:ident: Float, $mean:ident: Float, $variance:ident: Float,
        $epsilon:ident: [f64]
    ) => {
        if let Some(tensor) = $call.normalizes(&$x, [&$gamma, &$beta, &$mean, &$variance], $epsilon)
        {
            return tensor;
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use batch_norm;

/// What a tensor is to a batch normalization. It says what the elements are computed from, so it is as true of any other tensor.
pub(crate) enum Norm<B: Backend> {
    /// `[batch, channels, ..]`.
    Elements(Elements<B>),
    /// `[channels, batch, ..]`.
    Swapped(Elements<B>),
    /// `[channels, samples]`.
    Flat {
        elements: Elements<B>,
        /// Their sum by channel, `[1, channels, 1, ..]`, once it was computed.
        sum: Mutex<Option<FloatTensor<B>>>,
    },
    /// A mean or sum of each channel.
    Statistic(Statistic<B>),
    /// The normalized input times a statistic. The dtype is the input's.
    Projected(DType),
    /// The gradient of the input but for a factor of each channel. The dtype is the input's.
    Unscaled(DType),
}

/// How a backend computes batch normalizations by kernels of its own.
pub(crate) struct BatchNorms<B: Backend> {
    /// The most elements of a tensor: kernels count them.
    pub(crate) most: usize,
    /// The mean and the variance of each channel of `[batch, channels, ..]`: `[1, channels, 1, ..]`, in f32.
    pub(crate) moments: fn(FloatTensor<B>) -> Pair<B>,
    /// The sums, in the same form, of the first tensor, and of its product with the second one less a number of each channel.
    pub(crate) sums: fn(Pair<B>, FloatTensor<B>) -> Pair<B>,
}

/// Two tensors.
type Pair<B> = [FloatTensor<B>; 2];

/// The product of a gradient and a normalized tensor that was made last, whose sums a kernel computes with those of the gradient.
#[derive(Default)]
pub(crate) struct LastProduct(Mutex<Option<(Origin, Weak<dyn Any + Send + Sync>)>>);

impl LastProduct {
    fn set<B: BackendIr>(&self, gradient: Origin, product: &Arc<Product<B>>) {
        let product: Arc<dyn Any + Send + Sync> = product.clone();
        *self.0.lock() = Some((gradient, Arc::downgrade(&product)));
    }

    /// The product of that gradient.
    fn of<B: BackendIr>(&self, gradient: &Origin) -> Option<Arc<Product<B>>> {
        let last = self.0.lock();
        let (of, product) = last.as_ref()?;
        let product = product.upgrade().filter(|_| of.ptr_eq(gradient))?;
        product.downcast().ok()
    }
}

impl<B: Backend> Clone for BatchNorms<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for BatchNorms<B> {}

#[derive(Clone)]
pub(crate) struct Statistic<B: Backend> {
    /// `[1, channels, 1, ..]`.
    along: FloatTensor<B>,
    /// `[channels]`, where it was viewed as soon as it was there. A view taken later would be of the kernel that the statistic is
    /// used in, and running statistics, which are computed from it, would tie that to theirs.
    flat: Option<FloatTensor<B>>,
    /// If this is a mean, the variance of the same tensor, where a kernel computed both.
    variance: Option<Variance<B>>,
}

/// The variance of a tensor, in the form of its mean.
#[derive(Clone)]
pub(crate) struct Variance<B: Backend> {
    of: Origin,
    along: FloatTensor<B>,
}

impl<B: BackendIr> Norm<B> {
    /// Whether a tensor that is this waits until its elements are needed. In backward a statistic does not: the kernel that takes it
    /// would end where it is viewed.
    pub(super) fn is_deferred(&self, in_backward: bool) -> bool {
        match self {
            Self::Statistic(_) => !in_backward,
            Self::Elements(_) | Self::Swapped(_) | Self::Flat { .. } => true,
            Self::Projected(_) | Self::Unscaled(_) => false,
        }
    }
}

impl<B: BackendIr> Call<B> {
    /// Whether the op may be part of a batch normalization, of `x`.
    fn may_normalize(&self, x: &LayeredFloat<B>) -> bool {
        let stores = self.plan.store.is_none_or(|store| store == DType::F32);
        self.layer().is_fused() && !self.watched && !self.plan.own && stores && {
            let shape = x.shape();
            shape.num_dims() > 2 && shape.num_elements() > 0
        }
    }

    /// Whether the op computes in f32, from inputs whose storage is `stored`.
    fn computes_f32(&self, stored: DType) -> bool {
        self.plan.compute.unwrap_or(stored) == DType::F32
    }

    pub(super) fn swaps_channels(&mut self, x: &LayeredFloat<B>, a: usize, b: usize) {
        if (a.min(b), a.max(b)) != (0, 1) || !self.may_normalize(x) {
            return;
        }
        let elements = match x.norm() {
            Some(Norm::Elements(elements)) => elements.clone(),
            // Not what the program loads.
            None if x.is_computed() || x.is_gradient() => Elements::Of(Arc::new(Plain {
                x: x.alone(),
                origin: x.origin(),
                is_gradient: x.is_gradient(),
            })),
            _ => return,
        };
        self.norm = Some(Arc::new(Norm::Swapped(elements)));
    }

    /// A view of a statistic, if `x` is one and it waits.
    pub(super) fn reshapes_channels(
        &mut self,
        x: &LayeredFloat<B>,
        shape: &Shape,
    ) -> Option<LayeredFloat<B>> {
        match x.norm() {
            Some(Norm::Swapped(elements)) => {
                let [channels, all] = [x.shape()[0], x.shape().num_elements()];
                if shape.as_slice() == [channels, all / channels] {
                    self.norm = Some(Arc::new(Norm::Flat {
                        elements: elements.clone(),
                        sum: Mutex::default(),
                    }));
                }
            }
            Some(Norm::Statistic(statistic))
                if shape.iter().filter(|&&dim| dim > 1).count() < 2 =>
            {
                let statistic = statistic.clone();
                self.norm = Some(Arc::new(Norm::Statistic(statistic.clone())));
                // Where it waits, one view is enough, of whatever views it is one.
                if self.defers() && !self.watched {
                    return Some(self.views(statistic, x, shape.clone()));
                }
            }
            _ => {}
        }
        None
    }

    /// A statistic of `x` in another shape.
    fn views(&self, statistic: Statistic<B>, x: &LayeredFloat<B>, form: Shape) -> LayeredFloat<B> {
        let shape = form.clone();
        let value = Recomputed::new(Op::float_reshape, None, 1, move || {
            let flat = statistic.flat.clone();
            flat.filter(|flat| flat.shape() == shape)
                .unwrap_or_else(|| B::float_reshape(statistic.along.clone(), shape.clone()))
        });
        self.waiting(Later::Recomputed(Arc::new(value)), x, (form, DType::F32))
    }

    pub(super) fn subtracts_by_channel(&mut self, x: &LayeredFloat<B>, y: &LayeredFloat<B>) {
        if !self.may_normalize(x) {
            return;
        }
        self.norm = match (x.norm(), y.norm()) {
            (Some(Norm::Elements(Elements::Centered(_))), Some(Norm::Projected(dtype)))
                if x.is_gradient() =>
            {
                Some(Arc::new(Norm::Unscaled(*dtype)))
            }
            (None, Some(Norm::Statistic(mean)))
                if is_by_channel(&x.shape(), &y.shape())
                    && self.computes_f32(x.storage_dtype())
                    && (x.is_computed() || x.is_gradient()) =>
            {
                let known = mean.variance.as_ref();
                let known = known.filter(|known| known.of.as_ptr() as usize == x.identity());
                let centered = Elements::Centered(Arc::new(Centered {
                    x: x.alone(),
                    mean: y.clone(),
                    variance: known.map(|known| known.along.clone()),
                }));
                Some(Arc::new(Norm::Elements(centered)))
            }
            _ => None,
        };
    }

    pub(super) fn multiplies_by_channel(&mut self, x: &LayeredFloat<B>, y: &LayeredFloat<B>) {
        // The gradient of a norm's input has the input's dtype, as in PyTorch.
        if let Some(Norm::Unscaled(dtype)) = y.norm()
            && is_by_channel(&y.shape(), &x.shape())
        {
            self.plan.store = Some(*dtype);
            return;
        }
        if !self.may_normalize(x) || !self.computes_f32(x.storage_dtype()) {
            return;
        }
        let same = self.inputs.as_ref().is_some_and(|inputs| inputs.same);
        let elements = match (x.norm(), y.norm()) {
            (Some(Norm::Elements(Elements::Centered(centered))), _) if same => {
                Elements::Squared(centered.clone())
            }
            (Some(Norm::Elements(Elements::Centered(centered))), _)
                if is_by_channel(&x.shape(), &y.shape()) =>
            {
                Elements::Normalized(Arc::new(Normalized {
                    centered: centered.clone(),
                    scale: y.alone(),
                }))
            }
            (Some(Norm::Elements(Elements::Normalized(normalized))), Some(Norm::Statistic(_)))
                if is_by_channel(&x.shape(), &y.shape()) =>
            {
                let dtype = normalized.centered.x.storage_dtype();
                self.norm = Some(Arc::new(Norm::Projected(dtype)));
                return;
            }
            (None, Some(Norm::Elements(Elements::Normalized(normalized))))
                if x.shape() == y.shape() =>
            {
                let product = Arc::new(Product::new(x.alone(), normalized.clone()));
                if x.is_gradient() {
                    self.layer().last_product.set(x.origin(), &product);
                }
                Elements::Product(product)
            }
            _ => return,
        };
        self.norm = Some(Arc::new(Norm::Elements(elements)));
    }

    /// The sum or mean of each channel, if `x` is flat and `dim` is that of the samples.
    pub(super) fn sums_channels(
        &mut self,
        x: &LayeredFloat<B>,
        dim: usize,
    ) -> Option<LayeredFloat<B>> {
        let Some(Norm::Flat { elements, sum }) = x.norm() else {
            return None;
        };
        if dim != 1 || !self.computes_f32(x.storage_dtype()) || self.plan.store.is_some() {
            return None;
        }
        let samples = x.shape()[1];
        let sum_there = sum.lock().clone();
        let mut variance = None;
        let tensor = match (self.op, sum_there) {
            (Op::float_mean_dim, None) if let Some(known) = elements.variance() => known,
            (Op::float_mean_dim, None) if let Some((mean, other)) = self.moments(elements) => {
                variance = Some(other);
                mean
            }
            (Op::float_mean_dim, Some(sum)) => B::float_div_scalar(sum, (samples as f64).into()),
            (Op::float_mean_dim, None) => elements.sum(1.0 / samples as f64),
            (_, Some(sum)) => sum,
            (_, None) => {
                let known = self.sum_of_product(elements);
                let tensor = known.unwrap_or_else(|| elements.sum(1.0));
                *sum.lock() = Some(tensor.clone());
                tensor
            }
        };
        let channels = x.shape()[0];
        let flat = (!self.layer().is_in_backward())
            .then(|| B::float_reshape(tensor.clone(), Shape::new([channels])));
        let statistic = Statistic {
            along: tensor,
            flat,
            variance,
        };
        self.norm = Some(Arc::new(Norm::Statistic(statistic.clone())));
        Some(self.views(statistic, x, Shape::new([channels, 1])))
    }

    /// The mean and the variance of each channel of an input by one kernel, if there is one for it.
    fn moments(&self, elements: &Elements<B>) -> Option<(FloatTensor<B>, Variance<B>)> {
        let Elements::Of(input) = elements else {
            return None;
        };
        let kernels = self
            .batch_norms([&input.x])
            .filter(|_| !input.is_gradient)?;
        let [mean, along] = (kernels.moments)(input.x.clone().into_storage());
        let of = input.origin.clone();
        Some((mean, Variance { of, along }))
    }

    /// The sum by channel of a gradient that is also multiplied by a normalized tensor, or of that product, by one kernel for both.
    fn sum_of_product(&self, elements: &Elements<B>) -> Option<FloatTensor<B>> {
        let (product, which) = match elements {
            Elements::Of(plain) => (self.layer().last_product.of(&plain.origin)?, 0),
            Elements::Product(product) => (product.clone(), 1),
            _ => return None,
        };
        let kernels = self.batch_norms([&product.factor, &product.normalized.centered.x])?;
        Some(product.sums(kernels)[which].clone())
    }

    /// The kernels, if they take these tensors.
    fn batch_norms<const N: usize>(&self, tensors: [&LayeredFloat<B>; N]) -> Option<BatchNorms<B>> {
        let kernels: BatchNorms<B> = self.layer().mechanisms.get()?;
        let takes = |tensor: &LayeredFloat<B>| {
            let floats = matches!(
                tensor.storage_dtype(),
                DType::F32 | DType::BF16 | DType::F16
            );
            floats && tensor.shape().num_elements() <= kernels.most
        };
        tensors.into_iter().all(takes).then_some(kernels)
    }

    /// Normalizes by statistics, in the dtypes of the plan. `None` if it is left to the backend.
    pub(super) fn normalizes(
        &mut self,
        x: &LayeredFloat<B>,
        [gamma, beta, mean, variance]: [&LayeredFloat<B>; 4],
        epsilon: f64,
    ) -> Option<LayeredFloat<B>> {
        if self.watched || !self.layer().is_fused() {
            return None;
        }
        let shape = by_channel(&x.shape());
        let wide = self.plan.compute == Some(DType::F32);
        let mut by_channel = |tensor: &LayeredFloat<B>| match tensor.norm() {
            Some(Norm::Statistic(statistic)) if wide && statistic.along.shape() == shape => {
                statistic.along.clone()
            }
            _ => B::float_reshape(self.lower(tensor.clone()), shape.clone()),
        };
        // The same as by Burn's own backends. But views end a kernel, so they come first, and a cast of the input after them.
        let [gamma, beta] = [gamma, beta].map(&mut by_channel);
        let [mean, variance] = [mean, variance].map(&mut by_channel);
        let deviation = B::float_sqrt(B::float_add_scalar(variance, epsilon.into()));
        let x = self.lower(x.clone());
        let normalized = B::float_div(B::float_sub(x, mean), deviation);
        let output = B::float_add(B::float_mul(normalized, gamma), beta);
        self.lowered();
        Some(self.float(output))
    }
}

/// Whether `other` is `[1, channels, 1, ..]`, to be broadcast along `shape`.
fn is_by_channel(shape: &Shape, other: &Shape) -> bool {
    *other == by_channel(shape)
}
