//! CUDA, for the tests of all crates.

use burn::tensor::Device;

/// The first NVIDIA GPU, where the feature is on and there is one.
pub(crate) fn cuda() -> Option<Device> {
    #[cfg(feature = "cuda")]
    {
        if std::path::Path::new("/dev/nvidiactl").exists() || std::env::var_os("PTX_DRIVER").is_some() {
            return Some(Device::cuda(0));
        }
        eprintln!("no NVIDIA GPU on this machine: CUDA is skipped");
    }
    None
}
