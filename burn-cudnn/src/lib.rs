#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

#[cfg(all(feature = "cubecl", not(feature = "cuda")))]
mod absent;
mod convolution;
#[cfg(any(test, feature = "cuda"))]
mod direct;
mod error;
#[cfg(feature = "cuda")]
mod ffi;
#[cfg(feature = "cubecl")]
mod operands;

#[cfg(feature = "cubecl")]
use std::sync::Arc;

#[cfg(feature = "cubecl")]
use burn_cubecl::CubeDevice;

#[cfg(all(feature = "cubecl", not(feature = "cuda")))]
pub use absent::Library;
pub use convolution::{Convolution, Element, Wanted};
pub use error::ConvolutionError;
#[cfg(feature = "cuda")]
pub use ffi::Library;
#[cfg(feature = "cubecl")]
pub use operands::Operands;

/// Addresses of tensors are multiples of this, in bytes.
pub const ALIGNMENT: u64 = 16;

/// cuDNN for a device, if it is an NVIDIA GPU, the library is installed, and it computes what it should. If not, the log says why, once.
///
/// ```
/// use burn_cubecl::CubeDevice;
///
/// // `None` without the feature `cuda` or without a GPU.
/// let library = burn_cudnn::library(&CubeDevice::default());
/// # let _ = library;
/// ```
#[cfg(feature = "cubecl")]
pub fn library(device: &CubeDevice) -> Option<Arc<Library>> {
    match device {
        #[cfg(feature = "cuda")]
        CubeDevice::Cuda(device) => ffi::library(device.index),
        _ => None,
    }
}
