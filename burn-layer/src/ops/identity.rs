//! Reductions that change nothing, because they are along dimensions of size 1.
//!
//! Burn's backward applies them to tensors that are reduced already. They are left out, not because of the little that they
//! cost, but because a backend that fuses ops cannot fuse the ops before a reduction with those after it.

use super::call::Call;
use crate::{LayeredFloat, Op};
use burn_backend::TensorMetadata;
use burn_ir::BackendIr;

/// Returns the tensor if the op is such a reduction.
macro_rules! identity {
    ($call:ident, Float, $x:ident: Float, $dim:ident: [usize]) => {
        identity!(@of $call, $x, &[$dim])
    };
    ($call:ident, Float, $x:ident: Float, $dims:ident: [&[usize]]) => {
        identity!(@of $call, $x, $dims)
    };
    (@of $call:ident, $x:ident, $dims:expr) => {
        if $call.changes_nothing(&$x, $dims) {
            // What was computed in 16 bits stays so.
            if let Some(tensor) = $call.views_exact(&$x, |x| x) {
                return tensor;
            }
            let tensor = $call.lower($x);
            return $call.float(tensor);
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use identity;

impl<B: BackendIr> Call<B> {
    /// Whether the op is a reduction along `dims`, and each of these has size 1.
    pub(super) fn changes_nothing(&self, tensor: &LayeredFloat<B>, dims: &[usize]) -> bool {
        let shape = tensor.shape();
        REDUCTIONS.contains(&self.op) && dims.iter().all(|&dim| shape[dim] == 1)
    }
}

/// The reductions that return a single element as it is.
const REDUCTIONS: &[Op] = &[
    Op::float_sum_dim,
    Op::float_sum_dims,
    Op::float_mean_dim,
    Op::float_prod_dim,
    Op::float_max_dim,
    Op::float_min_dim,
];
