//! The GPUs that this driver may say to have.

/// A GPU, by the CUDA C++ programming guide's table of compute capabilities and the data sheet of a card.
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) capability: [i32; 2],
    /// The shared memory of a processor, in KiB. A block may have one less.
    shared_memory: i32,
    /// The most threads of a processor, in warps.
    warps: i32,
}

const MODELS: [(&str, Model); 3] = [
    (
        "sm_80",
        Model {
            name: "NVIDIA A100-SXM4-80GB",
            capability: [8, 0],
            shared_memory: 164,
            warps: 64,
        },
    ),
    (
        "sm_89",
        Model {
            name: "NVIDIA GeForce RTX 4090",
            capability: [8, 9],
            shared_memory: 100,
            warps: 48,
        },
    ),
    (
        "sm_90",
        Model {
            name: "NVIDIA H200",
            capability: [9, 0],
            shared_memory: 228,
            warps: 64,
        },
    ),
];

/// The memory of the GPU, of which the host gives what is used. Pools of CubeCL's, of which every stream has its own, take more than they
/// need, and no more at once than a part of the memory; cuBLASLt's workspace is 32 MiB.
pub(crate) const MEMORY: usize = 1 << 30;
/// CubeCL measures what a device can do by work for all processors, so there are few here.
const PROCESSORS: i32 = 2;

impl Model {
    /// The one that the environment names.
    pub(crate) fn chosen() -> Result<&'static Self, String> {
        let name = std::env::var("PTX_DRIVER_GPU").unwrap_or("sm_90".into());
        let found = MODELS.iter().find(|(known, _)| *known == name);
        found.map(|(_, model)| model).ok_or_else(|| {
            format!("PTX_DRIVER_GPU is {name:?}, where sm_80, sm_89 and sm_90 are known")
        })
    }

    /// `cuDeviceGetAttribute`, by the number of `CUdevice_attribute`. What is not listed is 1: supported.
    pub(crate) fn attribute(&self, number: i32) -> i32 {
        match number {
            // Threads of a block, in all and by axis.
            1..=3 => 1024,
            4 => 64,
            // Blocks of a grid.
            5 => i32::MAX,
            6 | 7 => 0xFFFF,
            // Shared memory of a block, of a processor, and of a block that asks for more.
            8 => 48 << 10,
            81 => self.shared_memory << 10,
            97 => (self.shared_memory - 1) << 10,
            // Constant memory, threads of a warp, and registers of a block and of a processor.
            9 => 64 << 10,
            10 => 32,
            12 | 82 => 64 << 10,
            // kHz.
            13 => 1_980_000,
            16 => PROCESSORS,
            // The cache.
            38 => 256 << 10,
            39 => 32 * self.warps,
            75 => self.capability[0],
            76 => self.capability[1],
            106 => 32,
            _ => 1,
        }
    }
}
