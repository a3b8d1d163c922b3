//! The routines that compute products, and the policies that pick one.

use std::{fmt, str::FromStr, sync::OnceLock};

use burn_cubecl::{CubeDevice, tensor::CubeTensor};
use cubecl::client::Client;
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use super::{Outline, Product, Size, cublaslt, decoded, direct, outline::MOST_CODES, tile::Tile};
use crate::kernels::buffer;

/// A routine that computes products.
pub(super) trait Routine: Send + Sync {
    /// Whether the routine can compute products of these sizes and granularities, if the output has no more elements than
    /// [`most`](Self::most).
    fn fits(&self, _outline: &Outline) -> bool {
        true
    }

    /// The maximum number of elements of an output.
    fn most(&self, _size: Size) -> usize {
        buffer::MOST
    }

    /// Whether the device of `client` has the shared memory that the routine takes.
    fn has_room(&self, _client: &Client) -> bool {
        true
    }

    /// Whether `device`, whose client is `client`, has what makes the routine fast.
    fn is_native(&self, _client: &Client, _device: &CubeDevice) -> bool {
        true
    }

    /// Computes a product that [`fits`](Self::fits), on a device that [has room](Self::has_room).
    fn matmul(&self, product: Product) -> CubeTensor;
}

/// The routines by which [`scaled_matmul`](crate::scaled_matmul) is computed on CubeCL's devices.
///
/// All but cuBLASLt are kernels of this crate, and run on any device with 64-bit integers. If a device lacks the instruction of a
/// routine, or its runtime is not CUDA's C++ backend (feature `cuda-cpp`), loops replace the instruction and the copies that feed
/// it. This is correct but slow, and lets everything around the instruction be tested without the GPU. The tensor-core routines
/// take 96 (`mma`), 128 or 192 KiB (tiles of 256 rows) of shared memory, which GPUs often do not offer through WebGPU.
///
/// **Precision.** The accumulators of fp8 `mma.sync` and `wgmma` keep 14 bits, so every 128 terms their sum is added to one in f32, and
/// scaled there if scales change that often. The error of a result is at most 2^-11 of the sum of the magnitudes of its terms, which
/// is what truncating four times to 14 bits can cost. For normally distributed numbers, the largest error on an H200 was
/// 1.08 * 2^-13 of it. The other routines have the errors of sums in f32.
///
/// ```
/// use burn_fp8::kernels::MatmulRoutine;
///
/// assert_eq!("wgmma".parse(), Ok(MatmulRoutine::Wgmma));
/// assert_eq!(MatmulRoutine::Wgmma.to_string(), "wgmma");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MatmulRoutine {
    /// One kernel that decodes codes in registers, for small products.
    Direct,
    /// Both operands are decoded to bf16 (to f32 on processors and on devices without bf16), and multiplied by Burn's own
    /// kernels, which accumulate in f32. If scales change along the inner dimension, operands are decoded to f32, which those
    /// kernels round to the 11 bits of TF32 on devices that have it: these hold a code divided by a power of two, but not by any scale.
    Decoded,
    /// fp8 `mma.sync`: compute capability 8.9 and 12.x.
    Mma,
    /// fp8 `wgmma`: compute capability 9.0.
    Wgmma,
    /// [`Wgmma`](Self::Wgmma), with operands loaded by the tensor memory accelerator (TMA). A cube computes several tiles, and the
    /// first loads of the next one run while it still computes and stores the one before.
    WgmmaTma,
    /// [`WgmmaTma`](Self::WgmmaTma) in tiles of 256 rows instead of 128, for products of more than 128 rows. It reads a quarter
    /// less from the GPU's L2 cache. It does not take scales that change both along the sum and within 128 columns.
    WgmmaTma256,
    /// [`WgmmaTma256`](Self::WgmmaTma256) in clusters of two cubes, for products of more than 128 rows and columns. Each cube loads
    /// half of the left operand's tiles for both (TMA multicast), so that they read half as much from the GPU's L2 cache as
    /// [`WgmmaTma`](Self::WgmmaTma) does.
    WgmmaTmaMulticast,
    /// NVIDIA's library, with the feature `cuda`, if it is installed and the GPU has fp8.
    ///
    /// It takes single matrices with one scale each, and not e5m2 by e5m2. Other products are left to the other routines: without
    /// the feature `cuda-cpp`, which the tensor-core routines need, a large one is decoded. For `[m, k]` by `[k, n]`, operands are
    /// copied and padded where `k` or `n` is not a multiple of 16, and the output has gaps between its rows if `n` is not one.
    /// cuBLASLt runs on CubeCL's own stream, in order with CubeCL's kernels, and inside graphs that the stream records. (A scale that
    /// such a graph writes each time it runs may go into products outside of it only if the graph casts to fp8 too.) For a 16-bit
    /// output it rounds an f32 bias to the output's dtype, as Transformer Engine does. It accumulates fast where
    /// [`MatmulSpec::fast_accumulation`](crate::MatmulSpec::fast_accumulation) allows it: in a layer's forward pass, and nowhere else.
    CublasLt,
}

impl MatmulRoutine {
    /// All routines.
    pub const ALL: [Self; 8] = [
        Self::Direct,
        Self::Decoded,
        Self::Mma,
        Self::Wgmma,
        Self::WgmmaTma,
        Self::WgmmaTma256,
        Self::WgmmaTmaMulticast,
        Self::CublasLt,
    ];

    fn routine(self) -> &'static dyn Routine {
        match self {
            Self::Direct => &direct::Direct,
            Self::Decoded => &decoded::Decoded,
            Self::Mma => &Tile::MMA,
            Self::Wgmma => &Tile::WGMMA,
            Self::WgmmaTma => &Tile::WGMMA_TMA,
            Self::WgmmaTma256 => &Tile::WGMMA_TMA_256,
            Self::WgmmaTmaMulticast => &Tile::WGMMA_TMA_MULTICAST,
            Self::CublasLt => &cublaslt::CublasLt,
        }
    }

    /// Whether the routine can compute such products.
    pub(super) fn fits(self, outline: &Outline) -> bool {
        let (routine, size) = (self.routine(), outline.size);
        routine.fits(outline)
            && size.elements() <= routine.most(size)
            && outline.codes.into_iter().all(|codes| codes <= MOST_CODES)
    }

    /// Whether the device of `client` has the shared memory that the routine takes.
    pub(super) fn has_room(self, client: &Client) -> bool {
        self.routine().has_room(client)
    }

    /// Whether `device`, whose client is `client`, has what makes the routine fast.
    pub(super) fn is_native(self, client: &Client, device: &CubeDevice) -> bool {
        self.routine().is_native(client, device)
    }

    /// Computes a product that [`fits`](Self::fits).
    pub(super) fn matmul(self, product: Product) -> CubeTensor {
        self.routine().matmul(product)
    }

    /// Whether the routine reads both operands along the inner dimension, and copies an operand with another layout.
    pub(super) fn reads_along_sums(self) -> bool {
        !matches!(self, Self::Direct | Self::Decoded)
    }

    /// Whether the routine's operands are loaded by the TMA.
    pub(super) fn loads_by_tma(self) -> bool {
        matches!(
            self,
            Self::WgmmaTma | Self::WgmmaTma256 | Self::WgmmaTmaMulticast
        )
    }

    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Decoded => "decoded",
            Self::Mma => "mma",
            Self::Wgmma => "wgmma",
            Self::WgmmaTma => "wgmma-tma",
            Self::WgmmaTma256 => "wgmma-tma-256",
            Self::WgmmaTmaMulticast => "wgmma-tma-multicast",
            Self::CublasLt => "cublaslt",
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
#[error(
    "no matmul routine is called {0:?}: there are direct, decoded, mma, wgmma, wgmma-tma, \
     wgmma-tma-256, wgmma-tma-multicast and cublaslt"
)]
pub struct UnknownRoutine(pub String);

/// How [`scaled_matmul`](crate::scaled_matmul) picks its kernel on CubeCL's devices.
///
/// With Burn's default features (or `persistence`), CubeCL keeps what was measured for the next process, for devices of the same name
/// and builds with the same routines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatmulPolicy {
    /// By device and size. Small products take the direct routine. On a GPU that multiplies fp8 directly, the first large product
    /// of a size measures the routines that are native to the GPU, including cuBLASLt. On other devices the first large product of
    /// a size measures the two portable routines, up to 2^24 multiplications, and larger ones are decoded.
    #[default]
    Automatic,
    /// The first product of a size, also a small one, measures all routines that are native to the device (the direct routine
    /// only up to 2^24 multiplications). On a device that multiplies fp8 directly, the routine that decodes is measured only if
    /// the others fail.
    Measured,
    /// This routine, for all products that it can compute.
    Only(MatmulRoutine),
}

static POLICY: RwLock<Option<MatmulPolicy>> = RwLock::new(None);

/// Sets how the kernels of products are picked from now on, in this process.
///
/// Without a call, the environment variable `BURN_FP8_MATMUL` decides: it is the name of a routine, or `measured`.
///
/// ```
/// use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, matmul_policy, set_matmul_policy};
///
/// set_matmul_policy(MatmulPolicy::Only(MatmulRoutine::Direct));
/// assert_eq!(matmul_policy(), MatmulPolicy::Only(MatmulRoutine::Direct));
/// set_matmul_policy(MatmulPolicy::Automatic);
/// ```
pub fn set_matmul_policy(policy: MatmulPolicy) {
    *POLICY.write() = Some(policy);
}

/// How the kernels of products are currently picked. See [`set_matmul_policy`].
pub fn matmul_policy() -> MatmulPolicy {
    let set = *POLICY.read();
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
