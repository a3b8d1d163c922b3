//! Products in 16 bits and sums of many rows, in whatever shape and by whatever library a device computes them.

use super::devices::{Leased, devices, devices_and_cpu};
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};
use burn_layer::{Inputs, Layer, Layers, Op, Plan};

/// Products in 16 bits.
#[derive(Clone, Debug)]
struct Low(DType);

impl Layer for Low {
    fn plan(&self, op: Op, _inputs: &Inputs) -> Option<Plan> {
        (op == Op::float_matmul).then(|| Plan::compute(self.0))
    }
}

/// The numbers -1, 0 and 1, of which all dtypes hold the sums of 96 products.
fn numbers<const D: usize>(shape: [usize; D], step: usize) -> TensorData {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|index| ((index * step + index / 5) % 3) as f32 - 1.0)
        .collect();
    TensorData::new(values, shape)
}

/// The product on a device, of tensors that are views, and the same on Flex.
fn check<const D: usize>(
    device: &Device,
    [x, y]: [[usize; D]; 2],
    view: impl Fn(Tensor<D>, Tensor<D>) -> Tensor<D>,
) {
    let on = |device: &Device| {
        let x = Tensor::from_data(numbers(x, 7), device);
        let y = Tensor::from_data(numbers(y, 4), device);
        // As numbers, of which 0 and -0 are the same.
        let product = view(x, y);
        (
            product.shape(),
            product.into_data().try_to_vec::<f32>().unwrap(),
        )
    };
    assert_eq!(
        on(device),
        on(&Device::flex()),
        "{x:?} by {y:?}, {device:?}"
    );
}

#[test]
fn products_in_16_bits_are_right_however_factors_lie() {
    // Not on CubeCL's CPU runtime, which would compile for minutes.
    let low = [DType::BF16, DType::F16];
    for (base, dtype) in devices()
        .into_iter()
        .flat_map(|base| low.map(|low| (base.clone(), low)))
    {
        if !base.supports_dtype(dtype) {
            eprintln!("{base:?} has no {dtype:?}: skipped");
            continue;
        }
        let device = &Layers::on(base).layer(Low(dtype)).leased();
        // Matrices, of sizes that are no multiples of anything, and with one row or column.
        for (m, k, n) in [
            (8, 16, 8),
            (33, 47, 35),
            (130, 24, 19),
            (1, 96, 5),
            (5, 1, 7),
            (6, 9, 1),
        ] {
            check(device, [[m, k], [k, n]], |x, y| x.matmul(y));
            check(device, [[k, m], [k, n]], |x, y| x.transpose().matmul(y));
            check(device, [[m, k], [n, k]], |x, y| x.matmul(y.transpose()));
            check(device, [[k, m], [n, k]], |x, y| {
                x.transpose().matmul(y.transpose())
            });
        }
        // Tall ones.
        check(device, [[320, 8], [8, 40]], |x, y| x.matmul(y));
        // Linear layers: one factor for all matrices.
        check(device, [[3, 10, 24], [1, 24, 17]], |x, y| x.matmul(y));
        check(device, [[3, 10, 24], [1, 17, 24]], |x, y| {
            x.matmul(y.transpose())
        });
        check(device, [[1, 10, 24], [3, 24, 17]], |x, y| x.matmul(y));
        // Attention: the heads of one tensor, as views.
        check(device, [[2, 12, 3, 8], [2, 12, 3, 8]], |x, y| {
            x.swap_dims(1, 2).matmul(y.swap_dims(1, 2).transpose())
        });
        check(device, [[3, 2, 12, 12], [3, 12, 2, 8]], |x, y| {
            x.matmul(y.swap_dims(1, 2))
        });
        check(device, [[3, 2, 12, 12], [3, 12, 2, 8]], |x, y| {
            x.transpose().matmul(y.swap_dims(1, 2))
        });
        // Parts of tensors.
        check(device, [[12, 40], [40, 24]], |x, y| {
            x.narrow(1, 3, 30)
                .matmul(y.narrow(0, 5, 30).narrow(1, 1, 11))
        });
        check(device, [[12, 40], [40, 24]], |x, y| {
            x.slice([0..12, 8..40]).matmul(y.slice([8..40, 0..16]))
        });
        // Large ones, of rows that are not aligned; most terms are zero.
        check(device, [[300, 600], [96, 33]], |x, y| {
            let zeros = Tensor::zeros([504, 33], &y.device());
            x.matmul(Tensor::cat(vec![y, zeros], 0))
        });
        check(device, [[2, 260, 33], [2, 33, 270]], |x, y| x.matmul(y));
        // The result goes on, and so do the factors.
        check(device, [[24, 24], [24, 24]], |x, y| {
            let product = (x.clone() + 0.0).matmul(y.clone() * 1.0);
            product.clone().matmul(y.zeros_like()) + product.mul_scalar(2.0) + x - y
        });
    }
}

#[test]
fn sums_of_many_rows_are_right() {
    for base in devices_and_cpu() {
        let device = &Layers::on(base).layer(Low(DType::F16)).leased();
        let of = |device: &Device| {
            let x: Tensor<3> = Tensor::from_data(numbers([4, 512, 33], 7), device);
            let by_column = x.clone().sum_dims(&[0, 1]);
            let by_row = x.clone().reshape([2048, 33]).sum_dim(0);
            let both = x.clone().transpose().sum_dims(&[0, 2]);
            // Of 16 bits, which hold all numbers to 256.
            let low = x
                .clone()
                .cast(DType::BF16)
                .sum_dims(&[0, 1])
                .cast(DType::F32);
            let sums =
                [by_column, both, low].map(|sum| sum.into_data().try_to_vec::<f32>().unwrap());
            (sums, by_row.into_data().try_to_vec::<f32>().unwrap())
        };
        assert_eq!(of(device), of(&Device::flex()), "{device:?}");
    }
}

#[test]
fn additions_to_selected_rows_are_right() {
    for base in devices_and_cpu() {
        let device = &Layers::on(base).layer(Low(DType::F16)).leased();
        let of = |device: &Device| {
            let x: Tensor<2> = Tensor::from_data(numbers([9, 33], 7), device);
            let value: Tensor<2> = Tensor::from_data(numbers([400, 33], 4), device);
            let indices: Vec<i32> = (0..400).map(|index| index * index % 9).collect();
            let indices: Tensor<1, Int> = Tensor::from_data(indices.as_slice(), device);
            let sum = x.select_assign(0, indices, value, IndexingUpdateOp::Add);
            sum.into_data().try_to_vec::<f32>().unwrap()
        };
        assert_eq!(of(device), of(&Device::flex()), "{device:?}");
    }
}
