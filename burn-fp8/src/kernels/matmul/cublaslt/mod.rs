//! Products on NVIDIA GPUs by cuBLASLt, if it is installed.
//!
//! They run on CubeCL's own stream, in order with its kernels, so nothing waits. A graph that the stream records contains them
//! too.

mod factors;
mod operands;
mod plan;
#[cfg(all(test, feature = "cuda"))]
mod tests;

use std::{
    collections::BTreeSet,
    sync::{Arc, Once},
};

use burn_cubecl::{CubeDevice, tensor::CubeTensor};
use burn_cublaslt::Library;
use cubecl::client::Client;
use parking_lot::Mutex;

use super::{Outline, Product, Size, accelerated, native, routine::Routine, unmeasured};
use crate::{
    Bias, Granularity, MatmulSpec,
    kernels::{amax::raise_to, buffer},
};
pub(in crate::kernels) use factors::forget as forget_factors;
use operands::Operands;
use plan::{Matrix, Plan, plan};

/// Columns of a product, its inner dimension, and leading dimensions of codes must be multiples of this for cuBLASLt, and all addresses,
/// in bytes.
const ALIGNMENT: usize = 16;

/// Whether columns of a product, or its inner dimension, are padded for cuBLASLt if there are so many.
pub(super) fn is_padded(size: usize) -> bool {
    !size.is_multiple_of(ALIGNMENT)
}

/// cuBLASLt for a device, if it multiplies fp8 there.
fn library(device: &CubeDevice) -> Option<Arc<Library>> {
    burn_cublaslt::library(device).filter(|library| library.has_fp8())
}

/// Tells products by cuBLASLt, if they are multiplied so on the scale's device, the inverse of a scale, which they need not compute
/// then.
pub(in crate::kernels) fn know_factor(scale: &CubeTensor, factor: impl FnOnce() -> CubeTensor) {
    if library(&scale.device).is_some() {
        factors::know(scale, &factor());
    }
}

/// See [`MatmulRoutine::CublasLt`](super::MatmulRoutine::CublasLt).
pub(super) struct CublasLt;

impl Routine for CublasLt {
    fn fits(&self, outline: &Outline) -> bool {
        outline.library && outline.can_be_copied()
    }

    /// The library counts in 64 bits, but the kernel that finds the amax of its output does not: four at a time, if all of them
    /// are whole fours.
    fn most(&self, size: Size) -> usize {
        match size.elements().is_multiple_of(4) {
            true => 4 * buffer::MOST,
            false => buffer::MOST,
        }
    }

    fn is_native(&self, _client: &Client, device: &CubeDevice) -> bool {
        library(device).is_some()
    }

    /// Another routine computes the product if cuBLASLt turns out to be unable to. If cuBLASLt has no algorithm for such a product,
    /// [`takes`] knows this from then on.
    fn matmul(&self, product: Product) -> CubeTensor {
        let library = library(&product.lhs.device);
        if let Some(output) = library.and_then(|library| multiply(&library, &product)) {
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
}

/// Whether the device has cuBLASLt and this takes the product, as far as is known before trying.
pub(super) fn takes(product: &Product) -> bool {
    library(&product.lhs.device).is_some_and(|library| {
        planned(product).is_some_and(|plan| !library.has_refused(&plan.product(product.spec)))
    })
}

/// Whether the device has cuBLASLt and this takes products of a size.
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

/// Logs, once, that a large product is not multiplied in fp8 on a device where cuBLASLt does so with other products.
pub(super) fn tell_of_others(outline: &Outline, device: &CubeDevice) {
    static ONCE: Once = Once::new();
    let size = outline.size;
    if size.multiplications() > 0 && library(device).is_some() {
        ONCE.call_once(|| {
            log::warn!(
                "burn-fp8: a product is decoded first, {size:?}: cuBLASLt takes single matrices with one scale each, and not e5m2 by \
                 e5m2; the feature `cuda-cpp` has kernels for others, for Ada, Hopper and RTX Blackwell"
            );
        });
    }
}

fn planned(product: &Product) -> Option<Plan> {
    if product.spec.granularities != [Granularity::Tensor; 2] {
        return None;
    }
    let lhs = operands::matrix(&product.lhs)?;
    let rhs = operands::matrix(&product.rhs)?;
    let has_bias = matches!(product.bias, Bias::Row(_));
    plan(lhs, rhs, product.spec, has_bias)
        .inspect_err(|why| log::trace!("burn-fp8: a product that is none for cuBLASLt: {why}"))
        .ok()
}

/// The product by cuBLASLt; `None` if another routine has to compute it.
fn multiply(library: &Arc<Library>, product: &Product) -> Option<CubeTensor> {
    let plan = planned(product)?;
    let described = plan.product(product.spec);
    // Checked before anything is copied.
    if library.has_refused(&described) {
        return None;
    }
    let operands = Operands::of(product, &plan);
    match library.submit(&described, operands.given()) {
        Ok(()) => Some(operands.into_output(product, &plan)),
        Err(problem) => {
            warn(&problem.to_string(), &plan);
            None
        }
    }
}

/// Warns once for each problem, because the same product returns with every step.
fn warn(problem: &str, plan: &Plan) {
    static HEARD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if HEARD.lock().insert(problem.to_string()) {
        log::warn!(
            "burn-fp8: cuBLASLt left a product to the crate's own kernels, {plan:?}: {problem}"
        );
    }
}
