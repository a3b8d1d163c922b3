//! The scaled matrix product, by one of several routines of this crate or by NVIDIA's library.

mod cublaslt;
mod decoded;
mod direct;
mod key;
mod outline;
mod routine;
mod tile;
mod tune;

use burn::backend::TensorMetadata;
use burn::tensor::Shape;
use burn_cubecl::{CubeBackend, CubeDevice, tensor::CubeTensor};
use cubecl::client::Client;

use super::{buffer, scale_grid::Scales, tiles};
use crate::{Bias, MatmulSpec, portable::matmul_shape};
pub(super) use cublaslt::{forget_factors, know_factor};
use key::Key;
pub(crate) use outline::check_product;
use outline::{Outline, Size};
pub use routine::{MatmulPolicy, MatmulRoutine, UnknownRoutine, matmul_policy, set_matmul_policy};

/// The number of multiplications from which on it may pay to decode both operands first, or to fill a tensor core's tiles.
const LARGE: usize = 1 << 20;

/// The operands of a product, and everything else that it takes.
#[derive(Clone)]
pub(super) struct Product {
    pub(super) lhs: CubeTensor,
    pub(super) rhs: CubeTensor,
    pub(super) lhs_scales: Scales,
    pub(super) rhs_scales: Scales,
    pub(super) bias: Bias<CubeBackend>,
    pub(super) spec: MatmulSpec,
    /// Receives the output's amax, if it is wanted: a single f32, which is 0.
    pub(super) amax: Option<CubeTensor>,
}

impl Product {
    fn new(
        [lhs, rhs]: [CubeTensor; 2],
        [lhs_scale, rhs_scale]: [CubeTensor; 2],
        bias: Bias<CubeBackend>,
        spec: MatmulSpec,
    ) -> Self {
        let scales = |tensor, side: usize| Scales {
            tensor,
            granularity: spec.granularities[side],
        };
        Self {
            lhs,
            rhs,
            lhs_scales: scales(lhs_scale, 0),
            rhs_scales: scales(rhs_scale, 1),
            bias,
            spec,
            amax: None,
        }
    }

    /// The shape of the product.
    fn shape(&self) -> Shape {
        matmul_shape(&self.lhs.shape(), &self.rhs.shape())
    }

    fn size(&self) -> Size {
        Size::of(&self.lhs.shape(), &self.rhs.shape())
    }
}

/// [`Fp8Ops::fp8_matmul`](crate::Fp8Ops::fp8_matmul) of two operands (codes, and scales), with a kernel picked by `policy`.
///
/// If [`MatmulPolicy::Only`] names a routine that cannot compute the product, the routine is picked as by
/// [`MatmulPolicy::Automatic`]. Only the direct routine computes products without elements or terms. The tensor-core routines
/// cannot compute products with scales that change within 128 terms, nor run on devices with too little shared memory. For
/// tall tiles, clusters and cuBLASLt, see [`MatmulRoutine::WgmmaTma256`], [`MatmulRoutine::WgmmaTmaMulticast`] and
/// [`MatmulRoutine::CublasLt`].
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn::backend::{Backend, ops::FloatTensorOps};
/// use burn::tensor::{FloatDType, TensorData};
/// use burn_cubecl::{CubeBackend, CubeDevice, cubecl::cpu::CpuDevice};
/// use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, matmul_by};
/// use burn_fp8::{Bias, Fp8Format::E4M3, Fp8Ops, MatmulSpec};
///
/// let device = CubeDevice::Cpu(CpuDevice);
/// let float = |data: TensorData| CubeBackend::float_from_data(data, &device);
/// let scale = || float([2f32].into());
/// let codes = |data: TensorData| CubeBackend::fp8_quantize(float(data), scale(), E4M3).0;
/// let spec = MatmulSpec::new(E4M3, E4M3, FloatDType::F32);
/// let product = matmul_by(
///     MatmulPolicy::Only(MatmulRoutine::Mma),
///     [codes([[1f32, 2.0]].into()), codes([[3f32], [4.0]].into())],
///     [scale(), scale()],
///     Bias::None,
///     spec,
/// );
/// let data = burn_backend::try_read_sync(CubeBackend::float_into_data(product));
/// assert_eq!(data.unwrap().unwrap().try_to_vec::<f32>().unwrap(), [11.0]);
/// # }
/// ```
pub fn matmul_by(
    policy: MatmulPolicy,
    operands: [CubeTensor; 2],
    scales: [CubeTensor; 2],
    bias: Bias<CubeBackend>,
    spec: MatmulSpec,
) -> CubeTensor {
    matmul(policy, Product::new(operands, scales, bias, spec))
}

/// [`Fp8Ops::fp8_matmul_amax`](crate::Fp8Ops::fp8_matmul_amax) of two operands: [`matmul_by`], and the product's amax. All
/// routines but cuBLASLt find it before they store the product.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn::backend::ops::FloatTensorOps;
/// use burn::tensor::{FloatDType, TensorData};
/// use burn_cubecl::{CubeBackend, CubeDevice, cubecl::cpu::CpuDevice};
/// use burn_fp8::kernels::{MatmulPolicy, matmul_amax_by};
/// use burn_fp8::{Bias, Fp8Format::E4M3, Fp8Ops, MatmulSpec};
///
/// let device = CubeDevice::Cpu(CpuDevice);
/// let float = |data: TensorData| CubeBackend::float_from_data(data, &device);
/// let one = || float([1f32].into());
/// let codes = |data: TensorData| CubeBackend::fp8_quantize(float(data), one(), E4M3).0;
/// let (_, amax) = matmul_amax_by(
///     MatmulPolicy::Automatic,
///     [codes([[1f32, 2.0]].into()), codes([[3f32, 0.0], [-4.0, 1.0]].into())],
///     [one(), one()],
///     Bias::None,
///     MatmulSpec::new(E4M3, E4M3, FloatDType::F32),
/// );
/// let data = burn_backend::try_read_sync(CubeBackend::float_into_data(amax));
/// assert_eq!(data.unwrap().unwrap().try_to_vec::<f32>().unwrap(), [5.0]); // of -5 and 2
/// # }
/// ```
pub fn matmul_amax_by(
    policy: MatmulPolicy,
    operands: [CubeTensor; 2],
    scales: [CubeTensor; 2],
    bias: Bias<CubeBackend>,
    spec: MatmulSpec,
) -> (CubeTensor, CubeTensor) {
    let amax = buffer::zero_scalar(&operands[0]);
    let product = Product {
        amax: Some(amax.clone()),
        ..Product::new(operands, scales, bias, spec)
    };
    (matmul(policy, product), amax)
}

fn matmul(policy: MatmulPolicy, product: Product) -> CubeTensor {
    let outline = Outline::of(&product);
    let (client, device) = (&product.lhs.client, &product.lhs.device);
    if let MatmulPolicy::Only(only) = policy
        && only.fits(&outline)
        && only.has_room(client)
    {
        return only.matmul(product);
    }
    let small = outline.size.multiplications() < LARGE;
    if policy != MatmulPolicy::Measured && small && MatmulRoutine::Direct.fits(&outline) {
        return MatmulRoutine::Direct.matmul(product);
    }
    let routines = native(&outline, client, device);
    let key = Key::of(&product, &outline, routines);
    if accelerated(&key.routines).is_some() || tune::has_choice(&key) {
        return tune::matmul(key, product);
    }
    cublaslt::tell_of_others(&outline, device);
    unmeasured(&outline).matmul(product)
}

/// The routines that can compute a product and are native to the device.
fn native(outline: &Outline, client: &Client, device: &CubeDevice) -> Vec<MatmulRoutine> {
    let mut routines = MatmulRoutine::ALL.to_vec();
    routines.retain(|routine| routine.fits(outline) && routine.is_native(client, device));
    routines
}

/// The first of the native routines that multiplies fp8 directly, if there is one.
fn accelerated(native: &[MatmulRoutine]) -> Option<MatmulRoutine> {
    let mut native = native.iter().copied();
    native.find(|routine| routine.reads_along_sums())
}

/// The routine for devices that do not multiply fp8 directly.
fn unmeasured(outline: &Outline) -> MatmulRoutine {
    match MatmulRoutine::Decoded.fits(outline) {
        true => MatmulRoutine::Decoded,
        false => MatmulRoutine::Direct,
    }
}

/// Whether the codes of `input` are laid out along the inner dimension of products: large products on its device read both
/// operands so, and copy an operand with another layout. Only codes in more tiles than a kernel can count are left to that copy.
pub(crate) fn codes_lie_along_sums(input: &CubeTensor) -> bool {
    let native = |routine: MatmulRoutine| routine.is_native(&input.client, &input.device);
    tiles::can_be_counted(&input.shape()) && read_along_sums(matmul_policy(), native)
}

/// Whether products read along the inner dimension on a device to which the routines of `is_native` are native.
fn read_along_sums(policy: MatmulPolicy, is_native: impl Fn(MatmulRoutine) -> bool) -> bool {
    match policy {
        MatmulPolicy::Only(only) => only.reads_along_sums(),
        MatmulPolicy::Automatic | MatmulPolicy::Measured => MatmulRoutine::ALL
            .into_iter()
            .any(|routine| routine.reads_along_sums() && is_native(routine)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_laid_out_for_what_reads_them_so() {
        use MatmulPolicy::{Automatic, Measured, Only};
        use MatmulRoutine::{CublasLt, Decoded, Direct, Mma, Wgmma};
        for (native, expected) in [
            (&[Direct, Decoded][..], false),
            (&[Direct, Decoded, Wgmma], true),
            (&[Direct, Decoded, CublasLt], true),
        ] {
            let reads = |policy| read_along_sums(policy, |routine| native.contains(&routine));
            assert_eq!([Automatic, Measured].map(reads), [expected; 2]);
            // Even if it is emulated.
            assert!(reads(Only(Mma)));
            assert!(![Only(Direct), Only(Decoded)].into_iter().any(reads));
        }
    }
}
