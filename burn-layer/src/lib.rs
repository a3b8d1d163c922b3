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
mod plan;
mod reduce;
mod serve;
mod tensor;

pub use backend::Layered;
pub use burn_router::CustomOpHandler;
pub use device::LayeredDevice;
pub use error::LayerError;
pub(crate) use layer::LayerSet;
pub use layer::{Cast, Layer};
pub use layers::Layers;
pub use op::Op;
pub use plan::{Inputs, Plan};
pub use reduce::{FloatView, Reduced};
pub use tensor::{LayeredFloat, LayeredTensor};
