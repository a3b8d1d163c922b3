//! Gradients of a factor that all matrices of a batch share, such as the weight of a linear layer.
//!
//! Burn's autodiff computes the product `x^T dy` of each matrix of the batch, and sums these. With 128 images, that writes and
//! reads the gradient of a weight 128 times. Where the [plan](crate::Plan::over_batch) says so, the product waits for the sum,
//! and both become one product over the rows of all matrices, as in PyTorch. A layer that runs the product itself is asked for the sum.

use super::{
    call::Call,
    kernel_end::alone_in_kernel,
    product::{Multiply, is_shaped, product},
};
use crate::{
    Inputs, LayerSet, LayeredFloat, Op, Run, recent::GiveUp, recompute::Recomputed, source::Later,
};
use burn_backend::{Backend, DType, Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use std::sync::Arc;

/// Makes products wait for their sum, and computes both when the sum comes.
macro_rules! batch {
    ($call:ident, float_matmul, $x:ident: Float, $y:ident: Float) => {
        if let Some(tensor) = $call.waits(&$x, &$y) {
            return tensor;
        }
    };
    ($call:ident, float_sum_dim, $x:ident: Float, $dim:ident: [usize]) => {
        if let Some(tensor) = $call.sums(&$x, $dim) {
            return tensor;
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use batch;

/// The number of output tiles that keep a large GPU busy. A product with fewer is cut along the rows that it sums over, and the
/// products of the parts are summed.
const TILES: usize = 128;

/// The number of rows, and of columns, of a tile.
const TILE: usize = 128;

/// The products `x^T dy` of a batch of matrices.
pub(crate) struct Products<B: Backend> {
    /// `[.., b, .., k, m]`, the transposition of `x`.
    x: LayeredFloat<B>,
    /// `[.., b, .., m, n]`.
    dy: LayeredFloat<B>,
    /// The dimension of the batch, the only one before the last two that is not 1.
    dim: usize,
    /// The dtypes to compute in and to store.
    compute: DType,
    store: DType,
    /// What a layer that runs the products itself is told of them.
    own: Option<Inputs>,
}

impl<B: BackendIr> Call<B> {
    /// The products of all matrices, if they wait for their sum.
    pub(super) fn waits(
        &self,
        x: &LayeredFloat<B>,
        dy: &LayeredFloat<B>,
    ) -> Option<LayeredFloat<B>> {
        if !self.plan.over_batch || self.watched {
            return None;
        }
        let compute = self.plan.compute?;
        let store = self.plan.store.unwrap_or(compute);
        let (left, right) = (x.shape(), dy.shape());
        let last = left.num_dims().checked_sub(2)?;
        let mut batches = (0..last).filter(|&dim| left[dim] > 1);
        let dim = batches.next().filter(|_| batches.next().is_none())?;
        if left[..last] != right[..last] {
            return None;
        }
        let mut shape = left;
        shape.as_mut_slice()[last + 1] = right[last + 1];
        let products = Arc::new(Products {
            x: x.clone(),
            dy: dy.clone(),
            dim,
            compute,
            store,
            own: self.inputs.as_ref().filter(|_| self.plan.own).cloned(),
        });
        let each = products.clone();
        let value = Recomputed::new(self.op, None, 1, move || each.each());
        let layer = self.layer();
        let tensor = LayeredFloat::later(
            Later::Recomputed(Arc::new(value)),
            (shape.clone(), store),
            x.storage_device(),
            x.dtype(),
            layer,
        );
        Some(self.known(tensor, shape).with_products(Some(products)))
    }

    /// The sum of products that waited for it, if `x` is such products and `dim` is their batch.
    pub(super) fn sums(&mut self, x: &LayeredFloat<B>, dim: usize) -> Option<LayeredFloat<B>> {
        let products = x.products()?;
        if products.dim != dim {
            return None;
        }
        let (sum, store) = (products.sum(), products.store);
        if sum.dtype() != store && self.layer().is_fused() {
            return Some(self.widened(sum, x.dtype(), store));
        }
        Some(self.float(products.stored(sum)))
    }
}

impl<B: BackendIr> Products<B> {
    /// The products, or their sum, if a layer runs them itself.
    fn run(&self, sums_batch: bool) -> Option<FloatTensor<B>> {
        let layer = self.x.layer();
        let ran = layer.run(&Run {
            op: Op::float_matmul,
            store: Some(self.store),
            inputs: self.own.as_ref()?,
            sums_batch,
            tensors: &vec![self.x.clone(), self.dy.clone()],
        });
        let Some(ran) = ran else {
            layer.ran(Op::float_matmul, self.compute);
            return None;
        };
        let tensor = ran.0.downcast::<FloatTensor<B>>();
        let tensor = *tensor.expect("the kernel is of the backend underneath");
        Some(self.stored(tensor))
    }

    /// The products of all matrices.
    fn each(&self) -> FloatTensor<B> {
        if let Some(products) = self.run(false) {
            return products;
        }
        let factors = [&self.x, &self.dy].map(|factor| factor.clone().into_dtype(self.compute));
        let [x, dy] = factors;
        product::<B>(self.x.layer(), x, dy, true, |product| self.stored(product))
    }

    /// The sum of the products, in the dtype that it was computed in.
    fn sum(&self) -> FloatTensor<B> {
        let mut shape = self.x.shape();
        let last = shape.num_dims() - 2;
        shape.as_mut_slice()[self.dim] = 1;
        shape.as_mut_slice()[last + 1] = self.dy.shape()[last + 1];
        if let Some(sum) = self.run(true) {
            return B::float_reshape(sum, shape);
        }
        let x = self.x.clone().into_dtype(self.compute);
        let dy = self.dy.clone().into_dtype(self.compute);
        for factor in [&self.x, &self.dy] {
            if let Some(value) = factor.value() {
                value.give_up();
            }
        }
        let batch = x.shape()[self.dim];
        let x = B::float_swap_dims(x, last, last + 1);
        let sum = over_rows::<B>(self.x.layer(), x, dy, batch, Some(self.store));
        let sum = match self.x.layer().is_fused() {
            true => alone_in_kernel::<B>(sum),
            false => sum,
        };
        match last {
            1 => sum,
            _ => B::float_reshape(sum, shape),
        }
    }

    fn stored(&self, product: FloatTensor<B>) -> FloatTensor<B> {
        match self.store == product.dtype() {
            true => product,
            false => B::float_cast(product, self.store.into()),
        }
    }
}

/// The product `x^T dy` over the rows of all matrices of a batch, `[1, k, n]`. The rows may be multiplied in parts of as many matrices, and these
/// summed, in another dtype if one is given.
pub(super) fn over_rows<B: Backend>(
    layers: &LayerSet,
    x: FloatTensor<B>,
    dy: FloatTensor<B>,
    batch: usize,
    sum_in: Option<DType>,
) -> FloatTensor<B> {
    let (shape, last) = (dy.shape(), dy.shape().num_dims() - 1);
    let (k, n) = (x.shape()[x.shape().num_dims() - 1], shape[last]);
    if let Some(library) = layers
        .mechanisms
        .get::<Multiply<B>>()
        .filter(|_| is_shaped::<B>(layers, &x, &dy))
    {
        // It cuts products itself.
        return (library.over_rows)(x, dy);
    }
    let parts = parts(batch, k, n);
    let rows = shape[..last].iter().product::<usize>() / parts;
    let x = B::float_reshape(x, Shape::new([parts, rows, k]));
    let dy = B::float_reshape(dy, Shape::new([parts, rows, n]));
    let end = |product| match sum_in.filter(|_| parts > 1) {
        Some(dtype) => B::float_cast(product, dtype.into()),
        None => product,
    };
    let product = product::<B>(layers, B::float_swap_dims(x, 1, 2), dy, true, end);
    match parts {
        1 => product,
        _ => B::float_sum_dim(product, 0),
    }
}

/// The number of parts, all of the same size, that a batch is cut into for a product of shape `[k, n]`.
fn parts(batch: usize, k: usize, n: usize) -> usize {
    let tiles = k.div_ceil(TILE) * n.div_ceil(TILE);
    let parts = (1..=batch).filter(|parts| batch.is_multiple_of(*parts));
    let mut enough = parts.filter(|parts| parts * tiles >= TILES);
    enough.next().unwrap_or(batch.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_product_is_cut() {
        // 6 by 24 tiles; 6 by 6, which are 36; one tile.
        assert_eq!(parts(128, 768, 3072), 1);
        assert_eq!(parts(128, 768, 768), 4);
        assert_eq!(parts(8, 100, 100), 8);
        // Parts are of the same size.
        assert_eq!(parts(9, 768, 768), 9);
        assert_eq!(parts(7, 768, 3072), 1);
        // An empty batch.
        assert_eq!(parts(0, 768, 768), 1);
    }
}
