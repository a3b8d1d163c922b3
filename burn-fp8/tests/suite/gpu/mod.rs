//! A GPU that CubeCL takes for NVIDIA's, but that does not exist: kernels are compiled to PTX by NVRTC, as in CubeCL's CUDA
//! runtime, and run by [`ptx_machine`].
//!
//! So everything that leads to a kernel is tested too: layouts, the order of arguments, tensor maps, the size of a grid.

mod server;

use std::{
    ops::Deref,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU16, Ordering},
    },
};

use burn::tensor::{DType, Shape};
use burn_cubecl::{
    CubeDevice,
    cubecl::{
        client::Client,
        ir::{
            DeviceIdentity, DeviceProperties, HardwareProperties, MemoryDeviceProperties,
            OpaqueType, VectorSize, features::Tma,
        },
        profile,
    },
    tensor::CubeTensor,
};
use burn_std::Metadata;
use cubecl_common::device::DeviceId;
use cubecl_cpp::{
    register_supported_types,
    shared::{CompilationOptions, CppSupportedFeatures},
};

use super::nvrtc;
use server::{LAUNCHES, Machine};

/// A GPU, identified by its compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Gpu {
    /// 8.0.
    Ampere,
    /// 8.9.
    Ada,
    /// 9.0.
    Hopper,
}

impl Gpu {
    /// Exclusive use of a GPU, if NVRTC is installed and this build would use inline PTX on a real GPU.
    pub(crate) fn client(self) -> Option<Lease> {
        self.lease(true)
    }

    /// The kernels that `launch` launches, without running them: their names, with the grid, and their CUDA C++. `None` if there
    /// is no [`client`](Self::client).
    pub(crate) fn kernels(self, launch: impl FnOnce(&Client)) -> Option<Vec<(String, Arc<str>)>> {
        let client = self.lease(false)?;
        launch(&client);
        Some(launches(&client))
    }

    fn lease(self, runs: bool) -> Option<Lease> {
        static NUMBER: AtomicU16 = AtomicU16::new(0);
        if cfg!(all(feature = "cuda", not(feature = "cuda-cpp"))) {
            eprintln!(
                "CUDA here is CubeCL's LLVM backend: skipped (with the feature `cuda-cpp` it is not)"
            );
            return None;
        }
        nvrtc::toolkit()?;
        let kind = 2 * self as u16 + u16::from(runs);
        let idle = IDLE
            .lock()
            .unwrap()
            .extract_if(.., |(idle, _)| *idle == kind)
            .next();
        let (_, client) = idle.unwrap_or_else(|| {
            let number = 6 * NUMBER.fetch_add(1, Ordering::Relaxed) + kind;
            (kind, Client::load::<Machine>(DeviceId::new(0, number)))
        });
        let service = client.service_id();
        LAUNCHES
            .lock()
            .unwrap()
            .retain(|launch| launch.0 != service);
        Some(Lease { kind, client })
    }

    /// The GPU that a device is, and whether it runs kernels.
    fn of(device: DeviceId) -> (Self, bool) {
        let gpu = match device.index_id % 6 / 2 {
            0 => Self::Ampere,
            1 => Self::Ada,
            _ => Self::Hopper,
        };
        (gpu, device.index_id % 2 == 1)
    }

    /// NVRTC's name for the architecture. CubeCL adds the `a` from 9.0 on.
    fn architecture(self) -> &'static str {
        match self {
            Self::Ampere => "80",
            Self::Ada => "89",
            Self::Hopper => "90a",
        }
    }

    /// The properties of such a GPU that CubeCL's CUDA runtime would find, as far as these kernels depend on them.
    fn properties(self) -> DeviceProperties {
        let hardware = HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: self.shared_memory(),
            max_cube_count: (i32::MAX as u32, 0xFFFF, 0xFFFF),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(3),
            num_tensor_cores: Some(4),
            min_tensor_cores_dim: Some(8),
            num_cpu_cores: None,
            last_level_cache_size: None,
            max_vector_size: VectorSize::MAX,
            cube_mma_reserved_shared_memory: 0,
        };
        let fingerprint = match self {
            Self::Ampere => "ptx_sm80",
            Self::Ada => "ptx_sm89",
            Self::Hopper => "ptx_sm90",
        };
        let identity = DeviceIdentity {
            name: format!("{self:?}"),
            fingerprint: fingerprint.into(),
            physical: None,
        };
        let memory = MemoryDeviceProperties::new(1 << 30, 4);
        let timing = profile::TimingMethod::System;
        let mut properties =
            DeviceProperties::new(Default::default(), memory, hardware, timing, identity);
        register_supported_types(&mut properties);
        properties.register_opaque_type(OpaqueType::Barrier);
        properties.features.memory_reinterpret = true;
        properties.features.alignment = true;
        properties.features.device_memory_scope = true;
        properties.features.copy_async = true;
        if self == Self::Hopper {
            properties.features.tma.insert(Tma::Base);
            properties.register_opaque_type(OpaqueType::TensorMap);
        }
        properties
    }

    /// The options with which CubeCL's CUDA runtime compiles for it.
    fn options(self) -> CompilationOptions {
        let hopper = self == Self::Hopper;
        CompilationOptions {
            supports_features: CppSupportedFeatures {
                grid_constants: true,
                clusters: hopper,
                fast_math: true,
                fast_tanh: true,
                elect_sync: hopper,
                dp4a: true,
            },
            ..Default::default()
        }
    }

    /// The shared memory of a block, by the CUDA C++ programming guide's table of compute capabilities.
    fn shared_memory(self) -> usize {
        match self {
            Self::Ampere => 163 << 10,
            Self::Ada => 99 << 10,
            Self::Hopper => 227 << 10,
        }
    }
}

/// GPUs that are not in use. They are reused because CubeCL keeps a thread for every GPU that ever existed.
static IDLE: Mutex<Vec<(u16, Client)>> = Mutex::new(Vec::new());

/// A client of a GPU, for exclusive use.
pub(crate) struct Lease {
    /// Which GPU it is, and whether it runs kernels.
    kind: u16,
    client: Client,
}

impl Deref for Lease {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A GPU on which something failed goes on failing, so it is not reused.
        if !std::thread::panicking() {
            IDLE.lock().unwrap().push((self.kind, self.client.clone()));
        }
    }
}

/// A tensor on a GPU of this kind, in the layout that Burn gives to data: with gaps between rows.
pub(crate) fn tensor(client: &Client, bytes: &[u8], shape: &[usize], dtype: DType) -> CubeTensor {
    let shape = Shape::from(shape);
    let memory = client.create_tensor_from_slice(bytes, shape.clone(), dtype.size());
    let layout = Metadata::new(shape, memory.strides);
    let device = CubeDevice::Cpu(Default::default());
    CubeTensor::new(client.clone(), memory.memory, layout, device, dtype)
}

/// The elements of a tensor, in any layout.
pub(crate) fn elements<const N: usize>(tensor: &CubeTensor) -> Vec<[u8; N]> {
    let bytes = tensor.client.read_one(tensor.handle.clone());
    let bytes = bytes.unwrap_or_else(|error| panic!("{error}"));
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let count: usize = shape.iter().product();
    (0..count)
        .map(|mut index| {
            let mut place = 0;
            for dim in (0..shape.num_dims()).rev() {
                place += index % shape[dim] * strides[dim];
                index /= shape[dim];
            }
            bytes[N * place..][..N].try_into().unwrap()
        })
        .collect()
}

/// The names of the kernels that a GPU has run since it was leased, with their grids.
pub(crate) fn launched(client: &Client) -> Vec<String> {
    let launches = launches(client).into_iter();
    launches.map(|(name, _)| name).collect()
}

fn launches(client: &Client) -> Vec<(String, Arc<str>)> {
    client.flush().unwrap();
    let launches = LAUNCHES.lock().unwrap();
    let own = launches
        .iter()
        .filter(|launch| launch.0 == client.service_id());
    own.map(|launch| (launch.1.clone(), launch.2.clone()))
        .collect()
}
