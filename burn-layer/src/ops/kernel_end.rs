//! Where kernels of a backend that fuses ops end, and where they go on.

use super::{call::Call, product::Multiply};
use crate::{Inputs, Op};
use burn_backend::{Backend, DType, Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;

impl<B: BackendIr> Call<B> {
    /// Whether the op computes the gradient of a weight or bias whose result is cast, on a backend that fuses ops.
    pub(super) fn makes_weight_gradient(&self) -> bool {
        let of_parameter = || match self.op {
            // A product `x^T dy`.
            Op::float_matmul => self.inputs.as_ref().is_some_and(|inputs| {
                // If nothing is computed again, the kernels of gradients in attention go on with the ops that follow.
                let goes_on = inputs.shapes[0].num_dims() > 2 && !self.plan.recompute;
                inputs.first_transposed && inputs.last_is_gradient && !goes_on
            }),
            op => {
                let ends = ["_weight_backward", "_bias_backward"];
                ends.iter().any(|end| op.name().ends_with(end))
            }
        };
        self.plan.store.is_some() && self.layer().is_fused() && of_parameter()
    }

    /// Whether the op computes the gradient of a linear layer's input, `dy w^T`, on a backend that fuses ops.
    pub(super) fn makes_input_gradient(&self) -> bool {
        let of_matrix = |inputs: &Inputs| {
            let matrices = inputs.shapes.iter().all(|shape| shape.num_dims() == 2);
            matrices && inputs.first_is_gradient && inputs.last_transposed
        };
        self.op == Op::float_matmul
            && self.inputs.as_ref().is_some_and(of_matrix)
            && self.layer().is_fused()
    }

    /// Whether a [view](alone_in_kernel) ends the kernel of the result, which is such a gradient. A library computes a product in a kernel that
    /// does not go on; and what it computes of attention's heads may lie as these do, so that a view would copy it.
    pub(super) fn is_alone_in_kernel(&self, result: &FloatTensor<B>) -> bool {
        let (shape, low) = (result.shape(), result.dtype().size() == 2);
        let batch = || shape.iter().rev().skip(2).product::<usize>() > 1;
        let library = || {
            self.op == Op::float_matmul && self.layer().mechanisms.get::<Multiply<B>>().is_some()
        };
        (self.makes_weight_gradient() || self.makes_input_gradient())
            && !(low && batch() && library())
    }

    /// Whether the op is a sum or mean, in f32, of what is stored in 16 bits or was computed in them, on a backend that fuses ops.
    pub(super) fn sums_cast(&self) -> bool {
        let low = |inputs: &Inputs| {
            self.of_exact || inputs.stored_low() && self.plan.compute == Some(DType::F32)
        };
        matches!(self.op, Op::float_sum_dim | Op::float_mean_dim)
            && self.plan.stored(DType::F32) == DType::F32
            && self.inputs.as_ref().is_some_and(low)
            && self.layer().is_fused()
    }
}

/// Goes on after a sum along a dimension, by a product with 1. Burn's search for kernels counts what the ops around a sum read and
/// write, and not the sum itself. So of a cast and a sum alone it finds that nothing is gained by one kernel, and the cast is
/// written and read.
pub(super) fn end_of_sum<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    B::float_mul_scalar(tensor, 1f32.into())
}

/// Ends the kernel that `tensor` is computed in, by a view: no kernel goes on after a view of its result. The gradient of a
/// weight is not used before backward is over. Until then, a backend that fuses ops would keep the kernel open for the op that
/// uses it, and would find fewer ops elsewhere to fuse.
pub(crate) fn alone_in_kernel<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let elements = shape.num_elements();
    let other = match shape.num_dims() {
        1 => Shape::new([1, elements]),
        _ => Shape::new([elements]),
    };
    B::float_reshape(B::float_reshape(tensor, other), shape)
}
