//! Rotary position encodings, where the backend underneath has a [kernel](Rotations) for them.
//!
//! Burn's `RotaryEncoding` turns pairs of neighbours: a product of each pair with a matrix `[2, 4]` of signs, which is reshaped,
//! multiplied by the cosines and sines of its position, and summed by twos. That writes and reads five tensors, all but one of them
//! larger than the input, and backward as many. Here each of these ops only says what its result is, and waits until it is needed. The
//! sum, and the last product of backward, are computed in one kernel, which reads what was turned and writes the result. Nothing is
//! assumed of the numbers in the matrix and the factors.

use super::call::Call;
use crate::{LayeredFloat, ops::softmax::Role, recompute::Recomputed, source::Later};
use burn_backend::{Backend, DType, Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use std::sync::Arc;

/// Recognizes the ops of rotations, and computes what needs their kernel.
macro_rules! rotation {
    ($call:ident, float_matmul, $x:ident: Float, $y:ident: Float) => {
        if let Some(tensor) = $call.multiplies_pairs(&$x, &$y) {
            return tensor;
        }
    };
    ($call:ident, float_reshape, $x:ident: Float, $shape:ident: [Shape]) => {
        $call.reshapes_pairs(&$x, &$shape);
    };
    ($call:ident, float_mul, $x:ident: Float, $y:ident: Float) => {
        $call.turns_pairs(&$x, &$y);
    };
    ($call:ident, float_sum_dim, $x:ident: Float, $dim:ident: [usize]) => {
        if let Some(tensor) = $call.sums_pairs(&$x, $dim) {
            return tensor;
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use rotation;

/// How a backend turns pairs by a kernel of its own.
pub(crate) struct Rotations<B: Backend> {
    /// The most elements of a tensor: kernels count them.
    pub(crate) most: usize,
    pub(crate) turn: fn(Turn<B>) -> FloatTensor<B>,
}

impl<B: Backend> Clone for Rotations<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Rotations<B> {}

/// What is turned, `[.., length, 2 p, ..]`: of each pair `x`, the result is
/// `y[c] = sum over j, k of x[k] matrix[k, 2 c + j] factors[c, j]`, or, turned back, `y[k] = sum over c, j of x[c] ..`.
#[cfg_attr(not(feature = "cubecl"), expect(dead_code, reason = "kernels read it"))]
pub(crate) struct Turn<B: Backend> {
    pub(crate) x: FloatTensor<B>,
    /// 8 numbers, in f32.
    pub(crate) matrix: FloatTensor<B>,
    /// `[.., length, 2 p, 2]`, in f32, with leading dimensions of 1.
    pub(crate) factors: FloatTensor<B>,
    pub(crate) back: bool,
    /// The shape and the dtype of the result.
    pub(crate) form: (Shape, DType),
}

/// What a tensor is to a rotation.
pub(crate) enum Rotation<B: Backend> {
    /// The products of pairs with a matrix, `[.., p, 4]`.
    Products(Arc<Pairs<B>>),
    /// The same, as `[.., 2 p, 2]`.
    Terms(Arc<Pairs<B>>),
    /// These times factors.
    Factored(Arc<Pairs<B>>, Box<LayeredFloat<B>>),
    /// The gradient of the terms: that of their sums, `[.., 2 p, 1]`, times factors.
    OfTerms(Arc<Turned<B>>),
    /// The same, as `[.., p, 4]`.
    OfProducts(Arc<Turned<B>>),
}

/// Pairs, `[.., p, 2]`, and the matrix, `[.., 2, 4]`.
pub(crate) struct Pairs<B: Backend> {
    x: LayeredFloat<B>,
    matrix: LayeredFloat<B>,
}

/// A gradient and the factors.
pub(crate) struct Turned<B: Backend> {
    gradient: LayeredFloat<B>,
    factors: LayeredFloat<B>,
}

impl<B: BackendIr> Call<B> {
    /// The kernel, if nothing else is to happen to the op's result.
    fn rotations(&self) -> Option<Rotations<B>> {
        let layer = self.layer.as_deref().filter(|layer| layer.is_fused())?;
        let plain = !self.watched && !self.plan.own;
        plain.then(|| layer.mechanisms.get())?
    }

    /// Notes that pairs are multiplied by a matrix, or turns a gradient back.
    pub(super) fn multiplies_pairs(
        &mut self,
        x: &LayeredFloat<B>,
        y: &LayeredFloat<B>,
    ) -> Option<LayeredFloat<B>> {
        let (pairs, matrix) = (x.shape(), y.shape());
        let last = pairs.num_dims().checked_sub(1).filter(|&last| last > 1)?;
        let is = |rows: usize, columns: usize| {
            pairs[last] == rows
                && matrix.num_elements() == 8
                && matrix.num_dims() == last + 1
                && matrix[last - 1..] == [rows, columns]
        };
        let stored = self.plan.compute.unwrap_or(x.storage_dtype());
        if is(2, 4) && floats([x, y]) && self.plan.stored(stored) == stored {
            let most = self.rotations()?.most;
            let counted = (1..=most).contains(&(2 * pairs.num_elements()));
            if !counted {
                return None;
            }
            self.rotation = Some(Arc::new(Rotation::Products(Arc::new(Pairs {
                x: x.alone(),
                matrix: y.alone(),
            }))));
            return None;
        }
        let Some(Rotation::OfProducts(turned)) = x.rotation().filter(|_| is(4, 2)) else {
            return None;
        };
        let rotations = self.rotations()?;
        let mut shape = pairs.clone();
        shape.as_mut_slice()[last] = 2;
        let matrix = y.in_dtype(Some(DType::F32));
        let tensor = (rotations.turn)(Turn {
            x: turned.gradient.clone().into_computed(),
            matrix: B::float_swap_dims(matrix, last - 1, last),
            factors: turned.factors.in_dtype(Some(DType::F32)),
            back: true,
            form: (shape, self.plan.stored(stored)),
        });
        Some(self.float(tensor))
    }

    /// Notes what a reshape makes of pairs.
    pub(super) fn reshapes_pairs(&mut self, x: &LayeredFloat<B>, shape: &Shape) {
        let Some(rotation) = x.rotation() else {
            return;
        };
        let (before, last) = (x.shape(), shape.num_dims().saturating_sub(1));
        if before.num_dims() != last + 1 || last < 2 || before[..last - 1] != shape[..last - 1] {
            return;
        }
        let to = [shape[last - 1], shape[last]];
        let rotation = match rotation {
            Rotation::Products(pairs) if to == [2 * before[last - 1], 2] => {
                Rotation::Terms(pairs.clone())
            }
            Rotation::OfTerms(turned) if to == [before[last - 1] / 2, 4] => {
                Rotation::OfProducts(turned.clone())
            }
            _ => return,
        };
        self.rotation = Some(Arc::new(rotation));
    }

    /// Notes that terms are multiplied by factors, or their gradient is.
    pub(super) fn turns_pairs(&mut self, x: &LayeredFloat<B>, factors: &LayeredFloat<B>) {
        let wide = |dtype: Option<DType>| dtype.is_none_or(|dtype| dtype == DType::F32);
        let computes = wide(self.plan.compute) && wide(self.plan.store);
        let are_factors = factors.storage_dtype() == DType::F32
            && !factors.is_gradient()
            && are_of_positions(&factors.shape(), &x.shape());
        if !computes || !are_factors || self.rotations().is_none() {
            return;
        }
        let factors = Box::new(factors.alone());
        let rotation = match (x.rotation(), x.role().map(|role| &**role)) {
            (Some(Rotation::Terms(pairs)), _) => Rotation::Factored(pairs.clone(), factors),
            (None, Some(Role::Spread(gradient))) if x.is_gradient() => {
                Rotation::OfTerms(Arc::new(Turned {
                    gradient: (**gradient).clone(),
                    factors: *factors,
                }))
            }
            _ => return,
        };
        self.rotation = Some(Arc::new(rotation));
    }

    /// The sums of terms times factors: the pairs, turned.
    pub(super) fn sums_pairs(
        &mut self,
        x: &LayeredFloat<B>,
        dim: usize,
    ) -> Option<LayeredFloat<B>> {
        let mut shape = x.shape();
        let Some(Rotation::Factored(pairs, factors)) = x.rotation() else {
            return None;
        };
        if dim + 1 != shape.num_dims() {
            return None;
        }
        let Rotations::<B> { turn, .. } = self.of_wide(x.storage_dtype())?.mechanisms.get()?;
        shape.as_mut_slice()[dim] = 1;
        let (pairs, factors, form) = (pairs.clone(), factors.clone(), shape.clone());
        let turned = move |dtype| {
            turn(Turn {
                x: pairs.x.clone().into_computed(),
                matrix: pairs.matrix.in_dtype(Some(DType::F32)),
                factors: factors.in_dtype(None),
                back: false,
                form: (form.clone(), dtype),
            })
        };
        if !self.plan.recompute && self.layer().low().is_none() {
            return Some(self.float(turned(DType::F32)));
        }
        let turned = Arc::new(turned);
        let again = turned.clone();
        let depth = self.of_recomputed.map_or(1, |depth| depth + 1);
        let value = Recomputed::waiting(self.op, depth, move || again(DType::F32))
            .computed(self.plan.recompute)
            // A product takes it in 16 bits, and nothing goes on in its kernel.
            .with_view(move |dtype| turned(dtype));
        let value = Later::Recomputed(Arc::new(value));
        Some(self.waiting(value, x, (shape, DType::F32)))
    }
}

/// Whether kernels read tensors of these dtypes.
fn floats<B: Backend>(tensors: [&LayeredFloat<B>; 2]) -> bool {
    let mut dtypes = tensors.into_iter().map(LayeredFloat::storage_dtype);
    dtypes.all(|dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16))
}

/// Whether `factors` has the last three dimensions of `x`, `[.., length, 2 p, 2]`, and no others.
fn are_of_positions(factors: &Shape, x: &Shape) -> bool {
    let Some(first) = x.num_dims().checked_sub(3) else {
        return false;
    };
    factors.num_dims() == x.num_dims()
        && factors[..first].iter().all(|&dim| dim == 1)
        && factors[first..] == x[first..]
        && x[first + 2] == 2
}
