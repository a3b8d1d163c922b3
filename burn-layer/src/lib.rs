#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod backend;
#[cfg(feature = "cubecl")]
mod batch_norm;
mod channels;
#[cfg(feature = "cubecl")]
mod cublaslt;
#[cfg(feature = "cubecl")]
mod cudnn;
mod custom_op;
mod deferred;
mod device;
mod ends;
mod error;
#[cfg(feature = "signal")]
mod fft;
mod float;
mod frames;
#[cfg(feature = "cubecl")]
mod fused_call;
mod gradients;
mod held;
mod kept;
mod layer;
#[cfg(feature = "cubecl")]
mod layer_norm;
mod layer_set;
mod layers;
mod lease;
mod mechanisms;
mod messenger;
mod on_stream;
mod op;
mod ops;
mod plan;
mod recent;
mod recompute;
mod reduce;
#[cfg(feature = "cubecl")]
mod rotation;
mod rows;
#[cfg(feature = "cubecl")]
mod rowwise;
mod run;
mod scope;
mod scopes;
mod seen;
mod service;
#[cfg(feature = "cubecl")]
mod softmax;
mod source;
mod tensor;
mod under;
mod view;
mod whole;

pub use backend::Layered;
pub use burn_router::CustomOpHandler;
pub use channels::{fuses_ops, sum_by_channel};
pub use device::LayeredDevice;
pub use error::LayerError;
#[cfg(feature = "signal")]
pub use fft::fft_ops;
pub use float::LayeredFloat;
pub use gradients::{
    Factor, MaxNorm, clip_gradient_norm, gradient_norm, gradient_norm_on_device, scale_gradients,
};
pub use kept::{Descent, Kept, WeakDescent};
pub use layer::{Cast, Layer, Made};
pub(crate) use layer_set::LayerSet;
pub use layers::Layers;
pub use lease::Lease;
pub use op::Op;
pub use plan::{Inputs, Plan};
pub use reduce::{FloatView, Reduced};
pub use run::{Ran, Run, RunInput};
pub use scope::scoped;
pub use tensor::LayeredTensor;
pub use under::device_under;
pub use whole::ops_come_whole;
