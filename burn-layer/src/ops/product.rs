//! Products that are computed in another shape.
//!
//! For a product in 16 bits that is four times as tall as wide, CubeCL 0.11's autotune tries kernels on GPUs with TMA whose tiles have
//! 512 rows. TMA takes 256, so their launch fails, and from then on all that is computed of the two factors: the other kernels that
//! autotune tries, and the rest of the step. Linear layers have such products if all rows of a batch are multiplied at once, attention
//! over many tokens has them, and so has the backward of most feed-forward blocks. Parts of the product that are less tall have no such
//! kernel, nor has its transposition, which is wide. Where [cuBLASLt](crate::cublaslt) is installed, it computes them all.

use super::call::Call;
use crate::LayerSet;
use burn_backend::{Backend, DType, Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use burn_std::{MatmulTransformAction, MatmulTransformAnalysis, MatmulTransformPolicy};

impl<B: BackendIr> Call<B> {
    pub(super) fn product(&self, x: FloatTensor<B>, y: FloatTensor<B>) -> FloatTensor<B> {
        let inputs = self.inputs.as_ref();
        let transposed = inputs.is_some_and(|inputs| inputs.first_transposed);
        product::<B>(&self.layer(), x, y, transposed, |product| product)
    }
}

/// How a library computes products of tensors in 16 bits on a backend.
pub(crate) struct Multiply<B: Backend> {
    /// `x y`.
    pub(crate) product: Product<B>,
    /// `x^T y` over the rows of all matrices of a batch, `[1, k, n]`.
    pub(crate) over_rows: Product<B>,
}

/// A product of two tensors.
pub(crate) type Product<B> = fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>;

impl<B: Backend> Clone for Multiply<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Multiply<B> {}

/// The product on a backend under layers, after an elementwise `end`. `transposed` tells whether `x` is a view of another tensor's
/// transposition.
pub(super) fn product<B: Backend>(
    layers: &LayerSet,
    x: FloatTensor<B>,
    y: FloatTensor<B>,
    transposed: bool,
    end: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    if !is_shaped::<B>(layers, &x, &y) {
        return end(B::float_matmul(x, y));
    }
    match layers.mechanisms.get::<Multiply<B>>() {
        Some(library) => end((library.product)(x, y)),
        None => Way::of(&x.shape(), &y.shape(), transposed).multiply::<B>(x, y, end),
    }
}

/// The product by the backend's own kernels, in a shape that these can compute.
#[cfg(feature = "cubecl")]
pub(crate) fn product_by_kernels<B: Backend>(
    x: FloatTensor<B>,
    y: FloatTensor<B>,
) -> FloatTensor<B> {
    let way = Way::of(&x.shape(), &y.shape(), true);
    way.multiply::<B>(x, y, |product| product)
}

/// Whether products of tensors such as these may have to be computed in another shape.
pub(super) fn is_shaped<B: Backend>(
    layers: &LayerSet,
    x: &FloatTensor<B>,
    y: &FloatTensor<B>,
) -> bool {
    let low = |tensor: &FloatTensor<B>| matches!(tensor.dtype(), DType::BF16 | DType::F16);
    layers.is_on_cuda() && low(x) && low(y)
}

/// Whether autotune would try tiles of 512 rows on a product of this shape. A tile has 16 instructions of 32 rows and 8 columns each;
/// fewer, if there are few columns.
pub(super) fn is_tall(rows: usize, columns: usize) -> bool {
    columns > 32 && rows >= 4 * columns
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Whole,
    /// In so many parts, of as many rows each, one below the other.
    Parts(usize),
    /// As the transposition of `y^T x^T`.
    Turned,
    /// As that of all rows of a batch.
    TurnedOfAll,
}

impl Way {
    fn of(x: &Shape, y: &Shape, transposed: bool) -> Self {
        let Some(row) = x.num_dims().checked_sub(2) else {
            return Self::Whole;
        };
        let columns = y[row + 1];
        let tall = |rows: usize| is_tall(rows, columns);
        let all: usize = x[..=row].iter().product();
        let shared = y[..row].iter().all(|&matrices| matrices == 1);
        let analysis = MatmulTransformAnalysis::from_shapes(x, y);
        let rows = match MatmulTransformPolicy::default().action(&analysis) {
            MatmulTransformAction::MergeBatches { rows } => rows,
            MatmulTransformAction::Keep => x[row],
        };
        if !tall(rows) {
            return Self::Whole;
        }
        // CubeCL puts parts together again, unless they are of whole tiles.
        let fits = |parts: &usize| {
            let rows = all / parts;
            all.is_multiple_of(*parts) && rows.is_multiple_of(32) && !tall(rows)
        };
        let parts = || (1..=all / 32).find(fits);
        match (shared && !transposed).then(parts).flatten() {
            Some(parts) => Self::Parts(parts),
            None if rows == x[row] => Self::Turned,
            None => Self::TurnedOfAll,
        }
    }

    fn multiply<B: Backend>(
        self,
        x: FloatTensor<B>,
        y: FloatTensor<B>,
        end: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (mut shape, column) = (x.shape(), x.shape().num_dims() - 1);
        let (inner, columns) = (shape[column], y.shape()[column]);
        let all: usize = shape[..column].iter().product();
        shape.as_mut_slice()[column] = columns;
        let reshape = |tensor, shape: &[usize]| B::float_reshape(tensor, Shape::from(shape));
        match self {
            Self::Whole => end(B::float_matmul(x, y)),
            Self::Parts(parts) => {
                let x = reshape(x, &[parts, all / parts, inner]);
                let y = reshape(y, &[1, inner, columns]);
                B::float_reshape(end(B::float_matmul(x, y)), shape)
            }
            Self::Turned => turned::<B>(x, y, end),
            Self::TurnedOfAll => {
                let (x, y) = (reshape(x, &[all, inner]), reshape(y, &[inner, columns]));
                B::float_reshape(turned::<B>(x, y, end), shape)
            }
        }
    }
}

/// The transposition of `y^T x^T`.
fn turned<B: Backend>(
    x: FloatTensor<B>,
    y: FloatTensor<B>,
    end: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let column = x.shape().num_dims() - 1;
    let turn = |tensor| B::float_swap_dims(tensor, column - 1, column);
    let (y, x) = (turn(y), turn(x));
    // It is wide. Still, CubeCL may multiply all rows of its batch at once.
    let way = Way::of(&y.shape(), &x.shape(), true);
    turn(way.multiply::<B>(y, x, end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_backend::{TensorData, ops::FloatTensorOps};
    use burn_flex::{Flex, FlexDevice};

    fn tensor(shape: &[usize]) -> FloatTensor<Flex> {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
        let data = TensorData::new(values, shape.to_vec()).convert_dtype(DType::BF16);
        Flex::float_from_data(data, &FlexDevice)
    }

    fn data(tensor: FloatTensor<Flex>) -> TensorData {
        burn_std::future::block_on(Flex::float_into_data(tensor)).unwrap()
    }

    /// By `find_instruction_size` and `infer_blueprint_plane` of cubek-matmul 0.3.1, and `MatmulTransformPolicy`.
    #[test]
    fn products_with_tiles_of_512_rows_are_computed_in_another_shape() {
        for (x, y, transposed, way) in [
            // Attention, and the gradient of a weight.
            (
                vec![8, 12, 1024, 1024],
                vec![8, 12, 1024, 64],
                false,
                Way::Turned,
            ),
            (
                vec![8, 12, 1024, 64],
                vec![8, 12, 64, 1024],
                false,
                Way::Whole,
            ),
            (vec![3072, 8192], vec![8192, 768], true, Way::Turned),
            (vec![768, 8192], vec![8192, 3072], true, Way::Whole),
            // Linear layers: 197 rows are no whole tiles, so CubeCL multiplies all at once.
            (
                vec![128, 197, 768],
                vec![1, 768, 3072],
                false,
                Way::Parts(4),
            ),
            (vec![8, 1024, 768], vec![1, 768, 3072], false, Way::Whole),
            (vec![8192, 768], vec![768, 768], false, Way::Parts(4)),
            (
                vec![125, 197, 768],
                vec![1, 768, 6144],
                false,
                Way::TurnedOfAll,
            ),
            (vec![24625, 768], vec![768, 768], false, Way::Turned),
            // The limits.
            (vec![2, 256, 1], vec![2, 1, 64], false, Way::Turned),
            (vec![2, 255, 1], vec![2, 1, 64], false, Way::Whole),
            (vec![2, 1024, 1], vec![2, 1, 32], false, Way::Whole),
            (vec![2, 132, 1], vec![2, 1, 33], false, Way::Turned),
            (vec![4], vec![4], false, Way::Whole),
        ] {
            let found = Way::of(&Shape::from(x.clone()), &Shape::from(y.clone()), transposed);
            assert_eq!(found, way, "{x:?} by {y:?}");
        }
    }

    /// Parts are no such products themselves, and fill the rows.
    #[test]
    fn parts_are_less_tall() {
        for rows in (32..2000).step_by(32) {
            let (x, y) = (Shape::from([rows, 8]), Shape::from([8, 40]));
            let Way::Parts(parts) = Way::of(&x, &y, false) else {
                assert!(rows < 160);
                continue;
            };
            let part = Shape::from([parts, rows / parts, 8]);
            let y = Shape::from([1, 8, 40]);
            assert_eq!(
                (Way::of(&part, &y, false), rows % parts),
                (Way::Whole, 0),
                "{rows}"
            );
        }
    }

    /// The transposition's batch is the last factor's, and CubeCL would make 825 rows of it.
    #[test]
    fn what_is_turned_is_not_tall() {
        let mut multiplied = None;
        let (x, y) = (tensor(&[1, 200, 2]), tensor(&[25, 2, 33]));
        let product = Way::Turned.multiply::<Flex>(x, y, |product| {
            multiplied = Some(product.shape());
            product
        });
        assert_eq!(multiplied, Some(Shape::from([200, 825])));
        assert_eq!(product.shape(), Shape::from([25, 200, 33]));
    }

    /// Matrices, and batches, of which factors are broadcast. All numbers and sums are whole, and small.
    #[test]
    fn the_product_is_the_same_in_every_shape() {
        for (x, y, ways) in [
            (
                vec![9, 5],
                vec![5, 2],
                vec![Way::Turned, Way::TurnedOfAll, Way::Parts(3)],
            ),
            (vec![2, 3, 9, 5], vec![2, 3, 5, 2], vec![Way::Turned]),
            (
                vec![2, 9, 5],
                vec![1, 5, 3],
                vec![Way::Turned, Way::TurnedOfAll, Way::Parts(6)],
            ),
            (
                vec![2, 2, 9, 5],
                vec![1, 1, 5, 3],
                vec![Way::TurnedOfAll, Way::Parts(4)],
            ),
            // Turned, it is tall if CubeCL multiplies all of its rows at once.
            (vec![1, 200, 2], vec![25, 2, 33], vec![Way::Turned]),
        ] {
            let double = |tensor| Flex::float_mul_scalar(tensor, 2f32.into());
            let multiply = |way: Way| data(way.multiply::<Flex>(tensor(&x), tensor(&y), double));
            for way in ways {
                assert_eq!(multiply(way), multiply(Way::Whole), "{way:?}");
            }
        }
    }
}
