//! One op on its way through the layers.

use super::{again::Again, constants::Constants, kernel_end::alone_in_kernel, lineage::Lineage};
use crate::{
    Descent, Inputs, LayerSet, LayeredDevice, LayeredFloat, LayeredTensor, Made, Op, Plan, Run,
    float::{Copied, Origin},
    recent::GiveUp,
    recompute::Recomputed,
    reduce::Viewed,
    rows::{Rows, Used},
    scope::Scope,
};
use burn_backend::{
    DType, Distribution, FloatDType, Shape, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn_ir::BackendIr;
use parking_lot::Mutex;
use std::sync::Arc;

/// An op that runs: its arguments are [seen](Call::see_float), the layers [plan](Call::plan) it, the
/// arguments are [lowered](Call::lower), and the results are wrapped.
pub(crate) struct Call<B: BackendIr> {
    pub(super) op: Op,
    layer: Option<Arc<LayerSet>>,
    pub(super) inputs: Option<Inputs>,
    /// The first float input's [identity](LayeredFloat::identity), as long as all float inputs are the same tensor.
    only: Option<usize>,
    pub(super) plan: Plan,
    /// The scope that the op is in; at first the one it was started in.
    scope: Option<Arc<Scope>>,
    /// What is known of the float inputs, to tell whether the op is part of backward.
    pub(super) lineage: Lineage,
    /// If backward repeats an op of forward: how that one used its input.
    once_more: Option<Used>,
    /// The length of the longest chain of tensors that are computed from each other to compute an input again, if any is.
    pub(super) of_recomputed: Option<usize>,
    /// How the result may be computed again.
    pub(super) again: Option<Again<B>>,
    /// If the result is the maximum of a tensor along a dimension: that tensor.
    maximum_of: Option<Origin>,
    /// If the result is a mask of the elements of a tensor that are not above 0: that tensor.
    not_positive_of: Option<Origin>,
    /// The rows of a tensor that is reshaped or transposed.
    rows: Option<Arc<Rows>>,
    /// The copy in another dtype of a tensor that is reshaped.
    copied: Option<Copied<FloatTensor<B>>>,
    /// The copy in another dtype of a tensor that is transposed, if there is one.
    copy: Option<(DType, FloatTensor<B>)>,
    /// What layers keep with the first float input, if the result inherits it.
    descent: Option<Descent>,
    /// The dimensions given to a transposition.
    pub(super) dims: Vec<usize>,
    /// The shape given to a reshape or a draw.
    pub(super) shape: Option<Shape>,
    /// Whether the op draws zeros and ones.
    pub(super) draws_mask: bool,
    /// The dtype that the program names for the result.
    pub(super) names: Option<DType>,
    /// The numbers given to an elementwise op.
    pub(super) constants: Constants,
    /// Whether a layer watches the results of ops.
    pub(super) watched: bool,
    /// The float inputs as they are stored, when watched.
    stored: Vec<Viewed<B>>,
    /// The float inputs that can be computed again. They are held until the op was sent, so that it is sent before they are
    /// freed.
    values: Vec<Arc<Recomputed<FloatTensor<B>>>>,
}

impl<B: BackendIr> Call<B> {
    pub(crate) fn new(op: Op) -> Self {
        Self {
            op,
            layer: None,
            inputs: None,
            only: None,
            plan: Plan::default(),
            scope: None,
            lineage: Lineage::new(op),
            once_more: None,
            of_recomputed: None,
            again: None,
            maximum_of: None,
            not_positive_of: None,
            rows: None,
            copied: None,
            copy: None,
            descent: None,
            dims: Vec::new(),
            shape: None,
            draws_mask: false,
            names: None,
            constants: Constants::default(),
            watched: false,
            stored: Vec::new(),
            values: Vec::new(),
        }
    }

    pub(crate) fn see_float(&mut self, tensor: &LayeredFloat<B>) {
        let identity = Some(tensor.identity());
        match &mut self.inputs {
            Some(inputs) => {
                inputs.shifted = self.only.is_some_and(|first| tensor.is_maximum_of(first));
                self.only = self.only.filter(|_| self.only == identity);
                inputs.add(tensor, self.only.is_some());
            }
            None => {
                self.maximum_of = match self.op {
                    Op::float_max_dim | Op::float_max_dim_with_indices => Some(tensor.origin()),
                    // Burn's quiet softmax replaces infinite maxima.
                    Op::float_mask_fill => tensor.maximum_of().cloned(),
                    _ => None,
                };
                let is_first_of_relu = self.op == Op::float_lower_equal_elem;
                self.not_positive_of = is_first_of_relu.then(|| tensor.origin());
                self.only = identity;
                if steps(self.op) {
                    self.descent = tensor.rows().descent.get().cloned();
                }
                self.inputs = Some(Inputs::new(tensor));
            }
        }
        self.see_layer(tensor.layer());
        if self.op == Op::float_reshape {
            self.rows = Some(tensor.rows().clone());
            self.copied = Some(tensor.copied().clone());
        }
        if transposes(self.op) {
            self.rows = Some(tensor.rows().clone());
            self.copy = tensor.copy();
        }
        self.of_recomputed = self.of_recomputed.max(tensor.recomputed());
        self.lineage.see(tensor);
    }

    pub(crate) fn see_shape(&mut self, shape: &Shape) {
        if matches!(self.op, Op::float_reshape | Op::float_random) {
            self.shape = Some(shape.clone());
        }
    }

    pub(crate) fn see_distribution(&mut self, distribution: Distribution) {
        self.draws_mask = matches!(distribution, Distribution::Bernoulli(_));
    }

    pub(crate) fn see_dtype(&mut self, dtype: FloatDType) {
        self.names = Some(dtype.into());
        if self.draws_mask {
            let shape = self.shape.take().into_iter();
            self.inputs = Some(Inputs::mask(shape.collect(), dtype.into()));
        }
    }

    pub(crate) fn see_dims(&mut self, dims: &[usize]) {
        if transposes(self.op) {
            self.dims.extend_from_slice(dims);
        }
    }

    pub(crate) fn see_layer(&mut self, layer: &Arc<LayerSet>) {
        if self.layer.is_none() {
            self.layer = Some(layer.clone());
        }
    }

    /// A device argument decides where the result lives, whatever the inputs' device.
    pub(crate) fn see_device(&mut self, device: &LayeredDevice<B::Device>) {
        self.layer = Some(device.layer().clone());
    }

    pub(crate) fn plan(&mut self) {
        self.scope = self.layer.as_ref().and_then(|layer| layer.scopes.now());
        let forward = self.lineage.forward();
        let gradient_of = forward.as_ref().and_then(|forward| forward.gradient_of);
        let of_shared = forward.as_ref().is_some_and(|forward| forward.of_shared);
        let in_backward = self.layer.as_ref().is_some_and(|it| it.is_in_backward());
        self.once_more = self.lineage.is_once_more(in_backward);
        match (forward, &self.once_more) {
            (Some(forward), _) => self.scope = forward.scope,
            (None, Some(used)) => self.scope = used.scope.clone(),
            (None, None) => self.lineage.used_in(self.scope.as_ref()),
        }
        let Some(layer) = &self.layer else {
            return;
        };
        self.watched = layer.watches();
        match self.lineage.is_backward() {
            Some(backward) if self.once_more.is_none() => layer.set_in_backward(backward),
            _ => {}
        }
        let Some(inputs) = &mut self.inputs else {
            return;
        };
        inputs.scope = self.scope.clone();
        inputs.gradient_of = gradient_of;
        inputs.of_shared = of_shared;
        let shape = self.shape.as_ref();
        inputs.to_vector = shape.is_some_and(|shape| shape.num_dims() == 1);
        self.plan = match self.op {
            // The program reads elements in the dtype that it sees.
            Op::float_into_data => Plan::compute(inputs.nominal),
            op => layer.plan(op, inputs),
        };
        if self.plan.own && !self.op.gives_float() {
            self.plan = inputs.promote();
        }
        let widest = inputs.widest;
        self.keep_constants();
        if let Some(layer) = &self.layer
            && !self.plan.own
        {
            layer.ran(self.op, self.plan.compute.unwrap_or(widest));
        }
    }

    /// Whether the layer said that it runs the op itself.
    pub(crate) fn is_own(&self) -> bool {
        self.plan.own
    }

    /// Has the layer run the op itself. `None` if it does not after all; the op then goes on to the backend.
    pub(crate) fn run(&mut self, tensors: Vec<LayeredFloat<B>>) -> Option<LayeredFloat<B>> {
        let (Some(layer), Some(inputs)) = (&self.layer, &self.inputs) else {
            return None;
        };
        let ran = layer.run(&Run {
            op: self.op,
            store: self.plan.store,
            inputs,
            tensors: &tensors,
        });
        let Some(ran) = ran else {
            self.plan = match self.plan.compute {
                Some(_) => Plan {
                    own: false,
                    ..self.plan
                },
                None => inputs.promote(),
            };
            layer.ran(self.op, self.plan.compute.unwrap_or(inputs.widest));
            return None;
        };
        if self.watched {
            let seen = tensors
                .into_iter()
                .map(|tensor| Viewed(tensor.into_storage()));
            self.stored.extend(seen);
        }
        let tensor = ran.0.downcast::<FloatTensor<B>>();
        Some(self.float(*tensor.expect("the kernel is of the backend underneath")))
    }

    pub(crate) fn lower(&mut self, tensor: LayeredFloat<B>) -> FloatTensor<B> {
        if self.watched {
            self.stored.push(Viewed(tensor.clone().into_storage()));
        }
        self.values.extend(tensor.value().cloned());
        match self.plan.compute {
            Some(dtype) if self.plan.is_wide_inside() => tensor.into_dtype_once(dtype),
            Some(dtype) => tensor.into_dtype(dtype),
            None => tensor.into_storage(),
        }
    }

    /// Called when all inputs are lowered. A kernel that computes an input again cannot go on beyond a product, or another op
    /// with a backward of its own. So such inputs are given up here, and the backend alone holds those that nobody else needs.
    pub(crate) fn lowered(&self) {
        if self.op.has_backward() {
            self.values.iter().for_each(|value| value.give_up());
        }
    }

    /// Wraps a float result. The program sees the dtype of the inputs, or, without any, that of the result.
    pub(crate) fn float(&mut self, tensor: FloatTensor<B>) -> LayeredFloat<B> {
        let nominal = match &self.inputs {
            Some(inputs) => inputs.nominal,
            None => tensor.dtype(),
        };
        self.wrap(tensor, nominal)
    }

    /// Wraps the result of an op for which the program named the dtype.
    pub(crate) fn recast(&mut self, tensor: FloatTensor<B>) -> LayeredFloat<B> {
        let nominal = tensor.dtype();
        self.wrap(tensor, nominal)
    }

    fn wrap(&mut self, tensor: FloatTensor<B>, nominal: DType) -> LayeredFloat<B> {
        let layer = self.layer();
        let ran_in = tensor.dtype();
        let tensor = match self.plan.store {
            Some(dtype) if dtype != tensor.dtype() => {
                if let Some(again) = &mut self.again {
                    again.store = Some(dtype);
                }
                LayeredFloat::<B>::new(tensor, nominal, layer.clone()).into_dtype(dtype)
            }
            _ => tensor,
        };
        let tensor = match self.makes_weight_gradient() {
            true => alone_in_kernel::<B>(tensor, &layer),
            false => tensor,
        };
        if self.watched {
            self.made(&tensor, ran_in);
        }
        let shape = tensor.shape();
        layer.stored(tensor.dtype(), nominal, shape.num_elements());
        let tensor = self.kept(tensor, nominal);
        self.known(tensor, shape)
    }

    /// Adds what is known of the result to it.
    pub(super) fn known(&self, tensor: LayeredFloat<B>, shape: Shape) -> LayeredFloat<B> {
        let tensor = tensor
            .with_maximum_of(self.maximum_of.clone())
            .with_part(self.makes_part(&shape));
        if let Some(used) = &self.once_more {
            tensor.rows().set_used(used);
        }
        let tensor = match (&self.descent, &self.inputs) {
            (Some(descent), Some(inputs)) if inputs.shapes[0] == shape => {
                tensor.rows().descent.get_or_init(|| descent.clone());
                tensor
            }
            // The result of a step on a parameter, above, is a parameter: neither a gradient nor computed.
            _ => {
                let gradient = self.lineage.makes_gradient(&shape);
                let in_backward = self.layer().is_in_backward();
                let computed = self.lineage.makes_computed(gradient, in_backward);
                tensor.with_gradient(gradient).with_computed(computed)
            }
        };
        match (self.op, &self.rows) {
            (Op::float_reshape, Some(rows)) => self.reshaped(tensor, &shape, rows),
            (_, Some(rows)) if self.turns(shape.num_dims()) => {
                self.turned(tensor.with_columns(Some(rows.clone())), &shape)
            }
            _ => tensor,
        }
    }

    /// Gives a tensor whose last two dimensions were swapped the copy of its input in another dtype, swapped as well.
    fn turned(&self, tensor: LayeredFloat<B>, shape: &Shape) -> LayeredFloat<B> {
        let Some((dtype, copy)) = self.copy.clone() else {
            return tensor;
        };
        let last = shape.num_dims() - 1;
        let copy = B::float_swap_dims(copy, last - 1, last);
        let copied = Arc::new(Mutex::new(Some((dtype, copy))));
        if tensor.is_computed() && tensor.recomputed().is_none() {
            tensor.layer().keep_for_now(&copied);
        }
        tensor.with_copied(copied)
    }

    /// Passes on what a reshape leaves as it was: the copy in another dtype; the rows, if the last dimension is the same; and
    /// the columns, if the last two are.
    fn reshaped(
        &self,
        tensor: LayeredFloat<B>,
        shape: &Shape,
        rows: &Arc<Rows>,
    ) -> LayeredFloat<B> {
        let (Some(inputs), Some(copied)) = (&self.inputs, &self.copied) else {
            return tensor;
        };
        let tensor = tensor.with_copied(copied.clone());
        let before = inputs.shapes[0].iter().rev();
        match before
            .zip(shape.iter().rev())
            .take_while(|(a, b)| a == b)
            .count()
        {
            0 => tensor,
            1 => tensor.with_rows(rows.clone()),
            _ => tensor
                .with_rows(rows.clone())
                .with_columns(inputs.first_columns.clone()),
        }
    }

    /// Whether the op swaps the last two of `rank` dimensions, and no others.
    fn turns(&self, rank: usize) -> bool {
        let Some(first) = rank.checked_sub(2) else {
            return false;
        };
        let mut dims = self.dims.clone();
        match self.op {
            Op::float_transpose => true,
            Op::float_swap_dims => {
                dims.sort_unstable();
                dims == [first, first + 1]
            }
            Op::float_permute => {
                dims.swap(first, first + 1);
                dims.into_iter().eq(0..rank)
            }
            _ => false,
        }
    }

    fn made(&self, output: &FloatTensor<B>, ran_in: DType) {
        let output = Viewed::<B>(output.clone());
        self.layer().made(&Made {
            op: self.op,
            dtype: ran_in,
            inputs: self.stored.iter().map(Viewed::view).collect(),
            output: output.view(),
            scope: self.scope.as_deref(),
        });
    }

    /// Wraps a bool result.
    pub(crate) fn mask(&mut self, mask: BoolTensor<B>) -> LayeredTensor<BoolTensor<B>> {
        let of = self.not_positive_of.take();
        let of = of.filter(|_| self.constants.first() == Some(0.0));
        self.tensor(mask).with_not_positive_of(of)
    }

    pub(crate) fn tensor<P>(&self, tensor: P) -> LayeredTensor<P> {
        LayeredTensor::new(tensor, self.layer())
    }

    pub(super) fn layer(&self) -> Arc<LayerSet> {
        let layer = self.layer.as_ref();
        layer
            .expect("every op that returns a tensor takes a tensor or a device")
            .clone()
    }
}

/// Whether the op changes the order of dimensions.
pub(super) fn transposes(op: Op) -> bool {
    matches!(
        op,
        Op::float_transpose | Op::float_swap_dims | Op::float_permute
    )
}

/// The ops that steps of optimizers consist of. Their results inherit the [`Descent`] of their first float input.
fn steps(op: Op) -> bool {
    matches!(
        op,
        Op::float_add
            | Op::float_sub
            | Op::float_mul_scalar
            | Op::float_div_scalar
            | Op::float_clamp
            | Op::float_clamp_min
            | Op::float_clamp_max
            | Op::float_mask_where
    )
}
