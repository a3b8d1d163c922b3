#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

#[cfg(all(feature = "cubecl", not(feature = "cuda")))]
mod absent;
#[cfg(any(test, feature = "cuda"))]
mod agreement;
#[cfg(feature = "cuda")]
mod algorithms;
#[cfg(any(test, feature = "cuda"))]
mod arrays;
#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
mod capture;
mod error;
#[cfg(feature = "cuda")]
mod ffi;
#[cfg(feature = "cubecl")]
mod operands;
mod product;
#[cfg(feature = "cuda")]
pub mod stream;

#[cfg(feature = "cubecl")]
use std::sync::Arc;

#[cfg(feature = "cubecl")]
use burn_cubecl::CubeDevice;

#[cfg(all(feature = "cubecl", not(feature = "cuda")))]
pub use absent::Library;
pub use error::ProductError;
#[cfg(feature = "cuda")]
pub use ffi::Library;
#[cfg(feature = "cubecl")]
pub use operands::Operands;
pub use product::{Element, Matrices, Order, Product};

/// cuBLASLt for a device, if it is an NVIDIA GPU and the library is installed. If not, the log says why, once.
///
/// ```
/// use burn_cubecl::CubeDevice;
///
/// // `None` without the feature `cuda` or without a GPU.
/// let library = burn_cublaslt::library(&CubeDevice::default());
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
