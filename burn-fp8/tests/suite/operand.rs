//! Operands of a backend, compared with the tensors of a program.

use burn::backend::{Flex, ops::FloatTensorOps};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_backend::try_read_sync;
use burn_fp8::{Bias, Fp8Cast, Fp8Format, Fp8Tensor, Granularity, Operand, scaled_matmul};

use super::device::{Random, values};

#[test]
fn operands_multiply_as_tensors_do() {
    let device = Device::flex();
    let mut random = Random::new(70);
    let mut data =
        |shape: [usize; 3]| TensorData::new(random.normals(shape.iter().product()), shape);
    let (lhs, rhs, bias) = (data([2, 5, 9]), data([2, 7, 9]), data([1, 1, 7]));
    let block = |rows, columns| Granularity::Block { rows, columns };
    let granularities = [
        Granularity::Tensor,
        Granularity::Row,
        Granularity::Column,
        block(1, 4),
        block(4, 4),
    ];
    for left in granularities {
        for right in granularities {
            let left = Fp8Cast::new(left, Fp8Format::E4M3).with_power_of_two(true);
            let right = Fp8Cast::new(right, Fp8Format::E5M2);
            let tensor = |data: &TensorData, cast| {
                let tensor = Tensor::<3>::from_data(data.clone(), &device);
                Fp8Tensor::quantize_as(tensor, cast).unwrap()
            };
            let row = Tensor::<3>::from_data(bias.clone(), &device).reshape([7]);
            let [a, b] = [tensor(&lhs, left), tensor(&rhs, right).transpose()];
            let expected = scaled_matmul(&a, &b, Some(row), FloatDType::F32).unwrap();

            let flex = |data: &TensorData| Flex::float_from_data(data.clone(), &Default::default());
            let operand = |data, cast| Operand::<Flex>::cast(flex(data), cast);
            let row = Flex::float_reshape(flex(&bias), [7].into());
            let [a, b] = [operand(&lhs, left), operand(&rhs, right).transpose()];
            let expected = values(expected);
            let bias = || Bias::Row(row.clone());
            // Only cuBLASLt sums faster than precisely.
            for product in [
                a.clone().matmul_fast(b.clone(), bias(), FloatDType::F32),
                a.clone().matmul(b.clone(), bias(), FloatDType::F32),
            ] {
                let found = try_read_sync(Flex::float_into_data(product));
                let found = found.unwrap().unwrap().try_to_vec::<f32>().unwrap();
                assert_eq!(found, expected, "{left:?} by {right:?}");
            }
        }
    }
}

#[test]
fn a_known_scale_is_used_and_the_amax_returned() {
    let flex =
        |values: [f32; 2]| Flex::float_from_data(TensorData::from([values]), &Default::default());
    let scale = Flex::float_from_data(TensorData::from([4.0f32]), &Default::default());
    let (operand, amax) = Operand::<Flex>::cast_with(flex([1.0, -3.0]), scale, Fp8Format::E5M2);
    let codes = [4.0, -12.0].map(|value| Fp8Format::E5M2.encode(value));
    assert_eq!(operand.codes.storage::<u8>(), codes);
    assert_eq!(operand.granularity, Granularity::Tensor);
    assert_eq!(amax.storage::<f32>(), [3.0]);
}

/// Of the two copies of the codes, a product reads the one that lies along its inner dimension.
#[test]
fn a_left_side_is_read_by_rows_and_a_right_side_by_columns() {
    let flex = |values: [[f32; 2]; 2]| {
        // With scales that are powers of two, so that small integers stay exact.
        let cast = Fp8Cast::new(Granularity::Tensor, Fp8Format::E4M3).with_power_of_two(true);
        Operand::<Flex>::cast(
            Flex::float_from_data(TensorData::from(values), &Default::default()),
            cast,
        )
    };
    let (lhs, rhs) = (
        flex([[1.0, 2.0], [3.0, 4.0]]),
        flex([[1.0, 0.0], [2.0, 4.0]]),
    );
    let zeros = flex([[0.0; 2]; 2]).codes;
    let product = |lhs: Operand<Flex>, rhs: Operand<Flex>| {
        let product = lhs.matmul(rhs, Bias::None, FloatDType::F32);
        product.storage::<f32>().to_vec()
    };
    let expected = [5.0, 8.0, 11.0, 16.0];
    assert_eq!(product(lhs.clone(), rhs.clone()), expected);
    let left = Operand {
        transposed: zeros.clone(),
        ..lhs.clone()
    };
    let right = Operand {
        codes: zeros,
        ..rhs.clone()
    };
    assert_eq!(product(left.clone(), right.clone()), expected);
    // The transpose of a product is the product of the transposes, in the other order.
    let turned = product(rhs.transpose(), lhs.transpose());
    assert_eq!(turned, [5.0, 11.0, 8.0, 16.0]);
    assert_eq!(
        product(right.clone().transpose(), left.clone().transpose()),
        turned
    );
    assert_eq!(product(right, left), [0.0; 4]);
}

#[test]
#[should_panic(expected = "has its scales bound to its shape")]
fn an_operand_with_several_scales_is_not_reshaped() {
    let data = TensorData::from([[1.0f32, 2.0], [30.0, 40.0]]);
    let tensor = Flex::float_from_data(data, &Default::default());
    let rows = Fp8Cast::new(Granularity::Row, Fp8Format::E4M3);
    let _ = Operand::<Flex>::cast(tensor, rows).reshape([2, 1, 2].into());
}

#[test]
fn a_reshaped_operand_is_a_batch() {
    let mut random = Random::new(71);
    let mut operand = |shape: [usize; 2]| {
        let data = TensorData::new(random.normals(shape[0] * shape[1]), shape);
        let tensor = Flex::float_from_data(data, &Default::default());
        Operand::<Flex>::cast(tensor, Fp8Cast::new(Granularity::Tensor, Fp8Format::E4M3))
    };
    let (rows, other) = (operand([6, 5]), operand([5, 4]));
    let product = |rows: Operand<Flex>, other: Operand<Flex>| {
        let product = rows.matmul(other, Bias::None, FloatDType::F32);
        product.storage::<f32>().to_vec()
    };
    let expected = product(rows.clone(), other.clone());
    let (batch, single) = (
        rows.reshape([2, 3, 5].into()),
        other.reshape([1, 5, 4].into()),
    );
    assert_eq!(product(batch, single), expected);
}
