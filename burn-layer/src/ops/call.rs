//! One op on its way through a layer.

use crate::{
    Descent, Inputs, LayerSet, LayeredDevice, LayeredFloat, LayeredTensor, Made, Op, Plan, Run,
    reduce::Viewed, scope, scope::Scope, tensor::Rows,
};
use burn_backend::{DType, Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use std::sync::Arc;

/// An op that runs: its arguments are [seen](Call::see_float), the layer [plans](Call::plan), the
/// arguments are [lowered](Call::lower) and the results wrapped.
pub(crate) struct Call<B: BackendIr> {
    op: Op,
    layer: Option<Arc<LayerSet>>,
    inputs: Option<Inputs>,
    /// The first float input's [identity](LayeredFloat::identity), while all are that tensor.
    only: Option<usize>,
    plan: Plan,
    /// The scope that the op was started in.
    scope: Option<Arc<Scope>>,
    /// Otherwise the scope of the forward that it is the backward of.
    forward: Option<Arc<Scope>>,
    /// The scopes that the float inputs were used in before, once there are any.
    used_in: Vec<Option<Arc<Scope>>>,
    /// The rows of a tensor that is reshaped or transposed.
    rows: Option<Arc<Rows>>,
    /// What is kept for what the op makes of its first float input.
    descent: Option<Descent>,
    /// The dimensions that a transposition is about.
    dims: Vec<usize>,
    /// Whether a layer watches what ops make.
    watched: bool,
    /// The float inputs as the op gets them, when watched.
    lowered: Vec<Viewed<B>>,
}

impl<B: BackendIr> Call<B> {
    pub(crate) fn new(op: Op, scope: Option<Arc<Scope>>) -> Self {
        Self {
            op,
            layer: None,
            inputs: None,
            only: None,
            plan: Plan::default(),
            scope,
            forward: None,
            used_in: Vec::new(),
            rows: None,
            descent: None,
            dims: Vec::new(),
            watched: false,
            lowered: Vec::new(),
        }
    }

    pub(crate) fn see_float(&mut self, tensor: &LayeredFloat<B>) {
        let identity = Some(tensor.identity());
        match &mut self.inputs {
            Some(inputs) => {
                self.only = self.only.filter(|_| self.only == identity);
                inputs.add(tensor, self.only.is_some());
            }
            None => {
                self.only = identity;
                if steps(self.op) {
                    self.descent = tensor.rows().descent.get().cloned();
                }
                let storage = tensor.storage_dtype();
                self.inputs = Some(Inputs {
                    nominal: tensor.dtype(),
                    first: storage,
                    first_transposed: tensor.columns().is_some(),
                    last_transposed: tensor.columns().is_some(),
                    widest: storage,
                    shapes: vec![tensor.shape()],
                    mixed: false,
                    same: false,
                    mirrored: false,
                    scope: None,
                    first_rows: tensor.rows().clone(),
                    first_columns: tensor.columns().cloned(),
                });
            }
        }
        self.see_layer(tensor.layer());
        if self.op == Op::float_reshape || transposes(self.op) {
            self.rows = Some(tensor.rows().clone());
        }
        if scope::any() {
            self.see_scope(tensor);
        }
    }

    fn see_scope(&mut self, tensor: &LayeredFloat<B>) {
        match &self.scope {
            // What backward needs of a forward is used in the forward's scope.
            Some(scope) if self.op.has_backward() => tensor.set_used_in(scope),
            Some(_) => {}
            None => {
                let counts = self.op != Op::float_matmul || tensor.columns().is_some();
                let used_in = counts.then(|| tensor.used_in()).flatten();
                self.used_in.push(used_in);
            }
        }
    }

    /// The scope of the forward that this op is the backward of.
    fn scope_of_forward(&mut self) -> Option<Arc<Scope>> {
        let mut used_in = core::mem::take(&mut self.used_in);
        if self.op == Op::float_matmul || transposes(self.op) {
            return used_in.into_iter().flatten().next();
        }
        // The last input of a backward op is a gradient, the others belong to the forward.
        used_in.pop();
        let all = self.op.is_backward() && used_in.iter().all(Option::is_some);
        all.then(|| used_in.into_iter().flatten().next())?
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

    /// A device argument says where the result lives, whatever the inputs' device.
    pub(crate) fn see_device(&mut self, device: &LayeredDevice<B::Device>) {
        self.layer = Some(device.layer().clone());
    }

    pub(crate) fn plan(&mut self) {
        let forward = self.scope_of_forward();
        let scope = self.scope.clone().or_else(|| forward.clone());
        self.forward = forward;
        let Some(layer) = &self.layer else {
            return;
        };
        self.watched = layer.watches();
        let Some(inputs) = &mut self.inputs else {
            return;
        };
        inputs.scope = scope;
        self.plan = match self.op {
            // What the program reads is in the dtype that it sees.
            Op::float_into_data => Plan::compute(inputs.nominal),
            op => layer.plan(op, inputs),
        };
        if self.plan.own && !self.op.gives_float() {
            self.plan = inputs.promote();
        }
        if !self.plan.own {
            layer.ran(self.op, self.plan.compute.unwrap_or(inputs.widest));
        }
    }

    /// Whether the layer said that it runs the op itself.
    pub(crate) fn is_own(&self) -> bool {
        self.plan.own
    }

    /// The op as the layer runs it itself. Where it does not after all, the op goes on to the backend.
    pub(crate) fn run(&mut self, tensors: Vec<LayeredFloat<B>>) -> Option<LayeredFloat<B>> {
        let (Some(layer), Some(inputs)) = (&self.layer, &self.inputs) else {
            return None;
        };
        let ran = layer.run(&Run {
            op: self.op,
            store: self.plan.store,
            scope: inputs.scope.as_deref(),
            inputs: &tensors,
        });
        let Some(ran) = ran else {
            self.plan = inputs.promote();
            layer.ran(self.op, self.plan.compute.unwrap_or(inputs.widest));
            return None;
        };
        if self.watched {
            let seen = tensors
                .into_iter()
                .map(|tensor| Viewed(tensor.into_storage()));
            self.lowered.extend(seen);
        }
        let tensor = ran.0.downcast::<FloatTensor<B>>();
        Some(self.float(*tensor.expect("the kernel is of the backend underneath")))
    }

    pub(crate) fn lower(&mut self, tensor: LayeredFloat<B>) -> FloatTensor<B> {
        let tensor = match self.plan.compute {
            Some(dtype) => tensor.into_dtype(dtype),
            None => tensor.into_storage(),
        };
        if self.watched {
            self.lowered.push(Viewed(tensor.clone()));
        }
        tensor
    }

    /// A float result: the program sees the dtype of the inputs, or without any what was computed.
    pub(crate) fn float(&self, tensor: FloatTensor<B>) -> LayeredFloat<B> {
        let nominal = match &self.inputs {
            Some(inputs) => inputs.nominal,
            None => tensor.dtype(),
        };
        self.wrap(tensor, nominal)
    }

    /// The result of an op that the program asked a dtype of.
    pub(crate) fn recast(&self, tensor: FloatTensor<B>) -> LayeredFloat<B> {
        let nominal = tensor.dtype();
        self.wrap(tensor, nominal)
    }

    fn wrap(&self, tensor: FloatTensor<B>, nominal: DType) -> LayeredFloat<B> {
        let layer = self.layer();
        if self.watched {
            self.made(&tensor);
        }
        let tensor = match self.plan.store {
            Some(dtype) if dtype != tensor.dtype() => {
                LayeredFloat::<B>::new(tensor, nominal, layer.clone()).into_dtype(dtype)
            }
            _ => tensor,
        };
        layer.stored(tensor.dtype(), nominal, tensor.shape().num_elements());
        let shape = tensor.shape();
        let tensor = LayeredFloat::new(tensor, nominal, layer);
        if transposes(self.op)
            && let Some(scope) = &self.forward
        {
            tensor.set_used_in(scope);
        }
        if let (Some(descent), Some(inputs)) = (&self.descent, &self.inputs)
            && inputs.shapes[0] == shape
        {
            tensor.rows().descent.get_or_init(|| descent.clone());
        }
        match (self.op, &self.rows) {
            (Op::float_reshape, Some(rows)) => self.reshaped(tensor, &shape, rows),
            (_, Some(rows)) if self.turns(shape.num_dims()) => {
                tensor.with_columns(Some(rows.clone()))
            }
            _ => tensor,
        }
    }

    /// What a reshape leaves as it was: rows, and whether they are the columns of another tensor.
    fn reshaped(
        &self,
        tensor: LayeredFloat<B>,
        shape: &Shape,
        rows: &Arc<Rows>,
    ) -> LayeredFloat<B> {
        let Some(inputs) = &self.inputs else {
            return tensor;
        };
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

    /// Whether the op swaps the last two of `rank` dimensions and no others.
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

    fn made(&self, output: &FloatTensor<B>) {
        let output = Viewed::<B>(output.clone());
        self.layer().made(&Made {
            op: self.op,
            inputs: self.lowered.iter().map(Viewed::view).collect(),
            output: output.view(),
            scope: self.scope.as_deref().or(self.forward.as_deref()),
        });
    }

    pub(crate) fn tensor<P>(&self, tensor: P) -> LayeredTensor<P> {
        LayeredTensor::new(tensor, self.layer())
    }

    fn layer(&self) -> Arc<LayerSet> {
        let layer = self.layer.as_ref();
        layer
            .expect("every op that returns a tensor takes a tensor or a device")
            .clone()
    }
}

fn transposes(op: Op) -> bool {
    matches!(
        op,
        Op::float_transpose | Op::float_swap_dims | Op::float_permute
    )
}

/// Ops that steps of optimizers are made of.
fn steps(op: Op) -> bool {
    matches!(
        op,
        Op::float_add | Op::float_sub | Op::float_mul_scalar | Op::float_mask_where
    )
}
