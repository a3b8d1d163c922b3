#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod backend;
mod custom_op;
mod device;
mod error;
mod layer;
mod layers;
mod op;
mod ops;
mod serve;
mod tensor;

pub use backend::Layered;
pub use burn_router::CustomOpHandler;
pub use custom_op::Handlers;
pub use device::LayeredDevice;
pub use error::LayerError;
pub use layer::{Cast, Inputs, Layer, Plan, Reduced};
pub use layers::{Layers, Stack};
pub use op::Op;
pub use tensor::{Deferred, LayeredFloat, LayeredTensor};
