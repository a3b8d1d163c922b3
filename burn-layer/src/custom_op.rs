//! Custom ops of backend extensions on layered devices.

use crate::{Inputs, LayerSet, Layered, LayeredDevice, LayeredFloat, LayeredTensor, Op, scopes};
use burn_backend::{DType, TensorMetadata};
use burn_ir::{BackendIr, HandleContainer, HandleKind, TensorId, TensorIr, TensorStatus};
use burn_router::{CustomOpHandler, CustomOpRegistry};
use std::{collections::HashMap, sync::Arc};

/// Custom ops, by the names under which a backend extension ships them.
///
/// The handlers are those of the backend *underneath* the layers: a custom op sees plain tensors of
/// that backend, and runs its kernels unchanged.
#[derive(Default)]
pub(crate) struct Handlers<B: BackendIr>(Vec<(String, Handler<B>)>);

/// How a custom op runs.
#[derive(Clone)]
struct Handler<B: BackendIr> {
    run: CustomOpHandler<B>,
    /// Burn's op that the layers are asked about for this one. Without one, it has the dtypes that the program sees.
    like: Option<Op>,
}

impl<B: BackendIr> Handlers<B> {
    pub(crate) fn new(
        ops: impl IntoIterator<Item = (&'static str, CustomOpHandler<B>)>,
        like: Option<Op>,
    ) -> Self {
        let ops = ops.into_iter();
        Self(
            ops.map(|(name, run)| (name.to_owned(), Handler { run, like }))
                .collect(),
        )
    }

    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The names, sorted and without duplicates.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.0.iter().map(|(id, _)| id.clone()).collect();
        names.sort();
        names.dedup();
        names
    }

    /// The same ops for `B` under layers.
    pub(crate) fn lift(self) -> Lifted<B> {
        self.0
            .into_iter()
            .map(|(id, handler)| (id, lift::<B>(handler)))
            .collect()
    }

    /// A registry of ops with these names for all devices of a service. Each op calls the handler of the device it runs on.
    pub(crate) fn by_device(names: Vec<String>) -> CustomOpRegistry<Layered<B>> {
        let mut registry = CustomOpRegistry::new();
        let change =
            |_: &mut _, _: &_, device: &LayeredDevice<B::Device>| device.layer().scopes.change();
        registry.register(scopes::CHANGE, change);
        for name in names {
            let id = name.clone();
            registry.register(
                &id,
                move |handles, ir, device: &LayeredDevice<B::Device>| {
                    let find = |ops: &Lifted<B>| ops.get(&name).cloned();
                    let handler = device.layer().custom_ops(find).flatten();
                    let handler =
                        handler.expect("a device has the custom ops that its service names");
                    handler(handles, ir, device);
                },
            );
        }
        registry
    }
}

/// The custom ops of a layered device.
pub(crate) type Lifted<B> = HashMap<String, CustomOpHandler<Layered<B>>>;

fn lift<B: BackendIr>(Handler { run, like }: Handler<B>) -> CustomOpHandler<Layered<B>> {
    Arc::new(move |handles, ir, device| {
        let inputs = ir.inputs.iter();
        let inputs: Vec<_> = inputs
            .map(|input| (input.id, handles.get_tensor_handle(input).handle))
            .collect();
        let as_stored = like.is_some_and(|op| stores_otherwise(op, &inputs, device.layer()));
        let mut base = HandleContainer::new();
        let mut gradient = false;
        for (id, handle) in inputs {
            match handle {
                HandleKind::Float(tensor) => {
                    // A single element may be something else, such as a scale that was shared together with those of gradients.
                    gradient |= tensor.is_gradient() && tensor.shape().num_elements() > 1;
                    let tensor = match as_stored {
                        true => tensor.into_storage(),
                        false => tensor.into_nominal(),
                    };
                    base.register_float_tensor::<B>(&id, tensor);
                }
                HandleKind::Int(tensor) => {
                    base.register_int_tensor::<B>(&id, tensor.into_storage());
                }
                HandleKind::Bool(tensor) => {
                    base.register_bool_tensor::<B>(&id, tensor.into_storage());
                }
                HandleKind::Quantized(tensor) => {
                    base.register_quantized_tensor::<B>(&id, tensor.into_storage());
                }
            }
        }
        run(&mut base, ir, device.base());
        for output in &ir.outputs {
            let layer = device.layer().clone();
            let taken = TensorIr {
                status: TensorStatus::ReadWrite,
                ..output.clone()
            };
            let handle = match output.dtype {
                DType::QFloat(_) => HandleKind::Quantized(LayeredTensor::new(
                    base.get_quantized_tensor::<B>(&taken),
                    layer,
                )),
                DType::Bool(_) => {
                    HandleKind::Bool(LayeredTensor::new(base.get_bool_tensor::<B>(&taken), layer))
                }
                dtype if dtype.is_float() => {
                    let tensor = base.get_float_tensor::<B>(&taken);
                    if as_stored {
                        layer.stored(tensor.dtype(), dtype, tensor.shape().num_elements());
                    }
                    let tensor = LayeredFloat::new(tensor, dtype, layer);
                    HandleKind::Float(tensor.with_gradient(gradient).with_computed(!gradient))
                }
                _ => HandleKind::Int(LayeredTensor::new(base.get_int_tensor::<B>(&taken), layer)),
            };
            handles.register_handle(output.id, handle);
        }
    })
}

/// Whether by the layers the result of `op`, of these inputs, is stored in another dtype than the program sees.
fn stores_otherwise<B: BackendIr>(
    op: Op,
    inputs: &[(TensorId, HandleKind<Layered<B>>)],
    layer: &LayerSet,
) -> bool {
    let mut floats = inputs.iter().filter_map(|(_, handle)| match handle {
        HandleKind::Float(tensor) => Some(tensor),
        _ => None,
    });
    let Some(mut seen) = floats.next().map(Inputs::new) else {
        return false;
    };
    floats.for_each(|tensor| seen.add(tensor, false));
    seen.scope = layer.scopes.now();
    layer.plan(op, &seen).stored(seen.widest) != seen.nominal
}
