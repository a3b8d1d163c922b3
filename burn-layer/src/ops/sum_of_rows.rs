//! Sums of many rows, such as the gradient of a bias or of a norm's weight.
//!
//! CubeCL 0.11 sums each column by one group of threads, however long it is. A GPU has more threads than a layer has features, so most
//! of it waits: on an H200 the sum of 8,192 rows of 768 features takes 80 µs, which is less than a tenth of the speed of its memory. Here rows
//! are summed in parts, and then the sums of the parts.

use super::{call::Call, kernel_end::end_of_sum};
use crate::{LayerSet, LayeredFloat};
use burn_backend::{Backend, DType, FloatDType, Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;

/// The most parts. With so many, the sums of the parts are few to sum.
const PARTS: usize = 512;

/// The fewest rows of a part.
const ROWS: usize = 8;

/// The most columns. With more, there are enough sums to keep a GPU busy.
const COLUMNS: usize = 1 << 16;

/// Sums rows that were computed in 16 bits as they were computed.
macro_rules! exact_sum {
    ($call:ident, float_sum_dim, $x:ident: Float, $dim:ident: [usize]) => {
        exact_sum!(@ $call.sums_exact(&$x, &[$dim]))
    };
    ($call:ident, float_sum_dims, $x:ident: Float, $dims:ident: [&[usize]]) => {
        exact_sum!(@ $call.sums_exact(&$x, $dims))
    };
    (@ $tensor:expr) => {
        if let Some(tensor) = $tensor {
            return tensor;
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use exact_sum;

impl<B: BackendIr> Call<B> {
    /// The sum of rows in f32, if they were computed in 16 bits. Only these are read, whatever the tensor is stored in.
    pub(super) fn sums_exact(
        &mut self,
        x: &LayeredFloat<B>,
        dims: &[usize],
    ) -> Option<LayeredFloat<B>> {
        let wide = self.plan.compute.unwrap_or(x.storage_dtype()) == DType::F32;
        let narrow = x.exact().is_some() || is_narrow(x.storage_dtype());
        let parts = Parts::on(self.layer.as_ref()?, &x.shape(), dims)?;
        if !(wide && narrow) || self.plan.own || self.watched {
            return None;
        }
        let form = (self.layer().is_fused(), DType::F32);
        let rows = x.clone().into_computed();
        let sum = parts.sum::<B, 1>(form, [rows], dims, |[rows]| in_f32::<B>(rows));
        Some(self.float(sum))
    }
}

/// The sum along one or several dimensions.
pub(super) fn sum_of_rows<B: Backend>(
    layers: &LayerSet,
    tensor: FloatTensor<B>,
    dims: &[usize],
) -> FloatTensor<B> {
    let dtype = tensor.dtype();
    let float = dtype == DType::F32 || is_narrow(dtype);
    match Parts::on(layers, &tensor.shape(), dims).filter(|_| float) {
        // The sums of parts are not rounded to 16 bits: as in one sum, only their sum is.
        Some(parts) => {
            let form = (layers.is_fused(), dtype);
            parts.sum::<B, 1>(form, [tensor], dims, |[tensor]| in_f32::<B>(tensor))
        }
        None => sum_whole::<B>(tensor, dims),
    }
}

/// The sum along one or several dimensions, the last one not among them, of what is computed of `inputs` element by element, in f32. The
/// first input has the shape of what is summed; the others have it too, or are numbers of its rows.
pub(super) fn sum_of_rows_of<B: Backend, const N: usize>(
    layers: &LayerSet,
    inputs: [FloatTensor<B>; N],
    dims: &[usize],
    elements: impl FnOnce([FloatTensor<B>; N]) -> FloatTensor<B>,
) -> FloatTensor<B> {
    match Parts::on(layers, &inputs[0].shape(), dims) {
        Some(parts) => {
            let form = (layers.is_fused(), DType::F32);
            parts.sum::<B, N>(form, inputs, dims, elements)
        }
        None => sum_whole::<B>(elements(inputs), dims),
    }
}

fn sum_whole<B: Backend>(tensor: FloatTensor<B>, dims: &[usize]) -> FloatTensor<B> {
    match dims {
        [dim] => B::float_sum_dim(tensor, *dim),
        _ => B::float_sum_dims(tensor, dims),
    }
}

fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

pub(super) fn in_f32<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    match tensor.dtype() {
        DType::F32 => tensor,
        _ => B::float_cast(tensor, FloatDType::F32),
    }
}

/// How rows are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    parts: usize,
    /// The rows of a part.
    rows: usize,
    columns: usize,
}

impl Parts {
    /// Those of a tensor on the backend under layers, if it is worth it there.
    fn on(layers: &LayerSet, shape: &Shape, dims: &[usize]) -> Option<Self> {
        let parts = layers.is_on_cuda().then(|| Self::of(shape, dims));
        parts.flatten()
    }

    /// Those of a tensor whose first dimensions are summed, if it is worth it.
    fn of(shape: &Shape, dims: &[usize]) -> Option<Self> {
        let kept = (0..shape.num_dims()).filter(|dim| !dims.contains(dim) && shape[*dim] > 1);
        let (first, last) = (kept.clone().next()?, dims.iter().max()?);
        let columns = kept.map(|dim| shape[dim]).product::<usize>();
        if first < *last || columns > COLUMNS {
            return None;
        }
        let all = shape.num_elements() / columns.max(1);
        let parts = (2..=PARTS.min(all / ROWS))
            .rev()
            .find(|parts| all.is_multiple_of(*parts))?;
        let rows = all / parts;
        // Few parts are not worth another kernel.
        (parts * 8 >= PARTS).then_some(Self {
            parts,
            rows,
            columns,
        })
    }

    /// The sum along `dims` of what is computed of `inputs` in f32, in `dtype`. The backend `fuses` ops or not.
    fn sum<B: Backend, const N: usize>(
        self,
        (fuses, dtype): (bool, DType),
        inputs: [FloatTensor<B>; N],
        dims: &[usize],
        elements: impl FnOnce([FloatTensor<B>; N]) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let mut shape = inputs[0].shape();
        let computes = fuses && (N > 1 || inputs[0].dtype() != DType::F32);
        // Views come first, so that the elements are computed in the kernel that sums them.
        let elements = elements(inputs.map(|input| self.of_rows::<B>(input)));
        let sums = B::float_sum_dim(elements, 1);
        let sums = match computes {
            true => end_of_sum::<B>(sums),
            false => sums,
        };
        let sums = B::float_reshape(sums, Shape::new([self.parts, self.columns]));
        let mut sum = B::float_sum_dim(sums, 0);
        if dtype != DType::F32 {
            sum = B::float_cast(sum, dtype.into());
        }
        for &dim in dims {
            shape.as_mut_slice()[dim] = 1;
        }
        B::float_reshape(sum, shape)
    }

    /// A tensor of as many columns, or of numbers of rows, in parts.
    fn of_rows<B: Backend>(&self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        let columns = tensor.shape().num_elements() / (self.parts * self.rows);
        B::float_reshape(tensor, Shape::new([self.parts, self.rows, columns]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_backend::{TensorData, ops::FloatTensorOps};
    use burn_flex::{Flex, FlexDevice};

    #[test]
    fn many_rows_are_divided() {
        let of = |shape: &[usize], dims: &[usize]| {
            let parts = Parts::of(&Shape::from(shape.to_vec()), dims)?;
            Some([parts.parts, parts.rows, parts.columns])
        };
        // The biases of linear layers, and norms.
        assert_eq!(of(&[8, 1024, 768], &[0, 1]), Some([512, 16, 768]));
        assert_eq!(of(&[8192, 768], &[0]), Some([512, 16, 768]));
        assert_eq!(of(&[1, 8192, 768], &[1]), Some([512, 16, 768]));
        assert_eq!(of(&[32, 197, 768], &[0, 1]), Some([394, 16, 768]));
        assert_eq!(of(&[1024, 10], &[0]), Some([128, 8, 10]));
        // Of rows, not along them, and not both.
        assert_eq!(of(&[8192, 768], &[1]), None);
        assert_eq!(of(&[8, 1024, 768], &[0, 2]), None);
        assert_eq!(of(&[8, 768, 1024], &[0, 2]), None);
        // Few rows, many columns, and no parts of the same size.
        assert_eq!(of(&[64, 768], &[0]), None);
        assert_eq!(of(&[1024, 100_000], &[0]), None);
        assert_eq!(of(&[8191, 768], &[0]), None);
        // Everything, and nothing.
        assert_eq!(of(&[8192], &[0]), None);
        assert_eq!(of(&[8192, 0], &[0]), None);
        assert_eq!(of(&[0, 768], &[0]), None);
        assert_eq!(of(&[8192, 768], &[]), None);
    }

    /// All numbers are whole, and small. In 16 bits, those of parts would be rounded.
    #[test]
    fn the_sum_of_parts_is_the_sum() {
        for (shape, dims) in [
            (vec![1024, 3], vec![0]),
            (vec![4, 256, 3], vec![0, 1]),
            (vec![4, 256, 3], vec![1, 0]),
            (vec![1, 1024, 3, 2], vec![1]),
        ] {
            let count = shape.iter().product();
            let values: Vec<f32> = (0..count).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
            let data = TensorData::new(values, shape);
            let tensor = Flex::float_from_data(data, &FlexDevice);
            let parts = Parts::of(&tensor.shape(), &dims).unwrap();
            let data = |tensor| {
                let data = Flex::float_into_data(tensor);
                burn_std::reader::try_read_sync(data).unwrap().unwrap()
            };
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                for fuses in [false, true] {
                    let rounded = |tensor| Flex::float_cast(tensor, dtype.into());
                    let expected = data(rounded(Flex::float_sum_dims(tensor.clone(), &dims)));
                    let (form, low) = ((fuses, dtype), rounded(tensor.clone()));
                    let found =
                        parts.sum::<Flex, 1>(form, [low], &dims, |[low]| in_f32::<Flex>(low));
                    assert_eq!(data(found), expected, "{dtype:?}");
                }
            }
        }
    }
}
