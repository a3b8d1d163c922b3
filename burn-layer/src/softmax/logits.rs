//! Scores as kernels read them: scaled and masked.

use burn_backend::{TensorMetadata, cubecl::dtype_to_storage_type};
use burn_cubecl::{
    CubeBackend,
    kernel::{into_contiguous, untile},
    tensor::CubeTensor,
};
use cubecl::{client::Client, ir::ElemType, prelude::*};

use crate::{
    ops::{Logits, Scale},
    rowwise::{Rows, plain},
};

/// Numbers with which scores are scaled and masked.
#[derive(CubeLaunch, CubeType)]
pub(super) struct Numbers {
    factor: f32,
    fill: f32,
    /// The number of heads, and of queries of each.
    heads: usize,
    queries: usize,
    /// How many rows of the mask are between batches, heads and queries.
    batch_step: usize,
    head_step: usize,
    query_step: usize,
}

/// What is done with elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scaling {
    Nothing,
    By,
    Over,
}

impl Scaling {
    pub(super) fn of(scale: Scale) -> (Self, f32) {
        match scale {
            Scale::Nothing => (Self::Nothing, 1.0),
            Scale::By(factor) => (Self::By, factor),
            // Dividing takes many times as long, and by a power of two the quotients are the same.
            Scale::Over(factor) if is_power_of_two(factor) => (Self::By, factor.recip()),
            Scale::Over(factor) => (Self::Over, factor),
        }
    }
}

/// Whether a factor and its inverse are powers of two in f32's normal range.
fn is_power_of_two(factor: f32) -> bool {
    let mantissa = factor.to_bits() & 0x7F_FFFF;
    factor.is_normal() && factor.recip().is_normal() && mantissa == 0
}

/// What a kernel is launched with.
pub(super) struct Source {
    pub(super) x: CubeTensor,
    pub(super) mask: Option<CubeTensor>,
    pub(super) scaling: Scaling,
    factor: f32,
    fill: f32,
    heads: [usize; 2],
    steps: [usize; 3],
}

impl Source {
    pub(super) fn of(logits: Logits<CubeBackend>) -> Self {
        let Logits { x, scale, mask } = logits;
        let (scaling, factor) = Scaling::of(scale);
        let x = plain(x);
        let (mut heads, mut steps, mut fill) = ([1; 2], [0; 3], 0.0);
        let mask = mask.map(|mask| {
            let (shape, elements) = (x.shape(), untile(mask.elements));
            fill = mask.fill;
            heads = [shape[1], shape[2]];
            // A mask that is broadcast is read as it lies, if its rows are whole.
            let (elements, found) = match steps_of(&elements) {
                Some(found) => (elements, found),
                None => {
                    let elements = into_contiguous(elements);
                    let found = steps_of(&elements).expect("rows without gaps are whole");
                    (elements, found)
                }
            };
            steps = found;
            elements
        });
        Self {
            x,
            mask,
            scaling,
            factor,
            fill,
            heads,
            steps,
        }
    }

    /// How rows are read, in loads of elements of so many bytes. A mask's are read with them, so that loads have to divide them.
    pub(super) fn rows(&self, size: usize) -> Rows {
        let (client, shape) = (&self.x.client, &self.x.shape());
        match self.mask {
            Some(_) => Rows::of_whole_loads(client, shape, size),
            None => Rows::of(client, shape, size),
        }
    }

    pub(super) fn client(&self) -> Client {
        self.x.client.clone()
    }

    /// The elements of `x` and of the mask.
    pub(super) fn types(&self) -> [ElemType; 2] {
        let mask = self.mask.as_ref().unwrap_or(&self.x);
        [self.x.dtype, mask.dtype].map(dtype_to_storage_type)
    }

    pub(super) fn numbers(&self) -> NumbersLaunch {
        let ([heads, queries], [batch_step, head_step, query_step]) = (self.heads, self.steps);
        NumbersLaunch::new(
            self.factor,
            self.fill,
            heads,
            queries,
            batch_step,
            head_step,
            query_step,
        )
    }
}

/// How many rows are between the batches, heads and queries of a mask; `None` if its rows do not lie whole.
fn steps_of(mask: &CubeTensor) -> Option<[usize; 3]> {
    let (shape, strides) = (mask.meta.shape(), mask.meta.strides());
    let columns = shape[3];
    let step = |dim: usize| match shape[dim] {
        1 => Some(0),
        _ => strides[dim]
            .is_multiple_of(columns)
            .then(|| strides[dim] / columns),
    };
    let whole = columns == 1 || strides[3] == 1;
    whole
        .then(|| Some([step(0)?, step(1)?, step(2)?]))
        .flatten()
}

/// The elements of a load, in the row with that number.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn logits<F: Float, M: Numeric, N: Size>(
    x: &[Vector<F, N>],
    mask: &ComptimeOption<&[Vector<M, N>]>,
    at: usize,
    row: usize,
    width: usize,
    numbers: &Numbers,
    #[comptime] scaling: Scaling,
) -> Vector<f32, N> {
    let values = Vector::<f32, N>::cast_from(x[at]);
    let values = scaled::<F, N>(values, numbers.factor, scaling);
    let fill = f32::cast_from(F::cast_from(numbers.fill));
    filled::<M, N>(values, mask, at, row, width, fill, numbers)
}

/// Scales, and rounds to `F`.
#[cube]
pub(super) fn scaled<F: Float, N: Size>(
    values: Vector<f32, N>,
    factor: f32,
    #[comptime] scaling: Scaling,
) -> Vector<f32, N> {
    match comptime!(scaling) {
        Scaling::Nothing => values,
        Scaling::By => rounded::<F, N>(values * Vector::new(factor)),
        Scaling::Over => rounded::<F, N>(values / Vector::new(factor)),
    }
}

/// Rounds to `F`.
#[cube]
pub(super) fn rounded<F: Float, N: Size>(values: Vector<f32, N>) -> Vector<f32, N> {
    Vector::<f32, N>::cast_from(Vector::<F, N>::cast_from(values))
}

/// The elements of a load, in the row with that number, with `fill` where they are masked.
#[cube]
pub(super) fn filled<M: Numeric, N: Size>(
    values: Vector<f32, N>,
    mask: &ComptimeOption<&[Vector<M, N>]>,
    at: usize,
    row: usize,
    width: usize,
    fill: f32,
    numbers: &Numbers,
) -> Vector<f32, N> {
    let result: ComptimeOption<Vector<f32, N>> = mask.as_ref().map(|mask| {
        let batch = row / (numbers.heads * numbers.queries);
        let head = row / numbers.queries % numbers.heads;
        let query = row % numbers.queries;
        let of_mask =
            batch * numbers.batch_step + head * numbers.head_step + query * numbers.query_step;
        select_lanes::<M, N>(values, mask[of_mask * width + (at - row * width)], fill)
    });
    result.unwrap_or(values)
}

/// `fill` where the mask is not 0.
#[cube]
fn select_lanes<M: Numeric, N: Size>(
    values: Vector<f32, N>,
    mask: Vector<M, N>,
    fill: f32,
) -> Vector<f32, N> {
    let mut result = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for lane in 0..N::value() {
        let own = mask.extract(lane) == M::from_int(0);
        result.insert(lane, select(own, values.extract(lane), fill));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quotient_is_a_product_where_the_two_are_the_same() {
        let product = |factor| Scaling::of(Scale::Over(factor)).0 == Scaling::By;
        for factor in [1.0, 8.0, 0.25, -2.0, f32::MIN_POSITIVE, 2f32.powi(126)] {
            assert!(product(factor), "{factor}");
            for x in [1.1, -3.7e-5, 6.02e23, f32::NAN, f32::INFINITY, 0.0] {
                let (_, by) = Scaling::of(Scale::Over(factor));
                assert_eq!((x * by).to_bits(), (x / factor).to_bits(), "{x} / {factor}");
            }
        }
        for factor in [
            3.0,
            0.1,
            0.0,
            f32::INFINITY,
            f32::NAN,
            1e-40,
            2f32.powi(127),
        ] {
            assert!(!product(factor), "{factor}");
        }
    }
}
