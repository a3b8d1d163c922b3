//! Tensors without elements.

use burn::tensor::{FloatDType, Tensor};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Tensor, Granularity, scaled_matmul_with_amax};

use super::device::{devices, values};

/// Batches of none, also broadcast, and matrices without rows, terms or columns.
#[test]
fn products_without_elements_or_terms() {
    let block = Granularity::Block {
        rows: 1,
        columns: 1,
    };
    for device in devices() {
        for (left, right, shape) in [
            ([0, 2, 3], [1, 3, 4], [0, 2, 4]),
            ([1, 2, 3], [0, 3, 4], [0, 2, 4]),
            ([0, 0, 2], [0, 2, 0], [0, 0, 0]),
            ([2, 0, 3], [1, 3, 4], [2, 0, 4]),
            ([2, 1, 3], [2, 3, 0], [2, 1, 0]),
            ([2, 1, 0], [1, 0, 2], [2, 1, 2]),
        ] {
            for granularity in [Granularity::Tensor, Granularity::Row, block] {
                let cast = Fp8Cast::new(granularity, Fp8Format::E4M3);
                let [a, b] = [left, right].map(|shape| {
                    Fp8Tensor::quantize_as(Tensor::<3>::ones(shape, &device), cast).unwrap()
                });
                let bias = Some(Tensor::full([shape[2]], 0.5, &device));
                let product = scaled_matmul_with_amax(&a, &b, bias, FloatDType::F32);
                let (product, found) = product.unwrap();
                assert_eq!(product.dims(), shape);
                let biases = vec![0.5; shape.iter().product()];
                let largest = if biases.is_empty() { 0.0 } else { 0.5 };
                assert_eq!((values(product), values(found)), (biases, vec![largest]));
            }
        }
    }
}
