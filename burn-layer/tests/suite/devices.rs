//! The plain devices that the tests run on.

#[cfg(feature = "cpu")]
#[path = "cpu.rs"]
mod cpu;
#[path = "cuda.rs"]
mod cuda;
#[path = "wgpu.rs"]
mod wgpu;

use burn::tensor::Device;
use burn_layer::{Layers, Lease};
use cuda::cuda;
use std::{cell::RefCell, collections::VecDeque};
use wgpu::wgpu;

/// Flex, and wgpu's default adapter and an NVIDIA GPU, each where its feature is on and there is one.
pub(crate) fn devices() -> Vec<Device> {
    let gpus = wgpu().into_iter().chain(cuda());
    [Device::flex()].into_iter().chain(gpus).collect()
}

/// These, and CubeCL's CPU runtime where its feature is on.
pub(crate) fn devices_and_cpu() -> Vec<Device> {
    #[allow(unused_mut)]
    let mut devices = devices();
    #[cfg(feature = "cpu")]
    devices.push(cpu::cpu());
    devices
}

/// How exact products of f32 are. On an NVIDIA GPU, CubeCL's tuner may pick its tensor cores, which round factors to TF32.
pub(crate) fn exact(plain: &Device) -> f64 {
    match format!("{plain:?}").contains("Cuda") {
        true => 1.0 / 1024.0,
        false => 1e-5,
    }
}

/// Devices for the thread that asks for them, which runs one test: each that lives has threads that look for work, and many take the
/// machine from what computes. So the latest [few](AT_ONCE) of a thread live, and those with tensors.
pub(crate) trait Leased {
    fn leased(self) -> Device;
}

/// The most devices without tensors that a test uses at once.
const AT_ONCE: usize = 4;

impl Leased for Layers {
    fn leased(self) -> Device {
        thread_local! {
            static LEASES: RefCell<VecDeque<Lease>> = RefCell::default();
        }
        LEASES.with_borrow_mut(|leases| leases.truncate(AT_ONCE - 1));
        let lease = self.lease().unwrap();
        let device = lease.device();
        LEASES.with_borrow_mut(|leases| leases.push_front(lease));
        device
    }
}
