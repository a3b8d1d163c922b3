//! Softmaxes and cross-entropies in training, where the backend underneath has [kernels](Softmaxes) for them.
//!
//! They do not reach a layered device as one op: Burn's autodiff takes them apart, and computes their gradients op by op too. Here each
//! of these ops only says what its result is, its [`Role`], and waits until it is needed. The softmax computes the [`Statistics`] of each row
//! too; the last op of backward computes the gradient. What comes between is not computed, unless the program needs it for something
//! else.
//!
//! Scores of attention, which a program scales and masks first, are [logits](Logits): the kernels do both as they read, and do it to the
//! gradient as they write.
//!
//! Of an input in bf16, forward reads 2 bytes an element and writes 2; backward reads 2 of the input and 2 of the gradient, and writes 2.
//! A cross-entropy over indices, such as a language model's, reads 2 in forward and 2 in backward, and writes 2.

mod attention;
mod gathered;
mod logits;
mod role;
mod statistics;

use super::call::Call;
use crate::{
    LayerSet, LayeredDevice, LayeredFloat, Op, deferred::Deferred, recent::GiveUp,
    recompute::Recomputed, source::Later,
};
use burn_backend::{
    Backend, DType, FloatDType, IntDType, Shape, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_ir::BackendIr;
#[cfg(feature = "cubecl")]
pub(crate) use logits::Mask;
pub(crate) use logits::{Logits, Scale};
pub(crate) use role::Role;
use role::{Exponents, Step, scores};
use statistics::{Statistics, Unjoined};
use std::sync::Arc;

/// Recognizes the ops of softmaxes, and computes what needs their kernels.
macro_rules! softmax {
    ($call:ident, float_max_dim, $x:ident: Float, $dim:ident: [usize]) => {
        softmax!(@ $call.maxima_of_rows(&$x, $dim))
    };
    ($call:ident, float_sum_dim, $x:ident: Float, $dim:ident: [usize]) => {
        softmax!(@ $call.sums_of_rows(&$x, $dim))
    };
    ($call:ident, float_gather, $dim:ident: [usize], $x:ident: Float, $indices:ident: Int) => {
        softmax!(@ $call.gathers(&$x, $dim, &$indices))
    };
    (
        $call:ident, float_scatter,
        $dim:ident: [usize], $x:ident: Float, $indices:ident: Int, $value:ident: Float, $update:ident: [IndexingUpdateOp]
    ) => {
        softmax!(@ $call.scatters([&$x, &$value], $dim, &$indices, $update))
    };
    ($call:ident, float_zeros, $shape:ident: [Shape], $device:ident: Device, $dtype:ident: [FloatDType]) => {
        softmax!(@ $call.fills(&$shape, $device, $dtype, Role::Zeros, B::float_zeros))
    };
    ($call:ident, float_ones, $shape:ident: [Shape], $device:ident: Device, $dtype:ident: [FloatDType]) => {
        softmax!(@ $call.fills(&$shape, $device, $dtype, Role::Ones, B::float_ones))
    };
    ($call:ident, float_mul_scalar, $x:ident: Float, $value:ident: [Scalar]) => {
        $call.goes_on(&$x);
        softmax!(@ $call.scales(&$x, $value.elem()))
    };
    ($call:ident, float_div_scalar, $x:ident: Float, $value:ident: [Scalar]) => {
        softmax!(@ $call.scales(&$x, $value.elem()))
    };
    ($call:ident, float_mask_fill, $x:ident: Float, $mask:ident: Bool, $value:ident: [Scalar]) => {
        softmax!(@ $call.masks(&$x, &$mask, $value.elem()))
    };
    ($call:ident, float_exp, $x:ident: Float) => { $call.goes_on(&$x); };
    ($call:ident, float_log, $x:ident: Float) => { $call.goes_on(&$x); };
    ($call:ident, float_neg, $x:ident: Float) => { $call.goes_on(&$x); };
    ($call:ident, float_recip, $x:ident: Float) => { $call.goes_on(&$x); };
    ($call:ident, float_sub, $x:ident: Float, $y:ident: Float) => {
        softmax!(@ $call.joins(&$x, &$y))
    };
    ($call:ident, float_add, $x:ident: Float, $y:ident: Float) => {
        softmax!(@ $call.joins(&$x, &$y))
    };
    ($call:ident, float_mul, $x:ident: Float, $y:ident: Float) => {
        softmax!(@ $call.joins(&$x, &$y))
    };
    ($call:ident, float_div, $x:ident: Float, $y:ident: Float) => {
        softmax!(@ $call.joins(&$x, &$y))
    };
    (@ $tensor:expr) => {
        if let Some(tensor) = $tensor {
            return tensor;
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use softmax;

/// How a backend computes softmaxes by kernels of its own. A row is along the last dimension; a number of each row has a last
/// dimension of 1, and is f32.
pub(crate) struct Softmaxes<B: Backend> {
    /// The most elements of a tensor: kernels count them.
    pub(crate) most: usize,
    /// The maximum of each row, and the sum of `exp(x - maximum)`.
    pub(crate) statistics: fn(Logits<B>) -> [FloatTensor<B>; 2],
    /// Both, and the softmax in that dtype.
    pub(crate) softmax: fn(Logits<B>, DType) -> [FloatTensor<B>; 3],
    /// The softmax from both statistics, in that dtype.
    pub(crate) forward: Forward<B>,
    /// The gradient of the input, in its dtype.
    pub(crate) backward: fn(SoftmaxBackward<B>) -> FloatTensor<B>,
    /// `exp(x - maximum) factor`, plus a gradient at one index of each row, in the dtype of `x`, from `x`, the maxima, the factors, the
    /// indices in i32, and the gradients.
    pub(crate) gathered_backward: GatheredBackward<B>,
}

type Forward<B> = fn(Logits<B>, [FloatTensor<B>; 2], DType) -> FloatTensor<B>;

/// What the gradient of a softmax's input is computed from.
#[cfg_attr(not(feature = "cubecl"), expect(dead_code, reason = "kernels read it"))]
pub(crate) struct SoftmaxBackward<B: Backend> {
    pub(crate) of: Logits<B>,
    pub(crate) maxima: FloatTensor<B>,
    pub(crate) sums: FloatTensor<B>,
    pub(crate) gradient: FloatTensor<B>,
    /// Whether the gradient is 0 where the input was masked.
    pub(crate) masked: bool,
    /// How it is scaled then.
    pub(crate) scale: Scale,
}

type GatheredBackward<B> = fn([FloatTensor<B>; 3], IntTensor<B>, FloatTensor<B>) -> FloatTensor<B>;

impl<B: Backend> Clone for Softmaxes<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Softmaxes<B> {}

impl<B: BackendIr> Call<B> {
    /// The kernels, if the op may be part of a softmax.
    fn softmaxes(&self, stored: DType) -> Option<Softmaxes<B>> {
        self.of_wide(stored)?.mechanisms.get()
    }

    /// The layers, if the op may be part of something that has kernels of its own: it computes in f32, on a backend that fuses ops.
    pub(in crate::ops) fn of_wide(&self, stored: DType) -> Option<&LayerSet> {
        let is_wide = |dtype: Option<DType>| dtype.is_none_or(|dtype| dtype == DType::F32);
        let computes = self.plan.compute.unwrap_or(stored) == DType::F32;
        let plain = !self.watched && !self.plan.own && computes && is_wide(self.plan.store);
        let layer = self.layer.as_deref()?;
        (layer.is_fused() && plain).then_some(layer)
    }

    /// The maximum of each row of an activation, with the sum that a softmax needs next.
    pub(super) fn maxima_of_rows(
        &mut self,
        x: &LayeredFloat<B>,
        dim: usize,
    ) -> Option<LayeredFloat<B>> {
        let dtype = x.storage_dtype();
        let softmaxes = self.softmaxes(dtype)?;
        let shape = x.shape();
        let of_network = x.is_computed() && !x.is_gradient();
        let floats = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        let rows = dim + 1 == shape.num_dims() && shape[dim] > 1;
        let counted = (1..=softmaxes.most).contains(&shape.num_elements());
        if !(of_network && floats && rows && counted) {
            return None;
        }
        let of = x.role().filter(|_| scores(x).is_some());
        let of = x.alone().with_role(of.cloned());
        let statistics = Arc::new(Statistics::new(softmaxes, of));
        self.role = Some(Arc::new(Role::Maxima(statistics.clone())));
        let unjoined = Unjoined(Arc::downgrade(&statistics));
        self.layer().ends.later(Arc::new(unjoined));
        let maxima = move || {
            let [maxima, _] = statistics.get();
            maxima
        };
        Some(self.of_rows(x, maxima))
    }

    /// A number of each row of `x`, in f32, which waits until it is needed.
    fn of_rows(
        &self,
        x: &LayeredFloat<B>,
        value: impl Fn() -> FloatTensor<B> + Send + Sync + 'static,
    ) -> LayeredFloat<B> {
        let mut shape = x.shape();
        if let Some(last) = shape.as_mut_slice().last_mut() {
            *last = 1;
        }
        let value = Later::Deferred(Deferred::new(value));
        self.waiting(value, x, (shape, DType::F32))
    }

    /// Notes what the result of an op on `x` is.
    pub(super) fn goes_on(&mut self, x: &LayeredFloat<B>) {
        let role = x.role().and_then(|role| role.after(self.as_negation()));
        if let Some(role) = role.filter(|_| self.softmaxes(x.storage_dtype()).is_some()) {
            self.role = Some(Arc::new(role));
        }
    }

    /// Notes what the result of an op on `x` and `y` is, or computes it if it is the last op of a softmax's backward.
    pub(super) fn joins(
        &mut self,
        x: &LayeredFloat<B>,
        y: &LayeredFloat<B>,
    ) -> Option<LayeredFloat<B>> {
        let shifted = self.inputs.as_ref().is_some_and(|inputs| inputs.shifted);
        let step = Step::of(self.op, x, y, shifted)?;
        let softmaxes = self.softmaxes(widest([x.storage_dtype(), y.storage_dtype()]))?;
        match step {
            Step::Role(role) => {
                self.role = Some(Arc::new(role));
                None
            }
            Step::Softmax(of) => Some(self.softmax(of, x)),
            Step::Backward(gradient) => {
                if gradient.of.scores().is_some() && self.plan.store.is_none() {
                    self.role = Some(Arc::new(Role::OfScores(gradient.clone())));
                    return Some(self.of_scores(softmaxes, gradient, false));
                }
                let tensor = gradient.backward(softmaxes, false, Scale::Nothing);
                Some(self.ends(&gradient.of, tensor))
            }
            Step::PickedBackward(picked, of, factors) => {
                let wide = Some(DType::F32);
                let (factors, gradient) = (factors.in_dtype(wide), picked.gradient.in_dtype(wide));
                let indices = B::int_cast(picked.indices.clone(), IntDType::I32);
                let tensor = (softmaxes.gathered_backward)(of.with(factors), indices, gradient);
                Some(self.ends(&of, tensor))
            }
        }
    }

    /// The softmax, which waits if it may be computed again, or is needed in 16 bits: for what follows in its kernel, such as a cast.
    fn softmax(&mut self, of: Arc<Exponents<B>>, like: &LayeredFloat<B>) -> LayeredFloat<B> {
        if !self.plan.recompute && self.layer().low().is_none() {
            return match of.scores() {
                Some(_) => self.float(of.by_kernel(DType::F32)),
                None => self.float(of.by_ops()),
            };
        }
        let shape = of.x.shape();
        let depth = of.x.recomputed().map_or(1, |depth| depth + 1);
        let alone = of.clone();
        let value = Recomputed::waiting(self.op, depth, move || of.by_ops())
            .computed(self.plan.recompute)
            // Where a product takes it, and nothing goes on in its kernel.
            .with_view(move |dtype| alone.by_kernel(dtype));
        let value = Later::Recomputed(Arc::new(value));
        self.waiting(value, like, (shape, DType::F32))
    }

    /// The op, or negation if it multiplies by -1: with its own fusion, Burn's client sends that.
    pub(in crate::ops) fn as_negation(&self) -> Op {
        match (self.op, self.constants.first()) {
            (Op::float_mul_scalar, Some(-1.0)) => Op::float_neg,
            (op, _) => op,
        }
    }

    /// The gradient of a softmax's input, which is given up if it can be computed again.
    fn ends(&mut self, of: &Exponents<B>, gradient: FloatTensor<B>) -> LayeredFloat<B> {
        if let Some(value) = of.x.value() {
            value.give_up();
        }
        self.float(gradient)
    }

    /// The sums of rows that are known, or are those of a gradient.
    pub(super) fn sums_of_rows(
        &mut self,
        x: &LayeredFloat<B>,
        dim: usize,
    ) -> Option<LayeredFloat<B>> {
        let role = x.role().cloned()?;
        self.softmaxes(x.storage_dtype())?;
        let last = dim + 1 == x.shape().num_dims();
        match &*role {
            Role::Exp(of) if last => {
                let statistics = of.statistics.clone();
                self.role = Some(Arc::new(Role::Sums(statistics.clone())));
                let sums = move || {
                    let [_, sums] = statistics.get();
                    sums
                };
                Some(self.of_rows(x, sums))
            }
            Role::Weighted(gradient) if last => {
                self.role = Some(Arc::new(Role::SumsOfWeighted(gradient.clone())));
                None
            }
            // Their sums, once more.
            Role::SumsOfWeighted(_) if x.shape()[dim] == 1 => Some(x.clone()),
            Role::NegPicked(picked) if last => {
                let gradient = picked.gradient.in_dtype(Some(DType::F32));
                Some(self.float(B::float_neg(gradient)))
            }
            _ => None,
        }
    }

    /// Zeros or ones of backward, which wait.
    pub(super) fn fills(
        &mut self,
        shape: &Shape,
        device: &LayeredDevice<B::Device>,
        dtype: FloatDType,
        role: Role<B>,
        fill: fn(Shape, &B::Device, FloatDType) -> FloatTensor<B>,
    ) -> Option<LayeredFloat<B>> {
        let stored = DType::from(dtype);
        self.softmaxes(stored)?;
        let layer = self.layer();
        let rows = shape.num_dims() > 1 && shape.last().is_some_and(|last| *last > 1);
        if !layer.is_in_backward() || !rows {
            return None;
        }
        self.role = Some(Arc::new(role));
        layer.stored(stored, stored, shape.num_elements());
        let (form, base) = (shape.clone(), device.base().clone());
        let value = Deferred::new(move || fill(form.clone(), &base, dtype));
        let (form, base) = ((shape.clone(), stored), device.base().clone());
        let tensor = LayeredFloat::later(Later::Deferred(value), form, base, stored, layer);
        Some(self.known(tensor, shape.clone()))
    }
}

/// Whether a shape is that of one number of each row of another.
pub(super) fn is_of_rows(shape: &Shape, of: &Shape) -> bool {
    let Some(last) = of.num_dims().checked_sub(1) else {
        return false;
    };
    shape.num_dims() == last + 1 && shape[last] == 1 && shape[..last] == of[..last]
}

/// The wider of two dtypes.
pub(super) fn widest(dtypes: [DType; 2]) -> DType {
    match dtypes[0].size() < dtypes[1].size() {
        true => dtypes[1],
        false => dtypes[0],
    }
}
