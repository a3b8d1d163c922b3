//! The ways to compute a product, and which of them a product takes.

use std::{
    fmt,
    str::FromStr,
    sync::{OnceLock, RwLock},
};

use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;

use super::{
    Product, Size, decoded, direct,
    tile::{Instruction, Tile},
};
use crate::Granularity;

/// A way to compute a product.
pub(super) trait Routine: Send + Sync {
    /// Whether it can compute products of these sizes and granularities. What fits, fits with smaller sizes too that are
    /// not 0.
    fn fits(&self, _size: Size, _granularities: [Granularity; 2]) -> bool {
        true
    }

    /// Whether the device of `client` has the shared memory that it takes.
    fn has_room(&self, _client: &Client) -> bool {
        true
    }

    /// Whether the device of `client` has what makes the routine fast.
    fn is_native(&self, _client: &Client) -> bool {
        true
    }

    /// The product, which [`fits`](Self::fits), on a device that [has room](Self::has_room).
    fn matmul(&self, product: Product) -> CubeTensor;
}

/// The kernels that [`scaled_matmul`](crate::scaled_matmul) has on CubeCL's devices.
///
/// Any of them can be run on any device with 64-bit integers. Where it lacks the instruction of one, or its runtime is not
/// CUDA's C++ backend (feature `cuda-cpp`), that instruction and the copies ahead of it are replaced by loops: right, and
/// slow. So all around it can be tested without the GPU. Those of tensor cores take 96 (`mma`) or 128 KiB of shared memory,
/// which GPUs by way of WebGPU often do not give.
///
/// ```
/// use burn_fp8::kernels::MatmulRoutine;
///
/// assert_eq!("wgmma".parse(), Ok(MatmulRoutine::Wgmma));
/// assert_eq!(MatmulRoutine::Wgmma.to_string(), "wgmma");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatmulRoutine {
    /// One kernel that decodes codes in registers, for small products.
    Direct,
    /// Both operands are decoded to bf16 (f32 on processors), and multiplied by Burn's own kernels.
    Decoded,
    /// fp8 `mma.sync`: compute capability 8.9 and 12.x.
    Mma,
    /// fp8 `wgmma`: compute capability 9.0.
    Wgmma,
    /// The same with operands loaded by the tensor memory accelerator.
    WgmmaTma,
}

const MMA: Tile = Tile {
    instruction: Instruction::Mma,
    tma: false,
};

const WGMMA: Tile = Tile {
    instruction: Instruction::Wgmma,
    tma: false,
};

const WGMMA_TMA: Tile = Tile {
    instruction: Instruction::Wgmma,
    tma: true,
};

impl MatmulRoutine {
    /// All routines.
    pub const ALL: [Self; 5] = [
        Self::Direct,
        Self::Decoded,
        Self::Mma,
        Self::Wgmma,
        Self::WgmmaTma,
    ];

    pub(super) fn routine(self) -> &'static dyn Routine {
        match self {
            Self::Direct => &direct::Direct,
            Self::Decoded => &decoded::Decoded,
            Self::Mma => &MMA,
            Self::Wgmma => &WGMMA,
            Self::WgmmaTma => &WGMMA_TMA,
        }
    }

    /// The routine that runs on tensor cores, if this is one.
    pub(super) fn tile(self) -> Option<&'static Tile> {
        match self {
            Self::Direct | Self::Decoded => None,
            Self::Mma => Some(&MMA),
            Self::Wgmma => Some(&WGMMA),
            Self::WgmmaTma => Some(&WGMMA_TMA),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Decoded => "decoded",
            Self::Mma => "mma",
            Self::Wgmma => "wgmma",
            Self::WgmmaTma => "wgmma-tma",
        }
    }
}

impl fmt::Display for MatmulRoutine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for MatmulRoutine {
    type Err = UnknownRoutine;

    fn from_str(name: &str) -> Result<Self, UnknownRoutine> {
        Self::ALL
            .into_iter()
            .find(|routine| routine.name() == name)
            .ok_or_else(|| UnknownRoutine(name.to_string()))
    }
}

/// A name that no [`MatmulRoutine`] has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no matmul routine is called {0:?}: there are direct, decoded, mma, wgmma and wgmma-tma")]
pub struct UnknownRoutine(pub String);

/// How [`scaled_matmul`](crate::scaled_matmul) picks its kernel on CubeCL's devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatmulPolicy {
    /// By device and size. Very large products go to cuBLASLt where it is installed. Where a GPU has more than one routine
    /// for a large product, the first product of a size measures them.
    #[default]
    Automatic,
    /// The first product of a size measures every routine that the device has what it takes for.
    Measured,
    /// This one, wherever it can compute the product.
    Only(MatmulRoutine),
}

static POLICY: RwLock<Option<MatmulPolicy>> = RwLock::new(None);

/// Sets how the kernels of products are picked, in this process, from now on.
///
/// Without a call it is what the environment variable `BURN_FP8_MATMUL` says: the name of a routine, or `measured`.
///
/// ```
/// use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, matmul_policy, set_matmul_policy};
///
/// set_matmul_policy(MatmulPolicy::Only(MatmulRoutine::Direct));
/// assert_eq!(matmul_policy(), MatmulPolicy::Only(MatmulRoutine::Direct));
/// set_matmul_policy(MatmulPolicy::Automatic);
/// ```
pub fn set_matmul_policy(policy: MatmulPolicy) {
    *POLICY.write().unwrap_or_else(|e| e.into_inner()) = Some(policy);
}

/// How the kernels of products are picked now. See [`set_matmul_policy`].
pub fn matmul_policy() -> MatmulPolicy {
    let set = *POLICY.read().unwrap_or_else(|e| e.into_inner());
    set.unwrap_or_else(environment)
}

fn environment() -> MatmulPolicy {
    static ENVIRONMENT: OnceLock<MatmulPolicy> = OnceLock::new();
    *ENVIRONMENT.get_or_init(|| match std::env::var("BURN_FP8_MATMUL").as_deref() {
        Err(_) | Ok("") => MatmulPolicy::Automatic,
        Ok("measured") => MatmulPolicy::Measured,
        Ok(name) => name.parse().map_or_else(
            |error| {
                log::warn!("BURN_FP8_MATMUL is ignored: {error}");
                MatmulPolicy::Automatic
            },
            MatmulPolicy::Only,
        ),
    })
}
