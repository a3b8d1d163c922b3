//! Products on NVIDIA GPUs by cuBLASLt, if it is installed.
//!
//! They run on CubeCL's own stream, in order with its kernels, so nothing waits. A graph that the stream records contains them
//! too.

#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
mod capture;
#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
mod factors;
#[cfg(feature = "cuda")]
mod ffi;
#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
mod operands;
#[cfg(any(test, feature = "cuda"))]
mod plan;
#[cfg(all(test, feature = "cuda"))]
mod tests;

use std::sync::Once;

use burn_cubecl::{CubeDevice, tensor::CubeTensor};

use super::{Outline, Product, Size, accelerated, native, unmeasured};
use crate::MatmulSpec;
#[cfg(feature = "cuda")]
use crate::kernels::amax::raise_to;

/// Whether a device has cuBLASLt.
pub(super) fn is_there(device: &CubeDevice) -> bool {
    #[cfg(feature = "cuda")]
    return matmul::library(device).is_some();
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        false
    }
}

/// Columns of a product, its inner dimension, and leading dimensions of codes must be multiples of this for cuBLASLt.
const ALIGNMENT: usize = 16;

/// Whether columns of a product, or its inner dimension, are padded for cuBLASLt if there are so many.
pub(super) fn is_padded(size: usize) -> bool {
    !size.is_multiple_of(ALIGNMENT)
}

/// Whether the device has cuBLASLt and this takes the product, as far as is known before trying.
pub(super) fn takes(product: &Product) -> bool {
    #[cfg(feature = "cuda")]
    return matmul::takes(product);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = product;
        false
    }
}

/// Whether the device has cuBLASLt and this takes products of a size.
pub(super) fn takes_size(device: &CubeDevice, size: Size, spec: MatmulSpec) -> bool {
    #[cfg(feature = "cuda")]
    return matmul::takes_size(device, size, spec);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (device, size, spec);
        false
    }
}

/// Logs, once, that a large product is not multiplied in fp8 on a device where cuBLASLt does so with other products.
pub(super) fn tell_of_others(outline: &Outline, device: &CubeDevice) {
    static ONCE: Once = Once::new();
    let size = outline.size;
    if size.multiplications() > 0 && is_there(device) {
        ONCE.call_once(|| {
            log::warn!(
                "burn-fp8: a product is decoded first, {size:?}: cuBLASLt takes single matrices with one scale each, and not e5m2 by \
                 e5m2; the feature `cuda-cpp` has kernels for others, for Ada, Hopper and RTX Blackwell"
            );
        });
    }
}

/// The product. Another routine computes it if cuBLASLt turns out to be unable to. If cuBLASLt has no algorithm for such a
/// product, [`takes`] knows this from then on.
pub(super) fn matmul(product: Product) -> CubeTensor {
    #[cfg(feature = "cuda")]
    if let Some(output) = matmul::try_matmul(&product) {
        if let Some(amax) = &product.amax {
            // The library finds the amax only of fp8 outputs.
            raise_to(output.clone(), amax);
        }
        return output;
    }
    let outline = Outline {
        library: false,
        ..Outline::of(&product)
    };
    let routines = native(&outline, &product.lhs.client, &product.lhs.device);
    accelerated(&routines)
        .unwrap_or_else(|| unmeasured(&outline))
        .matmul(product)
}

#[cfg(feature = "cuda")]
mod matmul {
    use std::{collections::BTreeSet, sync::Arc};

    use burn_cubecl::{CubeDevice, tensor::CubeTensor};
    use parking_lot::Mutex;

    use super::{
        ffi::{self, Library},
        operands::{self, Operands},
        plan::{Matrix, Plan, plan},
    };
    use crate::{
        Bias, Granularity, MatmulSpec,
        kernels::matmul::{Product, Size},
    };

    pub(super) fn library(device: &CubeDevice) -> Option<Arc<Library>> {
        match device {
            CubeDevice::Cuda(device) => ffi::library(device.index),
            _ => None,
        }
    }

    pub(super) fn takes(product: &Product) -> bool {
        library(&product.lhs.device).is_some_and(|library| {
            planned(product).is_some_and(|plan| !library.has_refused(&plan, product.spec))
        })
    }

    pub(super) fn takes_size(device: &CubeDevice, size: Size, spec: MatmulSpec) -> bool {
        let by_rows = |rows, columns| Matrix {
            rows,
            columns,
            row_stride: columns,
            column_stride: 1,
        };
        let (lhs, rhs) = (by_rows(size.m, size.k), by_rows(size.k, size.n));
        spec.granularities == [Granularity::Tensor; 2]
            && size.batches == 1
            && plan(lhs, rhs, spec, false).is_ok()
            && library(device).is_some()
    }

    fn planned(product: &Product) -> Option<Plan> {
        if product.spec.granularities != [Granularity::Tensor; 2] {
            return None;
        }
        let lhs = operands::matrix(&product.lhs)?;
        let rhs = operands::matrix(&product.rhs)?;
        let has_bias = matches!(product.bias, Bias::Row(_));
        plan(lhs, rhs, product.spec, has_bias)
            .inspect_err(|refusal| {
                log::trace!("burn-fp8: a product that is none for cuBLASLt: {refusal}");
            })
            .ok()
    }

    pub(super) fn try_matmul(product: &Product) -> Option<CubeTensor> {
        multiply(&library(&product.lhs.device)?, product)
    }

    /// The product by cuBLASLt; `None` if another routine has to compute it.
    pub(super) fn multiply(library: &Arc<Library>, product: &Product) -> Option<CubeTensor> {
        let plan = planned(product)?;
        // Checked before anything is copied.
        if library.has_refused(&plan, product.spec) {
            return None;
        }
        let operands = Operands::of(product, &plan);
        match ffi::run(library, &plan, product.spec, &operands) {
            Ok(()) => Some(operands.into_output(product, &plan)),
            Err(problem) => {
                warn(&problem, &plan);
                None
            }
        }
    }

    /// Warns once for each problem, because the same product returns with every step.
    fn warn(problem: &str, plan: &Plan) {
        static HEARD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let mut heard = HEARD.lock();
        if heard.insert(problem.to_string()) {
            log::warn!(
                "burn-fp8: cuBLASLt left a product to the crate's own kernels, {plan:?}: {problem}"
            );
        }
    }
}
