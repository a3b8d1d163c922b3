//! What is [computed again](crate::Plan::recompute) where it is needed once more: results of cheap ops, and views of these.

use super::{
    batch_norm::Norm, call::Call, inherited::transposes, layer_norm::RowNorm, rotation::Rotation,
};
use crate::{
    Inputs, LayeredFloat, LayeredTensor, Op,
    deferred::Deferred,
    float::Part,
    recent::GiveUp,
    recompute::{DEPTH, Recomputed},
    source::Later,
};
use burn_backend::{
    BoolDType, DType, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn_ir::BackendIr;
use std::sync::Arc;

/// Results with fewer elements are kept: they hold few of the bytes of a large training step.
const ELEMENTS: usize = 1 << 12;

/// An op on the backend underneath, with all its arguments but the float inputs.
pub(crate) type Run<B> = Box<dyn Fn(Vec<FloatTensor<B>>) -> FloatTensor<B> + Send + Sync>;

/// An op and its float inputs.
pub(crate) struct Again<B: BackendIr> {
    inputs: Vec<LayeredFloat<B>>,
    run: Run<B>,
    /// The dtype that the result is cast to, if any.
    pub(super) store: Option<DType>,
}

impl<B: BackendIr> Again<B> {
    /// The result, from the inputs in `dtype`, or as they are stored for `None`.
    fn compute(&self, dtype: Option<DType>) -> FloatTensor<B> {
        let inputs = self.inputs.iter();
        let result = (self.run)(inputs.map(|input| input.in_dtype(dtype)).collect());
        let first = &self.inputs[0];
        match self.store {
            Some(store) => LayeredFloat::<B>::new(result, first.dtype(), first.layer().clone())
                .in_dtype(Some(store)),
            None => result,
        }
    }

    /// The view of the input in `dtype`. The input's own elements are given up before it is viewed, because a view ends the kernel,
    /// which writes what is still there.
    fn view_in(&self, dtype: DType) -> FloatTensor<B> {
        let input = &self.inputs[0];
        let tensor = input.in_dtype(Some(dtype));
        if let Some(value) = input.value() {
            value.give_up();
        }
        (self.run)(vec![tensor])
    }
}

/// The mask of an op that may run again.
pub(super) enum Mask<B: BackendIr> {
    Kept(BoolTensor<B>),
    /// The elements of the op's own input that are not above 0.
    NotPositive(BoolDType),
}

impl<B: BackendIr> Mask<B> {
    /// The mask of the op's input.
    pub(super) fn of(&self, input: &FloatTensor<B>) -> BoolTensor<B> {
        match self {
            Self::Kept(mask) => mask.clone(),
            Self::NotPositive(dtype) => {
                B::float_lower_equal_elem(input.clone(), 0f32.into(), *dtype)
            }
        }
    }
}

/// Tells the call how to run the op again, and returns what waits until it is needed without computing it now: a view of a tensor
/// that is computed again, or a part of a [batch](super::batch_norm) or [layer normalization](super::layer_norm)
/// or a [softmax](super::softmax). Covers the few kinds of arguments that cheap
/// ops have.
macro_rules! again {
    ($call:ident, $name:ident, Float, $x:ident: Float) => {
        again!(@op $call, [$x], |x| B::$name(x.remove(0)))
    };
    ($call:ident, $name:ident, Float, $x:ident: Float, $y:ident: Float) => {
        again!(@op $call, [$x, $y], |x| {
            let y = x.remove(1);
            B::$name(x.remove(0), y)
        })
    };
    ($call:ident, $name:ident, Float, $x:ident: Float, $value:ident: [Scalar]) => {
        again!(@op $call, [$x], |x| B::$name(x.remove(0), $value))
    };
    ($call:ident, $name:ident, Recast, $x:ident: Float, $dtype:ident: [FloatDType]) => {
        again!(@op $call, [$x], |x| B::$name(x.remove(0), $dtype))
    };
    ($call:ident, $name:ident, Float, $x:ident: Float, $min:ident: [Scalar], $max:ident: [Scalar]) => {
        again!(@op $call, [$x], |x| B::$name(x.remove(0), $min, $max))
    };
    ($call:ident, $name:ident, Float, $x:ident: Float, $mask:ident: Bool, $value:ident: [Scalar]) => {
        again!(@op $call, [$x], mask = $call.mask_again(&$mask, &$x), |x| {
            let x = x.remove(0);
            let mask = mask.of(&x);
            B::$name(x, mask, $value)
        })
    };
    ($call:ident, $name:ident, Float, $x:ident: Float, $shape:ident: [Shape]) => {
        again!(@op $call, [$x], shape = $shape.clone(), |x| B::$name(x.remove(0), shape.clone()))
    };
    ($call:ident, $name:ident, Float, $x:ident: Float, $dim:ident: [usize]) => {
        again!(@op $call, [$x], |x| B::$name(x.remove(0), $dim))
    };
    ($call:ident, $name:ident, Float, $x:ident: Float, $a:ident: [usize], $b:ident: [usize]) => {
        again!(@op $call, [$x], |x| B::$name(x.remove(0), $a, $b))
    };
    ($call:ident, $name:ident, Float, $x:ident: Float, $axes:ident: [&[usize]]) => {
        again!(@op $call, [$x], axes = $axes.to_vec(), |x| B::$name(x.remove(0), &axes))
    };
    (@op $call:ident, [$($x:ident),*], $($name:ident = $value:expr,)? |$inputs:ident| $run:expr) => {
        if $call.is_computed_again() {
            $(let $name = $value;)?
            let run = move |mut $inputs: Vec<FloatTensor<B>>| $run;
            $call.again(&[$(&$x),*], Box::new(run));
            if let Some(tensor) = $call.later() {
                return tensor;
            }
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use again;

impl<B: BackendIr> Call<B> {
    /// Whether the op's result may be computed again.
    pub(super) fn is_computed_again(&self) -> bool {
        match self.of_recomputed {
            Some(depth) if depth >= DEPTH => false,
            _ if self.norm.is_some() || self.role.is_some() || self.row_norm.is_some() => {
                self.defers()
            }
            _ if self.rotation.is_some() => true,
            _ if self.scales_scores() => true,
            Some(_) if self.op.is_view() => true,
            _ => {
                // Results of backward are used up soon, so keeping them takes little memory.
                self.plan.recompute
                    && !self.plan.own
                    && self.op.is_cheap()
                    && self.lineage.is_of_activations()
                    && !self.layer().is_in_backward()
            }
        }
    }

    /// Has the result computed again if that takes less memory. Only in that case are the inputs held from now on, because a
    /// backend may write a result in place of an input that nobody else holds.
    pub(super) fn again(&mut self, inputs: &[&LayeredFloat<B>], run: Run<B>) {
        let waits = self.op.is_view() || self.defers() || self.scales_scores() || self.gates_low();
        if !waits && !self.takes_less(inputs) {
            return;
        }
        self.again = Some(Again {
            inputs: inputs.iter().map(|tensor| tensor.alone()).collect(),
            run,
            store: None,
        });
    }

    /// The mask of an op on `input` that may run again. In the two ops by which Burn computes `relu` where its client does not send
    /// it whole, the mask need not be kept.
    pub(super) fn mask_again(
        &self,
        mask: &LayeredTensor<BoolTensor<B>>,
        input: &LayeredFloat<B>,
    ) -> Mask<B> {
        // Filled with 0, elements that are rounded to 0 before they are compared change nothing.
        match self.constants.first() == Some(0.0) && mask.is_not_positive_of(input) {
            true => Mask::NotPositive(mask.dtype().into()),
            false => Mask::Kept(mask.clone().into_storage()),
        }
    }

    /// Whether keeping the inputs takes less memory than keeping the output: one input is as large as the output but in a
    /// narrower dtype, or is kept in any case, and the others have at most a quarter of its elements, or are gates
    /// that are computed again themselves.
    fn takes_less(&self, inputs: &[&LayeredFloat<B>]) -> bool {
        let elements = elements_of_all(inputs);
        let mut large = None;
        for input in inputs {
            match input.shape().num_elements() {
                // A gate holds nothing but what it is computed from, which is the other factor of a `silu`.
                _ if self.op == Op::float_mul
                    && input.part() == Some(Part::Gate)
                    && input.recomputed().is_some() => {}
                all if all == elements => match large {
                    None => large = Some(input),
                    Some(_) => return false,
                },
                some if some * 4 > elements => return false,
                _ => {}
            }
        }
        let gains = |input: &&LayeredFloat<B>| {
            let stored = input.storage_dtype();
            let output = self.names.or(self.plan.store).or(self.plan.compute);
            let output = output.unwrap_or(stored);
            stored.size() < output.size() || input.has_clones() || input.recomputed().is_some()
        };
        elements >= ELEMENTS && large.is_some_and(gains)
    }

    /// Whether the result waits until it is needed, as part of a normalization or a softmax.
    pub(super) fn defers(&self) -> bool {
        let (norm, role, row_norm) = (&self.norm, &self.role, &self.row_norm);
        let is_norm = |norm: &Arc<Norm<B>>| norm.is_deferred(self.layer().is_in_backward());
        norm.as_ref().is_some_and(is_norm)
            || role.as_ref().is_some_and(|role| role.is_deferred())
            || row_norm
                .as_ref()
                .is_some_and(|row_norm| row_norm.is_deferred())
            || self.rotation.is_some()
    }

    /// The result of an op that waits: a view of a tensor that is computed again, or a part of a normalization or a softmax.
    pub(super) fn later(&mut self) -> Option<LayeredFloat<B>> {
        if self.watched {
            return None;
        }
        if self.scales_scores() {
            let again = self.again.take()?;
            return Some(self.scaled_later(again));
        }
        if !self.op.is_view() && !self.defers() && !self.gates_low() {
            return None;
        }
        let again = self.again.take()?;
        let input = &again.inputs[0];
        let mut shape = input.shape();
        match self.op {
            Op::float_reshape | Op::float_expand => shape = self.shape.take()?,
            Op::float_permute => shape = self.dims.iter().map(|&dim| shape[dim]).collect(),
            Op::sigmoid => {}
            // The larger tensor comes first.
            Op::float_sum_dim | Op::float_sum_dims => {
                let last = shape.num_dims() - 1;
                shape.as_mut_slice()[last] = 1;
            }
            Op::float_matmul => {
                let last = shape.num_dims() - 1;
                shape.as_mut_slice()[last] = again.inputs[1].shape()[last];
            }
            _ if self.role.is_some() || self.row_norm.is_some() || self.rotation.is_some() => {}
            // The tensor that a number of each channel is subtracted from, or that is multiplied by one, comes first.
            Op::float_sub | Op::float_mul => {}
            _ => {
                let last = shape.num_dims() - 1;
                let dims = match self.dims.as_slice() {
                    [a, b] => (*a, *b),
                    _ => (last - 1, last),
                };
                shape.as_mut_slice().swap(dims.0, dims.1);
            }
        }
        let dtype = self.plan.compute.unwrap_or(input.storage_dtype());
        if self.plan.store.is_some_and(|store| store != dtype) {
            return None;
        }
        let like = input.clone();
        let value = self.recomputed(None, again);
        Some(self.waiting(value, &like, (shape, dtype)))
    }

    /// Whether the op is a sigmoid in f32, in forward, of what is stored in 16 bits, on a backend that fuses ops: the gate of a `silu`,
    /// most likely. It waits for the product with that, and is computed in its kernel, which does not write it.
    fn gates_low(&self) -> bool {
        let low = |inputs: &Inputs| inputs.stored_low();
        self.op == Op::sigmoid
            && self.plan.recompute
            && self.plan.stored(DType::F32) == DType::F32
            && self.inputs.as_ref().is_some_and(low)
            && self.layer().is_fused()
            && !self.layer().is_in_backward()
    }

    /// Whether the op may begin an RMS normalization, its backward or a rotation, which other programs than these have too.
    fn may_begin(&self) -> bool {
        let (row_norm, rotation) = (self.row_norm.as_deref(), self.rotation.as_deref());
        matches!(
            row_norm,
            Some(RowNorm::SquaredInput(..) | RowNorm::NegInput(..))
        ) || matches!(rotation, Some(Rotation::Products(_)))
    }

    /// Whether the op scales the scores of attention, in forward, on a backend that fuses ops. Next they are masked, after a view of the
    /// mask, and no kernel goes on past a view. So they are scaled when they are masked.
    pub(super) fn scales_scores(&self) -> bool {
        let scores = |inputs: &Inputs| {
            inputs.first_part == Some(Part::Product) && inputs.shapes[0].num_dims() > 3
        };
        matches!(self.op, Op::float_div_scalar | Op::float_mul_scalar)
            && self.inputs.as_ref().is_some_and(scores)
            && !self.watched
            && !self.plan.own
            && self.layer().is_fused()
            && !self.layer().is_in_backward()
    }

    fn scaled_later(&self, again: Again<B>) -> LayeredFloat<B> {
        let x = again.inputs[0].clone();
        let compute = self.plan.compute;
        let dtype = self.plan.store.or(compute);
        let form = (x.shape(), dtype.unwrap_or(x.storage_dtype()));
        let again = Again {
            store: self.plan.store,
            ..again
        };
        // The scores are not kept beyond that.
        let value = Deferred::new(move || again.compute(compute));
        self.waiting(Later::Deferred(value), &x, form)
    }

    /// The op's result. It is given up after a while if it is one to compute again.
    pub(super) fn kept(&mut self, tensor: FloatTensor<B>, nominal: DType) -> LayeredFloat<B> {
        let layer = self.layer();
        let Some(again) = self.again.take() else {
            return LayeredFloat::new(tensor, nominal, layer);
        };
        let form = (tensor.shape(), tensor.dtype());
        let device = tensor.device();
        let value = self.recomputed(Some(tensor), again);
        LayeredFloat::later(value, form, device, nominal, layer)
    }

    fn recomputed(&self, value: Option<FloatTensor<B>>, again: Again<B>) -> Later<FloatTensor<B>> {
        let dtype = self.plan.compute;
        let there = value.is_some();
        let depth = self.of_recomputed.map_or(1, |depth| depth + 1);
        let again = Arc::new(again);
        let stored = again.inputs[0].storage_dtype();
        let views = self.op.is_view() && dtype.unwrap_or(stored) == stored && again.store.is_none();
        let viewed = again.clone();
        let compute = move || again.compute(dtype);
        let value = match value.is_none() && (self.gates_low() || self.may_begin()) {
            true => Recomputed::waiting(self.op, depth, compute).computed(self.plan.recompute),
            false => Recomputed::new(self.op, value, depth, compute),
        };
        let value = match views {
            true => value.with_view(move |dtype| viewed.view_in(dtype)),
            false => value,
        };
        let value = Arc::new(value);
        if there {
            self.layer().keep_value_for_now(&value);
        }
        Later::Recomputed(value)
    }
}

/// How many elements the result of an elementwise op on the tensors has.
fn elements_of_all<B: BackendIr>(inputs: &[&LayeredFloat<B>]) -> usize {
    let shapes: Vec<_> = inputs.iter().map(|input| input.shape()).collect();
    let dims = shapes.iter().map(|shape| shape.num_dims()).max();
    let largest = |dim| shapes.iter().map(move |shape| shape[dim]).max();
    (0..dims.unwrap_or(0)).filter_map(largest).product()
}

impl Op {
    /// Whether the op is as cheap as a read of its inputs, so that its result may be [computed again](crate::Plan::recompute)
    /// instead of being kept: elementwise arithmetic and functions.
    ///
    /// ```
    /// use burn_layer::Op;
    ///
    /// assert!(Op::float_exp.is_cheap() && !Op::float_matmul.is_cheap() && !Op::float_sum_dim.is_cheap());
    /// ```
    pub fn is_cheap(self) -> bool {
        CHEAP.contains(&self)
    }

    /// Whether the op changes nothing but the shape or the order of dimensions, or repeats elements.
    pub(crate) fn is_view(self) -> bool {
        matches!(self, Op::float_reshape | Op::float_expand) || transposes(self)
    }
}

/// The cheap ops. [`again`] has to cover their arguments.
const CHEAP: &[Op] = &[
    Op::float_add,
    Op::float_add_scalar,
    Op::float_sub,
    Op::float_sub_scalar,
    Op::float_mul,
    Op::float_mul_scalar,
    Op::float_div,
    Op::float_div_scalar,
    Op::float_neg,
    Op::float_recip,
    Op::float_abs,
    Op::float_sqrt,
    Op::float_exp,
    Op::float_log,
    Op::float_log1p,
    Op::float_powf_scalar,
    Op::float_cos,
    Op::float_sin,
    Op::float_tanh,
    Op::float_erf,
    Op::float_clamp,
    Op::float_clamp_min,
    Op::float_clamp_max,
    Op::float_mask_fill,
    Op::float_cast,
    Op::relu,
    Op::gelu,
    Op::sigmoid,
];
