use burn::backend::TensorMetadata;
use burn_cubecl::{kernel::into_contiguous, tensor::CubeTensor};
use cubecl::client::Client;

mod held;
mod streamed;

use super::{blocks::Blocks, buffer, rows::Rows, scale::scales};
use crate::Fp8Cast;
use held::Team;

/// See [`Fp8Ops::fp8_quantize_blocks`](crate::Fp8Ops::fp8_quantize_blocks). With `by_columns`, the codes of each matrix are
/// stored column by column instead of row by row, and columns begin at multiples of 16 bytes.
pub(crate) fn quantize_blocks(
    input: CubeTensor,
    cast: Fp8Cast,
    by_columns: bool,
) -> (CubeTensor, CubeTensor) {
    quantize_by(input, cast, by_columns, Team::of)
}

fn quantize_by(
    input: CubeTensor,
    cast: Fp8Cast,
    by_columns: bool,
    team: impl FnOnce(&Client, &Blocks, bool) -> Option<Team>,
) -> (CubeTensor, CubeTensor) {
    cast.assert_several_scales();
    let shape = input.shape();
    let by_columns = by_columns && shape.num_dims() > 1;
    let codes = match by_columns {
        true => buffer::empty_code_columns(&input, &shape),
        false => buffer::empty_codes(&input.client, &input.device, shape.clone()),
    };
    if shape.num_elements() == 0 {
        // Rows and columns without elements still have scales.
        let amax = buffer::zeros(&input, cast.granularity.scale_shape(&shape).into());
        return (codes, scales(amax, cast.format, cast.power_of_two));
    }
    let blocks = Blocks::of(&shape, cast.granularity);
    let scale = match team(&input.client, &blocks, by_columns) {
        Some(team) => held::quantize(&Rows::of(input), cast, &blocks, team, &codes),
        None => {
            let input = into_contiguous(input);
            streamed::quantize(&input, cast, &blocks, by_columns, &codes)
        }
    };
    (codes, scale)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::backend::ops::{FloatTensorOps, IntTensorOps};
    use burn::tensor::TensorData;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use burn_std::reader::try_read_sync;

    use super::*;
    use crate::{Fp8Format, Granularity};

    /// The limit that the README states.
    #[test]
    fn a_cube_holds_blocks_of_32_768_elements() {
        let holds = |block, by_columns| {
            let blocks = Blocks {
                matrix: [40_960, 40_960],
                block,
            };
            Team::holding(&blocks, by_columns, 256).is_some()
        };
        for block in [[1, 128], [1, 32_768], [1_024, 1], [128, 128]] {
            assert!(holds(block, false), "{block:?}");
        }
        for block in [[128, 1], [1_024, 1], [128, 128], [256, 128]] {
            assert!(holds(block, true), "{block:?}");
        }
        for block in [[1, 32_896], [1_032, 1], [512, 128]] {
            assert!(
                ![false, true]
                    .into_iter()
                    .any(|by_columns| holds(block, by_columns))
            );
        }
    }

    /// Sizes on both sides of a word, a tile and their groups, and of what teams can hold; batches; blocks that end within a
    /// tile. The reference is the cast by rows, in several kernels.
    #[test]
    fn codes_are_the_same_however_they_are_made() {
        let device = CubeDevice::Cpu(Default::default());
        let bytes = |tensor| {
            let data = try_read_sync(CubeBackend::int_into_data(tensor));
            data.unwrap().unwrap().try_to_vec::<u8>().unwrap()
        };
        let floats = |tensor| {
            let data = try_read_sync(CubeBackend::float_into_data(tensor));
            data.unwrap().unwrap()
        };
        let block = |rows, columns| Granularity::Block { rows, columns };
        let mut teams = 0;
        for shape in [[2, 3, 7], [2, 9, 36], [2, 0, 3]] {
            for granularity in [
                Granularity::Row,
                Granularity::Column,
                block(6, 1),
                block(8, 12),
            ] {
                let count = shape.iter().product();
                let number = |index| (index as f32 * 0.7).sin() * 20.0;
                let values: Vec<f32> = (0..count).map(number).collect();
                let cast = Fp8Cast::new(granularity, Fp8Format::E4M3);
                let mut quantize = |by_columns, held| {
                    let data = TensorData::new(values.clone(), shape);
                    let input = CubeBackend::float_from_data(data, &device);
                    quantize_by(input, cast, by_columns, |_, blocks, by_columns| {
                        // A team of few units, because on a processor they are threads that wait for each other.
                        let team = Team::holding(blocks, by_columns, 16).filter(|_| held);
                        teams += team.iter().count();
                        team
                    })
                };
                let (expected, scales) = quantize(false, false);
                let (expected, scales) = (bytes(expected), floats(scales));
                for (by_columns, held) in [(false, true), (true, false), (true, true)] {
                    let case = (shape, granularity, by_columns, held);
                    let (found, found_scales) = quantize(by_columns, held);
                    assert_eq!(found.shape(), shape.into());
                    if by_columns {
                        assert_eq!(found.meta.strides()[1], 1);
                        assert_eq!(found.meta.strides()[2] % 16, 0);
                    }
                    assert_eq!(floats(found_scales), scales, "{case:?}");
                    if count > 0 {
                        assert_eq!(bytes(found), expected, "{case:?}");
                    }
                }
            }
        }
        // By rows if these are whole words, by columns if blocks are whole tiles.
        assert_eq!(teams, 9);
    }
}
