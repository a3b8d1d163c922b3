//! One op on its way through a layer.

use crate::{Inputs, LayerSet, LayeredDevice, LayeredFloat, LayeredTensor, Op, Plan};
use burn_backend::{Backend, DType, TensorMetadata, tensor::FloatTensor};
use core::marker::PhantomData;
use std::sync::Arc;

/// An op that runs: its arguments are [seen](Call::see_float), the layer [plans](Call::plan), the
/// arguments are [lowered](Call::lower) and the results wrapped.
pub(crate) struct Call<B: Backend> {
    op: Op,
    layer: Option<Arc<LayerSet>>,
    inputs: Option<Inputs>,
    plan: Plan,
    backend: PhantomData<B>,
}

impl<B: Backend> Call<B> {
    pub(crate) fn new(op: Op) -> Self {
        Self {
            op,
            layer: None,
            inputs: None,
            plan: Plan::default(),
            backend: PhantomData,
        }
    }

    pub(crate) fn see_float(&mut self, tensor: &LayeredFloat<B>) {
        let storage = tensor.storage_dtype();
        self.inputs = Some(match self.inputs {
            Some(inputs) => inputs.with(storage),
            None => Inputs {
                nominal: tensor.dtype(),
                first: storage,
                first_transposed: tensor.is_transposed(),
                widest: storage,
                mixed: false,
            },
        });
        self.see_layer(tensor.layer());
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
        let (Some(layer), Some(inputs)) = (&self.layer, &self.inputs) else {
            return;
        };
        self.plan = match self.op {
            // What the program reads is in the dtype that it sees.
            Op::float_into_data => Plan::compute(inputs.nominal),
            op => layer.plan(op, inputs),
        };
        layer.ran(self.op, self.plan.compute.unwrap_or(inputs.widest));
    }

    pub(crate) fn lower(&self, tensor: LayeredFloat<B>) -> FloatTensor<B> {
        match self.plan.compute {
            Some(dtype) => tensor.into_dtype(dtype),
            None => tensor.into_storage(),
        }
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
        let tensor = match self.plan.store {
            Some(dtype) if dtype != tensor.dtype() => {
                LayeredFloat::<B>::new(tensor, nominal, layer.clone()).into_dtype(dtype)
            }
            _ => tensor,
        };
        let transposes = matches!(
            self.op,
            Op::float_transpose | Op::float_swap_dims | Op::float_permute
        );
        LayeredFloat::new(tensor, nominal, layer).transposed(transposes)
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
