//! Where kernels of a backend that fuses ops end.

use super::call::Call;
use crate::{LayerSet, Op};
use burn_backend::{Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;

impl<B: BackendIr> Call<B> {
    /// Whether the op is a product `x^T dy` of backward whose result is cast.
    pub(super) fn makes_weight_gradient(&self) -> bool {
        let inputs = self.inputs.as_ref();
        self.op == Op::float_matmul
            && self.plan.store.is_some()
            && inputs.is_some_and(|inputs| {
                // If nothing is computed again, the kernels of gradients in attention go on with the ops that follow.
                let goes_on = inputs.shapes[0].num_dims() > 2 && !self.plan.recompute;
                inputs.first_transposed && inputs.last_is_gradient && !goes_on
            })
    }
}

/// Ends the kernel that `tensor` is computed in, by a view: no kernel goes on after a view of its result. The gradient of a
/// weight is not used before backward is over. Until then, a backend that fuses ops would keep the kernel open for the op that
/// uses it, and would find fewer ops elsewhere to fuse.
pub(super) fn alone_in_kernel<B: BackendIr>(
    tensor: FloatTensor<B>,
    layer: &LayerSet,
) -> FloatTensor<B> {
    if !layer.is_fused() {
        return tensor;
    }
    let shape = tensor.shape();
    let flat = B::float_reshape(tensor, Shape::new([shape.num_elements()]));
    B::float_reshape(flat, shape)
}
