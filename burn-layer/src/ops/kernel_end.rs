//! Where kernels of a backend that fuses ops end.

use super::call::Call;
use crate::{LayerSet, Op};
use burn_backend::{Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;

impl<B: BackendIr> Call<B> {
    /// Whether the op is a product of backward that gives `x^T dy`, and this is cast.
    pub(super) fn makes_weight_gradient(&self) -> bool {
        let inputs = self.inputs.as_ref();
        self.op == Op::float_matmul
            && self.plan.store.is_some()
            && inputs.is_some_and(|inputs| {
                // Where nothing is computed again, gradients that attention makes go on into what comes next.
                let goes_on = inputs.shapes[0].num_dims() > 2 && !self.plan.recompute;
                inputs.first_transposed && inputs.last_is_gradient && !goes_on
            })
    }
}

/// Ends the kernel that a tensor is made in. What takes the gradient of a weight comes after backward: until then a backend that
/// fuses ops would leave the kernel open for it, and find fewer ops elsewhere to make one kernel of. No kernel goes on after a
/// view of its result.
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
