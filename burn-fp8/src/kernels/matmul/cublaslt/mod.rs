//! Large products on NVIDIA GPUs by cuBLASLt, where it is installed.
//!
//! CubeCL's streams are private, and do not order with others: the host waits until the operands are there before
//! cuBLASLt starts, and until it is done. So only products that are large beside two such waits come here.

#[cfg(feature = "cuda")]
mod ffi;
mod plan;
#[cfg(all(test, feature = "cuda"))]
mod tests;

#[cfg(feature = "cuda")]
pub(super) use matmul::{pays, try_matmul};

#[cfg(feature = "cuda")]
mod matmul {
    use std::{
        collections::BTreeSet,
        sync::{Mutex, PoisonError},
    };

    use burn::backend::{TensorMetadata, ops::FloatTensorOps};
    use burn::tensor::{DType, Shape};
    use burn_cubecl::{
        CubeBackend, CubeDevice,
        kernel::{cast, into_contiguous},
        tensor::CubeTensor,
    };

    use super::{
        ffi::{self, Library, Operands},
        plan::{BiasPlan, Matrix, Plan, Source, plan},
    };
    use crate::{
        Bias,
        kernels::{buffer, matmul::Product},
    };

    /// Multiplications from which cuBLASLt outweighs the host's waits (tens of microseconds): 4096 cubed is twice as many.
    const LARGE: usize = 1 << 35;

    /// Whether a product is large enough, and on a GPU of NVIDIA's.
    pub(in crate::kernels::matmul) fn pays(product: &Product) -> bool {
        matches!(product.lhs.device, CubeDevice::Cuda(_))
            && product.scaled_as_a_whole()
            && product.size().multiplications() >= LARGE
    }

    /// The product by cuBLASLt; `None` where another routine is to compute it.
    pub(in crate::kernels::matmul) fn try_matmul(product: &Product) -> Option<CubeTensor> {
        let CubeDevice::Cuda(device) = &product.lhs.device else {
            return None;
        };
        multiply(&*ffi::library(device.index)?, product)
    }

    /// The same for a product of any size.
    pub(super) fn multiply(library: &Library, product: &Product) -> Option<CubeTensor> {
        let (lhs, rhs) = (matrix(&product.lhs)?, matrix(&product.rhs)?);
        let has_bias = matches!(product.bias, Bias::Row(_));
        let plan = match plan(lhs, rhs, product.spec, has_bias) {
            Ok(plan) => plan,
            Err(refusal) => {
                log::debug!("burn-fp8: a product that is none for cuBLASLt: {refusal}");
                return None;
            }
        };
        // Before anything is copied for it.
        if library.has_refused(&plan, product.spec) {
            return None;
        }
        let codes = |source: Source, tensor: &CubeTensor, transposed: bool| match source {
            Source::AsIs { .. } => tensor.clone(),
            Source::Copied if transposed => into_contiguous(buffer::swapped(tensor.clone())),
            Source::Copied => into_contiguous(tensor.clone()),
        };
        let dtype = DType::from(product.spec.output);
        let row = |dtype| match &product.bias {
            Bias::None => None,
            Bias::Row(bias) => Some(into_contiguous(cast(bias.clone(), dtype))),
        };
        let mut shape = product.lhs.shape();
        let rank = shape.num_dims();
        shape[rank - 1] = plan.n;
        let output = buffer::empty_floats(&product.lhs, shape, dtype);
        let operands = Operands {
            lhs: codes(plan.lhs, &product.lhs, false),
            rhs: codes(plan.rhs, &product.rhs, true),
            lhs_scale: CubeBackend::float_recip(product.lhs_scales.tensor.clone()),
            rhs_scale: CubeBackend::float_recip(product.rhs_scales.tensor.clone()),
            bias: match plan.bias {
                BiasPlan::Epilogue => row(dtype),
                _ => None,
            },
            output,
        };
        match ffi::run(library, &plan, product.spec, &operands) {
            Ok(()) => {}
            Err(problem) => {
                warn(&problem, &plan);
                return None;
            }
        }
        let output = operands.output;
        Some(match (plan.bias, row(dtype)) {
            (BiasPlan::Afterwards, Some(bias)) => {
                let mut shape = vec![1; rank];
                shape[rank - 1] = plan.n;
                let bias = CubeBackend::float_reshape(bias, Shape::from(shape));
                CubeBackend::float_add(output, bias)
            }
            _ => output,
        })
    }

    /// Once for each problem: a product comes again with every step.
    fn warn(problem: &str, plan: &Plan) {
        static HEARD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let mut heard = HEARD.lock().unwrap_or_else(PoisonError::into_inner);
        if heard.insert(problem.to_string()) {
            log::warn!(
                "burn-fp8: cuBLASLt left a product to the crate's own kernels, {plan:?}: {problem}"
            );
        }
    }

    /// One matrix; `None` for a batch of several.
    fn matrix(tensor: &CubeTensor) -> Option<Matrix> {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let rank = shape.num_dims();
        let batches: usize = shape.iter().take(rank - 2).product();
        (batches == 1).then(|| Matrix {
            rows: shape[rank - 2],
            columns: shape[rank - 1],
            row_stride: strides[rank - 2],
            column_stride: strides[rank - 1],
        })
    }
}
