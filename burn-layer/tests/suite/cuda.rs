//! CUDA, for the tests of all crates.

use burn::tensor::Device;

/// The first NVIDIA GPU, where the feature is on and there is one, or what runs its kernels (`scripts/ptx-driver`).
pub(crate) fn cuda() -> Option<Device> {
    #[cfg(feature = "cuda")]
    {
        let is_run_here = std::env::var_os("PTX_DRIVER").is_some();
        if is_run_here || std::path::Path::new("/dev/nvidiactl").exists() {
            return Some(Device::cuda(0));
        }
        eprintln!("no NVIDIA GPU on this machine: CUDA is skipped");
    }
    None
}
