//! The kernel. A unit takes a few pairs.

use burn_backend::{TensorMetadata, cubecl::dtype_to_storage_type};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::*;

use crate::{
    ops::Turn,
    rowwise::{address, cubes, empty, plain},
};

/// The bytes that a unit reads of the input, or writes, at a time.
const BYTES: usize = 16;

/// See [`Rotates::turn`](super::Rotates::turn).
pub(super) fn turn(turn: Turn<CubeBackend>) -> CubeTensor {
    let Turn {
        x,
        matrix,
        factors,
        back,
        form,
    } = turn;
    let [x, matrix, factors] = [x, matrix, factors].map(plain);
    let output = empty(&x, form);
    // All numbers of a text: each two factors are for one.
    let period = factors.shape().num_elements() / 2;
    let elements = x.shape().num_elements();
    let size = x.dtype.size().max(output.dtype.size());
    let fits = |vector: &usize| vector * size <= BYTES && period.is_multiple_of(*vector);
    // There are two in each pair.
    let vector = [8, 4].into_iter().find(fits).unwrap_or(2);
    let vectors = elements / vector;
    let client = x.client.clone();
    let dim = CubeDim::new(&client, vectors);
    let dtypes = [x.dtype, output.dtype].map(dtype_to_storage_type);
    turn_kernel::launch(
        &client,
        cubes(vectors.div_ceil(dim.num_elems() as usize)),
        dim,
        address(elements),
        vector,
        x.into_buffer_arg(),
        matrix.into_buffer_arg(),
        factors.into_buffer_arg(),
        output.clone().into_buffer_arg(),
        vectors,
        period / vector,
        vector,
        back,
        dtypes,
    );
    output
}

#[cube(launch, address_type = "dynamic")]
fn turn_kernel<F: Float, O: Float, N: Size>(
    x: &[Vector<F, N>],
    matrix: &[f32],
    factors: &[Vector<f32, N>],
    output: &mut [Vector<O, N>],
    vectors: usize,
    period: usize,
    #[comptime] width: usize,
    #[comptime] back: bool,
    #[define(F, O)] _dtypes: [ElemType; 2],
) {
    let mut at = ABSOLUTE_POS;
    while at < vectors {
        let values = Vector::<f32, N>::cast_from(x[at]);
        // Two factors for each number.
        let place = 2 * (at % period);
        let (first, second) = (factors[place], factors[place + 1]);
        let mut turned = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for pair in 0..comptime!(width / 2) {
            #[unroll]
            for to in 0..2usize {
                let mut sum = f32::new(0.0);
                #[unroll]
                for from in 0..2usize {
                    // The number before it was turned, and after that.
                    let (before, after) = if comptime!(back) {
                        (to, from)
                    } else {
                        (from, to)
                    };
                    #[unroll]
                    for term in 0..2usize {
                        let factor = comptime!(2 * (2 * pair + after) + term);
                        let factor = if comptime!(factor < width) {
                            first.extract(factor)
                        } else {
                            second.extract(comptime!(factor - width))
                        };
                        sum += values.extract(comptime!(2 * pair + from))
                            * matrix[comptime!(4 * before + 2 * after + term)]
                            * factor;
                    }
                }
                turned.insert(comptime!(2 * pair + to), sum);
            }
        }
        output[at] = Vector::cast_from(turned);
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use burn_backend::{DType, Shape, TensorData, ops::FloatTensorOps};
    use burn_std::reader::try_read_sync;

    use super::*;
    use crate::rowwise::tests::on_devices;

    #[test]
    fn the_kernel_computes_what_the_formula_says() {
        let (texts, numbers) = (3, 8);
        let number = |at: usize| (at * 37 % 23) as f32 / 4.0 - 2.0;
        let numbered = |range: core::ops::Range<usize>| range.map(number).collect::<Vec<f32>>();
        let x = numbered(0..texts * numbers);
        let matrix = numbered(3..11);
        let factors = numbered(7..7 + 2 * numbers);
        let expected = (0..texts * numbers).map(|at| {
            let (pair, to) = (at / 2, at % 2);
            let term = |from: usize, term: usize| {
                let factor = factors[2 * (at % numbers) + term];
                x[2 * pair + from] * matrix[4 * from + 2 * to + term] * factor
            };
            term(0, 0) + term(0, 1) + term(1, 0) + term(1, 1)
        });
        let expected: Vec<f32> = expected.collect();
        on_devices(|device| {
            let tensor = |values: &[f32], shape: &[usize]| {
                let data = TensorData::new(values.to_vec(), Shape::from(shape));
                CubeBackend::float_from_data(data, device)
            };
            let turned = turn(Turn {
                x: tensor(&x, &[texts, numbers]),
                matrix: tensor(&matrix, &[2, 4]),
                factors: tensor(&factors, &[1, numbers, 2]),
                back: false,
                form: (Shape::new([texts, numbers]), DType::F32),
            });
            let turned = try_read_sync(CubeBackend::float_into_data(turned));
            let turned = turned.unwrap().unwrap().try_to_vec::<f32>().unwrap();
            for (found, expected) in turned.iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-4, "{found} {expected}");
            }
        });
    }
}
