//! The tensors of a product as cuBLASLt takes them.

use burn::backend::{TensorMetadata, ops::FloatTensorOps};
use burn::tensor::{DType, Shape, Slice};
use burn_cubecl::{
    CubeBackend,
    kernel::{cast, into_contiguous},
    tensor::CubeTensor,
};
use burn_std::Metadata;

use super::{
    factors::factors,
    plan::{BiasPlan, Matrix, Plan, Source},
};
use crate::{
    Bias,
    kernels::{
        buffer,
        matmul::{Product, tile::along},
    },
};

/// Codes with the inner dimension contiguous, the factors by which they are multiplied, and the output, in the sizes of a plan.
pub(super) struct Operands {
    pub(super) lhs: CubeTensor,
    pub(super) rhs: CubeTensor,
    pub(super) lhs_factor: CubeTensor,
    pub(super) rhs_factor: CubeTensor,
    /// In the output's dtype.
    pub(super) bias: Option<CubeTensor>,
    pub(super) output: CubeTensor,
}

impl Operands {
    pub(super) fn of(product: &Product, plan: &Plan) -> Self {
        let rank = product.lhs.meta.num_dims();
        let (row, column) = (rank - 2, rank - 1);
        let (lhs, rhs) = (&product.lhs, &product.rhs);
        let dtype = DType::from(product.spec.output);
        let [lhs_factor, rhs_factor] =
            factors(&product.lhs_scales.tensor, &product.rhs_scales.tensor);
        let mut shape = product.shape();
        shape[column] = plan.n;
        Self {
            lhs: match plan.lhs {
                Source::AsIs { .. } => lhs.clone(),
                Source::Copied => along(lhs, row, column, plan.m),
            },
            rhs: match plan.rhs {
                Source::AsIs { .. } => rhs.clone(),
                Source::Copied => along(rhs, column, row, plan.n),
            },
            lhs_factor,
            rhs_factor,
            bias: match (&product.bias, plan.bias) {
                (Bias::Row(bias), BiasPlan::Epilogue) => {
                    Some(padded(cast(bias.clone(), dtype), plan.n))
                }
                _ => None,
            },
            output: buffer::empty_floats(lhs, shape, dtype),
        }
    }

    /// What the library is given.
    pub(super) fn given(&self) -> burn_cublaslt::Operands<'_> {
        let handle = |tensor: &CubeTensor| tensor.handle.clone();
        burn_cublaslt::Operands {
            client: &self.output.client,
            lhs: handle(&self.lhs),
            rhs: handle(&self.rhs),
            output: handle(&self.output),
            factors: Some([&self.lhs_factor, &self.rhs_factor].map(handle)),
            bias: self.bias.as_ref().map(handle),
            offsets: vec![[0; 3]],
        }
    }

    /// The finished product, when the output holds what cuBLASLt computes.
    pub(super) fn into_output(self, product: &Product, plan: &Plan) -> CubeTensor {
        let output = narrowed(self.output, product.shape());
        match (&product.bias, plan.bias) {
            (Bias::Row(bias), BiasPlan::Afterwards) => {
                let mut shape = vec![1; output.meta.num_dims()];
                *shape.last_mut().expect("a matrix") = bias.shape().num_elements();
                let bias =
                    CubeBackend::float_reshape(cast(bias.clone(), output.dtype), shape.into());
                CubeBackend::float_add(output, bias)
            }
            _ => output,
        }
    }
}

/// The matrix of a tensor; `None` for a batch of several.
pub(super) fn matrix(tensor: &CubeTensor) -> Option<Matrix> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let rank = shape.num_dims();
    let batches: usize = shape.iter().take(rank - 2).product();
    (batches == 1).then(|| Matrix {
        rows: shape[rank - 2],
        columns: shape[rank - 1],
        row_stride: strides[rank - 2],
        column_stride: strides[rank - 1],
    })
}

/// A row of `length` elements that begins with those of `row`. What follows them is for columns that are not shown.
fn padded(row: CubeTensor, length: usize) -> CubeTensor {
    let elements = row.shape().num_elements();
    if elements == length {
        return into_contiguous(row);
    }
    let padded = buffer::empty_floats(&row, Shape::new([length]), row.dtype);
    CubeBackend::float_slice_assign(padded, &[Slice::from(0..elements)], row)
}

/// A new tensor without its last columns, where it lies.
fn narrowed(tensor: CubeTensor, shape: Shape) -> CubeTensor {
    let hidden = tensor.shape().last().expect("a matrix") - shape.last().expect("a matrix");
    let hidden = (hidden * tensor.dtype.size()) as u64;
    let layout = Metadata::new(shape, tensor.meta.strides().clone());
    CubeTensor::new(
        tensor.client,
        tensor.handle.offset_end(hidden),
        layout,
        tensor.device,
        tensor.dtype,
    )
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::tensor::{FloatDType, TensorData};
    use burn_cubecl::{CubeDevice, ops::permute};
    use burn_cublaslt::{Order, Product as Described};
    use burn_std::reader::try_read_sync;
    use cubecl::cpu::CpuDevice;

    use super::*;
    use crate::{
        Fp8Format::{self, E4M3},
        MatmulSpec, kernels,
        kernels::{matmul::MatmulRoutine, matmul::cublaslt::plan::plan},
    };

    fn float<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> CubeTensor {
        let device = CubeDevice::Cpu(CpuDevice);
        CubeBackend::float_from_data(TensorData::new(values, shape), &device)
    }

    /// Whole numbers from -8 to 8, which every format and output has.
    fn wave(count: usize, step: usize) -> Vec<f32> {
        (0..count)
            .map(|index| (index * step % 17) as f32 - 8.0)
            .collect()
    }

    fn values(tensor: CubeTensor) -> Vec<f32> {
        let data = try_read_sync(CubeBackend::float_into_data(tensor));
        data.unwrap().unwrap().iter().collect()
    }

    /// Codes in memory, from where a tensor starts, as numbers.
    fn memory(codes: &CubeTensor, format: Fp8Format) -> Vec<f32> {
        let (client, device) = (codes.client.clone(), codes.device.clone());
        let length = codes.handle.size_in_used() as usize;
        let row = Shape::new([length]);
        let row =
            CubeTensor::new_contiguous(client, device, row, codes.handle.clone(), codes.dtype);
        values(kernels::dequantize(
            row,
            float(vec![1.0], [1]),
            format,
            FloatDType::F32,
        ))
    }

    /// What cuBLASLt computes, according to its documentation: `D[i + j ldd] = Σ A[l + i lda] B[l + j ldb]`, times both factors,
    /// plus `bias[i]`. `A` is our right side, by columns, and `B` our left side, by rows.
    fn documented(operands: &Operands, product: &Described, format: Fp8Format) -> Vec<f32> {
        let (a, b) = (memory(&operands.rhs, format), memory(&operands.lhs, format));
        let [lhs, rhs, d] = [product.lhs, product.rhs, product.output];
        assert_eq!([lhs.order, rhs.order], [Order::Rows, Order::Columns]);
        assert!(product.factors && product.batches == 1);
        let factor =
            values(operands.lhs_factor.clone())[0] * values(operands.rhs_factor.clone())[0];
        let bias = operands.bias.clone().map(values);
        assert_eq!(bias.is_some(), product.bias);
        let mut output = vec![f32::NAN; d.rows * d.columns];
        for j in 0..d.rows {
            for i in 0..d.columns {
                let term = |l| a[l + i * rhs.leading] * b[l + j * lhs.leading];
                let sum: f32 = (0..lhs.columns).map(term).sum();
                output[i + j * d.leading] =
                    sum * factor + bias.as_ref().map_or(0.0, |bias| bias[i]);
            }
        }
        output
    }

    /// Multiples of 16 and other sizes, both orders of each operand in memory, biases within the product and after it.
    #[test]
    fn the_padded_transposed_product_is_the_product() {
        for [m, k, n] in [[16, 48, 32], [7, 48, 33], [5, 47, 16], [3, 1, 1]] {
            for (output, turned, has_bias) in [
                (FloatDType::F32, [false, false], true),
                (FloatDType::F32, [true, true], false),
                (FloatDType::BF16, [false, true], true),
                (FloatDType::F16, [true, false], true),
            ] {
                let codes = |shape: [usize; 2], step, turned| {
                    let [rows, columns] = shape;
                    let one = float(vec![1.0], [1]);
                    let cast = |shape| {
                        kernels::quantize(float(wave(rows * columns, step), shape), one, E4M3).0
                    };
                    match turned {
                        true => permute(cast([columns, rows]), &[1, 0]),
                        false => cast(shape),
                    }
                };
                let bias = match has_bias {
                    true => Bias::Row(float(wave(n, 7), [n])),
                    false => Bias::None,
                };
                let product = Product::new(
                    [codes([m, k], 3, turned[0]), codes([k, n], 5, turned[1])],
                    [4.0, 0.5].map(|scale| float(vec![scale], [1])),
                    bias,
                    MatmulSpec::new(E4M3, E4M3, output),
                );
                let (lhs, rhs) = (matrix(&product.lhs), matrix(&product.rhs));
                let plan = plan(lhs.unwrap(), rhs.unwrap(), product.spec, has_bias).unwrap();
                let mut operands = Operands::of(&product, &plan);
                let described = plan.product(product.spec);
                let computed = documented(&operands, &described, E4M3);
                let computed = float(computed, [plan.m, plan.n]);
                operands.output = cast(computed, operands.output.dtype);
                let found = operands.into_output(&product, &plan);
                assert_eq!(found.shape(), [m, n].into());
                let expected = values(MatmulRoutine::Direct.matmul(product));
                assert_eq!(values(found), expected, "{plan:?}, {output:?}");
            }
        }
    }

    /// By the number of its rows and columns, with batch dimensions of one matrix.
    #[test]
    fn a_batch_of_several_is_no_matrix() {
        let tensor = |shape: [usize; 3]| float(vec![0.0; shape.iter().product()], shape);
        let one = matrix(&tensor([1, 2, 3])).unwrap();
        assert_eq!([one.rows, one.columns], [2, 3]);
        assert_eq!([one.row_stride, one.column_stride], [3, 1]);
        assert!(matrix(&tensor([2, 2, 3])).is_none());
    }
}
