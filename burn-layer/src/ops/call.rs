//! One op on its way through the layers.

use super::{
    again::Again,
    batch_norm::Norm,
    constants::Constants,
    inherited::{Inherited, transposes},
    kernel_end::{alone_in_kernel, end_of_sum},
    layer_norm::RowNorm,
    lineage::Lineage,
    rotation::Rotation,
    softmax::Role,
};
use crate::{
    Cast, Inputs, LayerSet, LayeredDevice, LayeredFloat, LayeredTensor, Made, Op, Plan, Run,
    float::Part,
    recent::GiveUp,
    recompute::Recomputed,
    reduce::Viewed,
    rows::Used,
    scope::Scope,
    source::{Later, Widened},
};
use burn_backend::{DType, Distribution, FloatDType, Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use std::sync::Arc;

/// An op that runs: its arguments are [seen](Call::see_float), the layers [plan](Call::plan) it, the
/// arguments are [lowered](Call::lower), and the results are wrapped.
pub(crate) struct Call<B: BackendIr> {
    pub(super) op: Op,
    pub(super) layer: Option<Arc<LayerSet>>,
    pub(super) inputs: Option<Inputs>,
    /// The first float input's [identity](LayeredFloat::identity), as long as all float inputs are the same tensor.
    only: Option<usize>,
    pub(super) plan: Plan,
    /// The scope that the op is in; at first the one it was started in.
    scope: Option<Arc<Scope>>,
    /// What is known of the float inputs, to tell whether the op is part of backward.
    pub(super) lineage: Lineage,
    /// If backward repeats an op of forward: how that one used its input.
    pub(super) once_more: Option<Used>,
    /// The length of the longest chain of tensors that are computed from each other to compute an input again, if any is.
    pub(super) of_recomputed: Option<usize>,
    /// How the result may be computed again.
    pub(super) again: Option<Again<B>>,
    /// What the result is to a batch normalization, if anything.
    pub(super) norm: Option<Arc<Norm<B>>>,
    /// What the result is to a softmax, if anything.
    pub(super) role: Option<Arc<Role<B>>>,
    /// What the result is to a layer normalization, if anything.
    pub(super) row_norm: Option<Arc<RowNorm<B>>>,
    /// What the result is to a rotation, if anything.
    pub(super) rotation: Option<Arc<Rotation<B>>>,
    /// What the result has from the first float input, if there is one.
    pub(super) inherited: Option<Inherited<B>>,
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
    /// Whether a float input is cast from the narrower dtype that it was computed in.
    pub(super) of_exact: bool,
    /// Whether the op multiplies by a gate, or what was multiplied by one.
    gates: bool,
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
            norm: None,
            role: None,
            row_norm: None,
            rotation: None,
            inherited: None,
            dims: Vec::new(),
            shape: None,
            draws_mask: false,
            names: None,
            constants: Constants::default(),
            watched: false,
            stored: Vec::new(),
            gates: false,
            of_exact: false,
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
                self.only = identity;
                self.inherited = Some(Inherited::new(self.op, tensor));
                self.inputs = Some(Inputs::new(tensor));
            }
        }
        self.see_layer(tensor.layer());
        self.of_recomputed = self.of_recomputed.max(tensor.recomputed());
        self.of_exact |= tensor.exact().is_some();
        self.gates |=
            self.op == Op::float_mul && matches!(tensor.part(), Some(Part::Gate | Part::Gated));
        self.lineage.see(tensor);
    }

    pub(crate) fn see_shape(&mut self, shape: &Shape) {
        if matches!(
            self.op,
            Op::float_reshape | Op::float_expand | Op::float_random
        ) {
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

    /// Whether the backend computes the op in `dtype` and stores it so, and no layer watches it.
    pub(super) fn is_plain(&self, dtype: DType) -> bool {
        let is = |planned: Option<DType>| planned.is_none_or(|planned| planned == dtype);
        is(self.plan.compute) && is(self.plan.store) && !self.plan.own && !self.watched
    }

    /// Has the layer run the op itself. `None` if it does not after all; the op then goes on to the backend.
    pub(crate) fn run(&mut self, tensors: Vec<LayeredFloat<B>>) -> Option<LayeredFloat<B>> {
        let (Some(layer), Some(inputs)) = (&self.layer, &self.inputs) else {
            return None;
        };
        self.ends_kernels();
        let ran = layer.run(&Run {
            op: self.op,
            store: self.plan.store,
            inputs,
            sums_batch: false,
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
        self.casts_viewed(&tensor);
        match self.plan.compute {
            // A copy for a read is read by another thread, which must be the last to hold it: of fusion's tensors that are given up in
            // two threads at once, either may be dropped before it is used.
            Some(dtype)
                if self.plan.is_wide_inside()
                    || self.sums_cast()
                    || self.op == Op::float_into_data =>
            {
                tensor.into_dtype_once(dtype)
            }
            Some(dtype) => tensor.into_dtype(dtype),
            None => tensor.into_storage(),
        }
    }

    /// Called when all inputs are lowered. A kernel that computes an input again cannot go on beyond a product, or another op
    /// with a backward of its own. So such inputs are given up here, and the backend alone holds those that nobody else needs. A gate
    /// is needed no more after its product, nor is a `silu` after its product with another tensor.
    pub(crate) fn lowered(&self) {
        self.ends_kernels();
        if self.op.has_backward() || self.gates && !self.layer().is_in_backward() {
            self.values.iter().for_each(|value| value.give_up());
        }
    }

    /// Has what is due before an op of a network computed, if this is one. Activations go on in the kernel before.
    fn ends_kernels(&self) {
        if self.op.has_backward() && !self.op.is_cheap() {
            self.layer().ends.now();
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
        let tensor = match self.sums_cast() {
            true => end_of_sum::<B>(tensor),
            false => tensor,
        };
        let tensor = match self.plan.store {
            Some(dtype) if self.widens_gradient(ran_in, dtype) => {
                let tensor = match self.is_alone_in_kernel(&tensor) {
                    true => alone_in_kernel::<B>(tensor),
                    false => tensor,
                };
                return self.widened(tensor, nominal, dtype);
            }
            Some(dtype) if dtype != tensor.dtype() => {
                if let Some(again) = &mut self.again {
                    again.store = Some(dtype);
                }
                LayeredFloat::<B>::new(tensor, nominal, layer.clone()).into_dtype(dtype)
            }
            _ => tensor,
        };
        let tensor = match self.is_alone_in_kernel(&tensor) {
            true => alone_in_kernel::<B>(tensor),
            false => tensor,
        };
        if self.watched {
            self.made(&tensor, ran_in);
        }
        let shape = tensor.shape();
        layer.stored(tensor.dtype(), nominal, shape.num_elements());
        let tensor = self.kept(tensor, nominal);
        let tensor = self.known(tensor, shape);
        self.casts_ahead(&tensor);
        tensor
    }

    /// Whether a gradient is stored in a wider dtype than it is computed in, on a backend that fuses ops, and is cast where it is
    /// needed: that of a weight, which an optimizer reads, or one that other ops of backward read.
    fn widens_gradient(&self, from: DType, to: DType) -> bool {
        let of_product = || self.op == Op::float_matmul && !self.makes_input_gradient();
        from.size() < to.size()
            && self.lineage.is_backward() == Some(true)
            && !self.watched
            && self.layer().is_fused()
            && (self.makes_weight_gradient() || of_product())
    }

    /// A gradient in a wider dtype. It is cast wherever it is needed: what takes it in the narrower one needs no cast.
    pub(super) fn widened(
        &self,
        tensor: FloatTensor<B>,
        nominal: DType,
        dtype: DType,
    ) -> LayeredFloat<B> {
        let (layer, shape, device) = (self.layer(), tensor.shape(), tensor.device());
        let value = Later::Widened(Widened {
            narrow: tensor,
            widen: |narrow, layer, to| {
                let (from, elements) = (narrow.dtype(), narrow.shape().num_elements());
                layer.cast(Cast {
                    from,
                    to,
                    elements,
                    saved: false,
                });
                B::float_cast(narrow, to.into())
            },
        });
        layer.stored(dtype, nominal, shape.num_elements());
        let wide = LayeredFloat::later(value, (shape.clone(), dtype), device, nominal, layer);
        self.known(wide, shape)
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

    /// A result of that shape and dtype that waits until it is needed. It is on the device of `x`, and the program sees its dtype.
    pub(super) fn waiting(
        &self,
        value: Later<FloatTensor<B>>,
        x: &LayeredFloat<B>,
        (shape, dtype): (Shape, DType),
    ) -> LayeredFloat<B> {
        let layer = self.layer();
        layer.stored(dtype, x.dtype(), shape.num_elements());
        let form = (shape.clone(), dtype);
        let tensor = LayeredFloat::later(value, form, x.storage_device(), x.dtype(), layer);
        self.known(tensor, shape)
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
