use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;

mod apart;
mod staged;

use super::{
    buffer,
    rows::{Rows, pitch_of},
};
use crate::Fp8Format;
use staged::Stage;

/// The codes, a separate copy of their transpose, and the amax. Rows of both begin at multiples of 16 bytes. This is
/// [`Fp8Ops::fp8_quantize_transposed`](crate::Fp8Ops::fp8_quantize_transposed) on devices whose products read along the inner
/// dimension.
pub(crate) fn quantize_transposed(
    input: CubeTensor,
    scale: CubeTensor,
    format: Fp8Format,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    quantize_by(input, scale, format, Stage::of)
}

fn quantize_by(
    input: CubeTensor,
    scale: CubeTensor,
    format: Fp8Format,
    stage: impl FnOnce(&Client, [usize; 2]) -> Option<Stage>,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let shape = input.shape();
    let rank = shape.num_dims();
    let [rows, columns] = [shape[rank - 2], shape[rank - 1]];
    let turned = buffer::swapped(input.clone());
    if pitch_of(&input).is_none() && pitch_of(&turned).is_some() {
        let (codes, transposed, amax) = quantize_by(turned, scale, format, stage);
        return (transposed, codes, amax);
    }
    let mut swapped = shape.clone();
    swapped[rank - 2] = columns;
    swapped[rank - 1] = rows;

    let amax = buffer::zero_scalar(&input);
    let codes = buffer::empty_code_rows(&input, shape.clone());
    let transposed = buffer::empty_code_rows(&input, swapped);
    if shape.num_elements() > 0 {
        let stage = stage(&input.client, [rows, columns]);
        let cast = Cast {
            rows: Rows::of(input),
            scale,
            format,
            matrix: [rows, columns],
            matrices: shape.num_elements() / (rows * columns),
        };
        match stage {
            Some(stage) => staged::quantize(cast, stage, &codes, &transposed, &amax),
            None => apart::quantize(cast, &codes, &transposed, &amax),
        }
    }
    (codes, transposed, amax)
}

/// What is cast: at least one matrix, with elements.
struct Cast {
    rows: Rows,
    scale: CubeTensor,
    format: Fp8Format,
    /// Rows and columns of a matrix.
    matrix: [usize; 2],
    matrices: usize,
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::backend::ops::{FloatTensorOps, IntTensorOps};
    use burn::tensor::TensorData;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use burn_std::reader::try_read_sync;

    use super::*;
    use crate::kernels::{buffer::swapped, quantize};

    /// Sizes on both sides of a word, a tile and a block of tiles or a patch, and batches, by units that work apart and together. The
    /// reference is the cast without a transpose.
    #[test]
    fn the_copy_is_the_transpose() {
        let device = CubeDevice::Cpu(Default::default());
        let float = |data| CubeBackend::float_from_data(data, &device);
        let codes = |tensor| {
            let data = try_read_sync(CubeBackend::int_into_data(tensor));
            data.unwrap().unwrap().try_to_vec::<u8>().unwrap()
        };
        let amax = |tensor| {
            let data = try_read_sync(CubeBackend::float_into_data(tensor));
            data.unwrap().unwrap().try_to_vec::<f32>().unwrap()
        };
        for shape in [
            [1, 1, 1],
            [1, 4, 4],
            [1, 3, 7],
            [2, 17, 34],
            [3, 6, 1],
            [1, 20, 65],
            [1, 33, 8],
            [2, 0, 3],
        ] {
            for format in Fp8Format::ALL {
                let count = shape.iter().product();
                let number = |index| (index as f32 * 0.7).sin() * 20.0;
                let values: Vec<f32> = (0..count).map(number).collect();
                let input = || float(TensorData::new(values.clone(), shape));
                let scale = || float(TensorData::from([30f32]));
                let (expected, expected_amax) = quantize(input(), scale(), format);
                let expected_amax = amax(expected_amax);
                let [batches, rows, columns] = shape;
                for stage in [None, Some(Stage::SMALL)] {
                    let quantize = |input| quantize_by(input, scale(), format, |_, _| stage);
                    let (both, transposed, both_amax) = quantize(input());
                    assert_eq!(amax(both_amax), expected_amax);
                    assert_eq!(transposed.shape(), [batches, columns, rows].into());
                    // The transpose of the input, which is a view, gives the same with codes and transpose exchanged.
                    let (turned, same, _) = quantize(swapped(input()));
                    assert_eq!(same.shape(), [batches, rows, columns].into());
                    if count > 0 {
                        let [there, back] =
                            [expected.clone(), swapped(expected.clone())].map(codes);
                        assert_eq!([codes(both), codes(same)], [there.clone(), there]);
                        assert_eq!([codes(transposed), codes(turned)], [back.clone(), back]);
                    }
                }
            }
        }
    }
}
