//! The scaled matrix product, by one of two routines that are picked by size, or by NVIDIA's library.

#[cfg(any(test, feature = "cuda"))]
mod cublaslt;
mod decoded;
mod direct;

use burn::backend::TensorMetadata;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

use super::buffer;
use crate::{Bias, MatmulSpec};

/// Multiplications above which it pays to decode both operands first.
const DECODED: usize = 1 << 20;

/// Operands and all that belongs to their product.
pub(super) struct Product {
    pub(super) lhs: CubeTensor,
    pub(super) rhs: CubeTensor,
    pub(super) lhs_scale: CubeTensor,
    pub(super) rhs_scale: CubeTensor,
    pub(super) bias: Bias<CubeBackend>,
    pub(super) spec: MatmulSpec,
    /// Where the output's amax goes, if it is asked for: one f32, its bits 0.
    pub(super) amax: Option<CubeTensor>,
}

impl Product {
    /// Multiplications of one matrix of the batch.
    fn size(&self) -> usize {
        let (left, right) = (self.lhs.shape(), self.rhs.shape());
        let rank = left.num_dims();
        left[rank - 2] * left[rank - 1] * right[rank - 1]
    }

    fn run(self) -> CubeTensor {
        #[cfg(feature = "cuda")]
        if let Some(product) = cublaslt::try_matmul(&self) {
            return product;
        }
        match self.size() {
            size if size >= DECODED => decoded::matmul(self),
            _ => direct::matmul(self),
        }
    }
}

/// See [`Fp8Ops::fp8_matmul_amax`](crate::Fp8Ops::fp8_matmul_amax).
pub(crate) fn matmul_amax(
    lhs: CubeTensor,
    rhs: CubeTensor,
    lhs_scale: CubeTensor,
    rhs_scale: CubeTensor,
    bias: Bias<CubeBackend>,
    spec: MatmulSpec,
) -> (CubeTensor, CubeTensor) {
    let amax = buffer::zero_scalar(&lhs);
    let product = Product {
        lhs,
        rhs,
        lhs_scale,
        rhs_scale,
        bias,
        spec,
        amax: Some(amax.clone()),
    };
    (product.run(), amax)
}

/// See [`Fp8Ops::fp8_matmul`](crate::Fp8Ops::fp8_matmul).
pub(crate) fn matmul(
    lhs: CubeTensor,
    rhs: CubeTensor,
    lhs_scale: CubeTensor,
    rhs_scale: CubeTensor,
    bias: Bias<CubeBackend>,
    spec: MatmulSpec,
) -> CubeTensor {
    let product = Product {
        lhs,
        rhs,
        lhs_scale,
        rhs_scale,
        bias,
        spec,
        amax: None,
    };
    product.run()
}
