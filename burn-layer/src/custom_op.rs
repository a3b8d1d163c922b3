//! Custom ops of backend extensions on layered devices.

use crate::{Layered, LayeredFloat, LayeredTensor};
use burn_backend::DType;
use burn_ir::{BackendIr, HandleContainer, HandleKind, TensorIr, TensorStatus};
use burn_router::{CustomOpHandler, CustomOpRegistry};
use std::sync::Arc;

/// Custom ops by the name that a backend extension ships them under.
///
/// The handlers are those of the backend *underneath* the layers: a custom op sees plain tensors of
/// that backend in the dtypes that the program sees, and runs its kernels unchanged.
pub(crate) struct Handlers<B: BackendIr>(Vec<(String, CustomOpHandler<B>)>);

impl<B: BackendIr> Default for Handlers<B> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<B: BackendIr, S: Into<String>> FromIterator<(S, CustomOpHandler<B>)> for Handlers<B> {
    fn from_iter<I: IntoIterator<Item = (S, CustomOpHandler<B>)>>(iter: I) -> Self {
        Self(iter.into_iter().map(|(id, op)| (id.into(), op)).collect())
    }
}

impl<B: BackendIr> Handlers<B> {
    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    pub(crate) fn into_registry(self) -> CustomOpRegistry<B> {
        let mut registry = CustomOpRegistry::new();
        for (id, handler) in self.0 {
            registry.register(&id, move |handles, ir, device| handler(handles, ir, device));
        }
        registry
    }

    /// The same ops on `B` under layers.
    pub(crate) fn lift(self) -> Handlers<Layered<B>> {
        self.0
            .into_iter()
            .map(|(id, handler)| (id, lift::<B>(handler)))
            .collect()
    }
}

fn lift<B: BackendIr>(handler: CustomOpHandler<B>) -> CustomOpHandler<Layered<B>> {
    Arc::new(move |handles, ir, device| {
        let mut base = HandleContainer::new();
        for input in &ir.inputs {
            match handles.get_tensor_handle(input).handle {
                HandleKind::Float(tensor) => {
                    base.register_float_tensor::<B>(&input.id, tensor.into_nominal());
                }
                HandleKind::Int(tensor) => {
                    base.register_int_tensor::<B>(&input.id, tensor.into_storage());
                }
                HandleKind::Bool(tensor) => {
                    base.register_bool_tensor::<B>(&input.id, tensor.into_storage());
                }
                HandleKind::Quantized(tensor) => {
                    base.register_quantized_tensor::<B>(&input.id, tensor.into_storage());
                }
            }
        }
        handler(&mut base, ir, device.base());
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
                dtype if dtype.is_float() => HandleKind::Float(LayeredFloat::new(
                    base.get_float_tensor::<B>(&taken),
                    dtype,
                    layer,
                )),
                _ => HandleKind::Int(LayeredTensor::new(base.get_int_tensor::<B>(&taken), layer)),
            };
            handles.register_handle(output.id, handle);
        }
    })
}
