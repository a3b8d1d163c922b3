//! Products that are computed as transpositions.
//!
//! For a product in 16 bits that is four times as tall as wide, CubeCL 0.11's autotune tries kernels on GPUs with TMA whose tiles have
//! 512 rows. TMA takes 256, so their launch fails, and from then on all that is computed of the two factors: the other kernels that
//! autotune tries, and the rest of the step. Attention over many tokens has such products, and so has the backward of most
//! feed-forward blocks. The transposition of the product, which is wide, has no such kernel.

use super::call::Call;
use crate::LayerSet;
use burn_backend::{Backend, DType, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;

/// Has the backend compute an op.
macro_rules! computed {
    ($call:ident, float_matmul, $x:ident, $y:ident) => {
        $call.product($x, $y)
    };
    ($call:ident, $name:ident, $($arg:ident),*) => {
        B::$name($($arg),*)
    };
}
pub(super) use computed;

impl<B: BackendIr> Call<B> {
    pub(super) fn product(&self, x: FloatTensor<B>, y: FloatTensor<B>) -> FloatTensor<B> {
        product::<B>(&self.layer(), x, y, |product| product)
    }
}

/// The product on a backend under layers, after an elementwise `end`.
pub(super) fn product<B: Backend>(
    layers: &LayerSet,
    x: FloatTensor<B>,
    y: FloatTensor<B>,
    end: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    match layers.turns_products() && is_tall::<B>(&x, &y) {
        true => turned::<B>(x, y, end),
        false => end(B::float_matmul(x, y)),
    }
}

/// The product as the transposition of `y^T x^T`.
fn turned<B: Backend>(
    x: FloatTensor<B>,
    y: FloatTensor<B>,
    end: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let column = x.shape().num_dims() - 1;
    let turn = |tensor| B::float_swap_dims(tensor, column - 1, column);
    turn(end(B::float_matmul(turn(y), turn(x))))
}

/// Whether CubeCL tries tiles of 512 rows: those of 16 instructions for 32 rows and 8 columns each.
fn is_tall<B: Backend>(x: &FloatTensor<B>, y: &FloatTensor<B>) -> bool {
    let (x_shape, y_shape) = (x.shape(), y.shape());
    let Some(row) = x_shape.num_dims().checked_sub(2) else {
        return false;
    };
    let (rows, columns) = (x_shape[row], y_shape[row + 1]);
    let low = [x.dtype(), y.dtype()].map(|dtype| matches!(dtype, DType::BF16 | DType::F16));
    low == [true; 2] && columns > 32 && rows >= 4 * columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_backend::{TensorData, ops::FloatTensorOps};
    use burn_flex::{Flex, FlexDevice};

    fn tensor(shape: &[usize], dtype: DType) -> FloatTensor<Flex> {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
        let data = TensorData::new(values, shape.to_vec()).convert_dtype(dtype);
        Flex::float_from_data(data, &FlexDevice)
    }

    fn data(tensor: FloatTensor<Flex>) -> TensorData {
        burn_std::future::block_on(Flex::float_into_data(tensor)).unwrap()
    }

    /// `find_instruction_size` and `infer_blueprint_plane` of cubek-matmul 0.3.1.
    #[test]
    fn the_products_with_tiles_of_512_rows_are_tall() {
        for (rows, columns, dtype, tall) in [
            (1024, 64, DType::BF16, true),
            (1024, 64, DType::F16, true),
            (1024, 64, DType::F32, false),
            (256, 64, DType::BF16, true),
            (255, 64, DType::BF16, false),
            (3072, 768, DType::BF16, true),
            (1024, 32, DType::BF16, false),
            (132, 33, DType::BF16, true),
            (64, 1024, DType::BF16, false),
        ] {
            let (x, y) = (
                tensor(&[2, rows, 1], dtype),
                tensor(&[2, 1, columns], dtype),
            );
            assert_eq!(
                is_tall::<Flex>(&x, &y),
                tall,
                "{rows} by {columns}, {dtype:?}"
            );
        }
    }

    /// Matrices, batches, and factors that are broadcast and transposed. All numbers and sums are whole, and small.
    #[test]
    fn a_turned_product_is_the_product() {
        for (x, y) in [
            (vec![9, 5], vec![5, 2]),
            (vec![2, 3, 9, 5], vec![2, 3, 5, 2]),
            (vec![2, 9, 5], vec![1, 5, 3]),
        ] {
            let (x, y) = (tensor(&x, DType::BF16), tensor(&y, DType::BF16));
            let double = |tensor| Flex::float_mul_scalar(tensor, 2f32.into());
            let expected = double(Flex::float_matmul(x.clone(), y.clone()));
            let found = turned::<Flex>(x, y, double);
            assert_eq!(data(found), data(expected));
        }
    }
}
