//! The devices that the tests run on.

#[cfg(feature = "cpu")]
#[path = "../../../burn-layer/tests/suite/cpu.rs"]
mod cpu;
#[path = "../../../burn-layer/tests/suite/cuda.rs"]
mod cuda;
#[path = "../../../burn-layer/tests/suite/wgpu.rs"]
mod wgpu;

use burn::tensor::{Device, FloatDType, Tensor};

/// Flex, CubeCL's CPU runtime if its feature is on, and an NVIDIA GPU and wgpu's default adapter if they exist.
pub(crate) fn devices() -> Vec<Device> {
    let mut devices = vec![Device::flex()];
    #[cfg(feature = "cpu")]
    devices.push(cpu::cpu());
    devices.extend(cuda::cuda());
    devices.extend(wgpu::wgpu());
    devices
}

/// The largest error of a large product's f32 sums on a device, relative to the sum of the magnitudes of their terms.
pub(crate) fn precision_of_sums(device: &Device) -> f64 {
    match cuda::cuda().as_ref() == Some(device) {
        // Tensor cores may keep only 14 bits: see the README.
        true => 1.0 / 2048.0,
        false => 1e-5,
    }
}

/// Whether kernels take long to compile: on CubeCL's CPU runtime, and on WebGPU, which may be a processor too. Tests run fewer
/// cases there, and all cases on Flex and NVIDIA's GPUs.
pub(crate) fn compiles_for_long(device: &Device) -> bool {
    let known = [
        Device::flex(),
        #[cfg(feature = "cuda")]
        Device::cuda(0),
    ];
    !known.contains(device)
}

/// The float dtypes that a device supports for products and values. WebGPU does not have bf16.
pub(crate) fn float_dtypes(device: &Device) -> Vec<FloatDType> {
    let mut dtypes = vec![FloatDType::F32, FloatDType::F16, FloatDType::BF16];
    dtypes.retain(|dtype| device.supports_dtype(*dtype));
    dtypes
}

pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor
        .cast(burn::tensor::FloatDType::F32)
        .into_data()
        .try_to_vec::<f32>()
        .unwrap()
}

/// A random number generator for tests, so that they do not depend on a device's.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(2).wrapping_add(1))
    }

    pub(crate) fn bits(&mut self) -> u64 {
        // SplitMix64 (Steele, Lea, Flood 2014).
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// Uniform in 0..1.
    pub(crate) fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Normally distributed (Box and Muller).
    pub(crate) fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (core::f32::consts::TAU * self.uniform()).cos()
    }

    pub(crate) fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }

    pub(crate) fn matrix(&mut self, shape: [usize; 2], device: &Device) -> Tensor<2> {
        let data = burn::tensor::TensorData::new(self.normals(shape[0] * shape[1]), shape);
        Tensor::from_data(data, device)
    }
}

/// Signal to quantization noise in dB: 20 log10(|reference| / |reference - value|).
pub(crate) fn sqnr(reference: &[f32], value: &[f32]) -> f64 {
    assert_eq!(reference.len(), value.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let signal = norm(&mut reference.iter().map(|&x| f64::from(x)));
    let noise = norm(
        &mut reference
            .iter()
            .zip(value)
            .map(|(&x, &y)| f64::from(x) - f64::from(y)),
    );
    20.0 * (signal / noise).log10()
}
