//! Casts of random tensors and back.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{FloatDType, Slice};
use burn_cubecl::{CubeBackend, cubecl::client::Client, tensor::CubeTensor};
use burn_fp8::{Fp8Cast, Fp8Ops, Granularity};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::super::super::{
    device::Random,
    gpu::Gpu,
    random::{
        self, Outcome,
        casts::{decoded, same_amax, same_codes, transposed},
        reference, tensors,
    },
};
use super::super::elements::{codes, floats, numbers, packed_floats};

/// How a tensor lies in its memory.
#[derive(Clone, Copy, Debug)]
enum View {
    Whole,
    /// The last two dimensions are swapped.
    Turned,
    /// The first dimension is the last in memory.
    Permuted,
    /// All rows are the same in memory.
    Expanded,
    /// It begins within the memory.
    Offset,
}

#[derive(Clone, Debug)]
struct Case {
    gpu: Gpu,
    shape: Vec<usize>,
    view: View,
    /// Whether there are no gaps between rows in memory.
    packed: bool,
    numbers: tensors::Numbers,
    seed: u64,
    dtype: FloatDType,
    cast: Fp8Cast,
    /// The scale, if it does not come from the amax.
    given: Option<f32>,
    back: FloatDType,
}

/// About as long as what kernels read at once, as their tiles, and as rows that a cube can hold.
fn side() -> impl Strategy<Value = usize> {
    let near = vec![
        15usize, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 260,
    ];
    prop_oneof![1 => Just(1usize), 3 => 2usize..12, 4 => select(near), 1 => 12usize..1200]
}

fn shapes() -> impl Strategy<Value = Vec<usize>> {
    (vec(1usize..4, 0..=2), side(), side())
        .prop_map(|(outer, rows, columns)| outer.into_iter().chain([rows, columns]).collect())
        // The machine takes about a second for so many.
        .prop_filter("too large", |shape: &Vec<usize>| {
            shape.iter().product::<usize>() < 1 << 14
        })
}

fn cases() -> impl Strategy<Value = Case> {
    let gpu = select(vec![Gpu::Ampere, Gpu::Ada, Gpu::Hopper]);
    let view = select(vec![
        View::Whole,
        View::Turned,
        View::Permuted,
        View::Expanded,
        View::Offset,
    ]);
    let dtypes = (random::dtypes(), random::dtypes());
    let cast = (random::granularities(), random::formats(), any::<bool>());
    let given = proptest::option::weighted(0.3, select(vec![0.9f32, 1.0, 300.0, 1e-20]));
    (
        (gpu, shapes(), view, any::<bool>()),
        (tensors::kinds(), any::<u64>()),
        (dtypes, cast, given),
    )
        .prop_map(
            |((gpu, shape, view, packed), (numbers, seed), (dtypes, cast, given))| Case {
                gpu,
                shape,
                view,
                packed,
                numbers,
                seed,
                dtype: dtypes.0,
                cast: Fp8Cast::new(cast.0, cast.1).with_power_of_two(cast.2),
                given: given.filter(|_| cast.0 == Granularity::Tensor),
                back: dtypes.1,
            },
        )
}

impl Case {
    fn input(&self, client: &Client) -> CubeTensor {
        let last = self.shape.len() - 1;
        let mut stored = self.shape.clone();
        match self.view {
            View::Whole => {}
            View::Turned => stored.swap(last - 1, last),
            View::Permuted => stored.rotate_left(1),
            View::Expanded => stored[last - 1] = 1,
            View::Offset => stored[0] += 1,
        }
        let count = stored.iter().product();
        let numbers = self.numbers.draw_all(&mut Random::new(self.seed), count);
        let whole = match self.packed {
            true => packed_floats(client, &numbers, &stored, self.dtype),
            false => floats(client, &numbers, &stored, self.dtype),
        };
        match self.view {
            View::Whole => whole,
            View::Turned => CubeBackend::float_swap_dims(whole, last - 1, last),
            View::Permuted => {
                let axes: Vec<usize> = [last].into_iter().chain(0..last).collect();
                CubeBackend::float_permute(whole, &axes)
            }
            View::Expanded => CubeBackend::float_expand(whole, self.shape.as_slice().into()),
            View::Offset => CubeBackend::float_slice(whole, &[Slice::new(1, None, 1)]),
        }
    }
}

fn check(case: &Case) -> Outcome {
    let Some(client) = case.gpu.client() else {
        return Ok(());
    };
    let input = case.input(&client);
    let host = numbers(&input);
    let expected = reference::cast(case.cast, case.given, &case.shape, &host);
    let turned = transposed(&expected);
    let (format, granularity) = (case.cast.format, case.cast.granularity);
    let amax = reference::amax(host);
    let same_amax = |found: CubeTensor| same_amax(&numbers(&found), amax);
    same_amax(CubeBackend::fp8_amax(input.clone()))?;

    let (found, scale) = match granularity {
        Granularity::Tensor => {
            let scale = match case.given {
                Some(scale) => floats(&client, &[scale], &[1], FloatDType::F32),
                None => {
                    let amax = CubeBackend::fp8_amax(input.clone());
                    CubeBackend::fp8_scales(amax, format, case.cast.power_of_two)
                }
            };
            let (both, turned_codes, found) =
                CubeBackend::fp8_quantize_transposed(input.clone(), scale.clone(), format);
            same_amax(found)?;
            same_codes(codes(&both), &expected)?;
            same_codes(codes(&turned_codes), &turned)?;
            let (direct, found) = CubeBackend::fp8_quantize(input, scale.clone(), format);
            same_amax(found)?;
            (direct, scale)
        }
        _ => CubeBackend::fp8_quantize_blocks(input, case.cast),
    };
    same_codes(codes(&found), &expected)?;
    prop_assert_eq!(numbers(&scale), expected.scales.clone());

    let last = case.shape.len() - 1;
    let found_turned = CubeBackend::int_swap_dims(found.clone(), last - 1, last);
    let scale_turned = match granularity {
        Granularity::Tensor => scale.clone(),
        _ => CubeBackend::float_swap_dims(scale.clone(), last - 1, last),
    };
    for (codes, scale, data) in [
        (found, scale, &expected),
        (found_turned, scale_turned, &turned),
    ] {
        let back = CubeBackend::fp8_dequantize(codes, scale, data.granularity, format, case.back);
        decoded(&numbers(&back), data, case.back)?;
    }
    Ok(())
}

#[test]
fn random_casts_and_back() {
    if Gpu::Hopper.client().is_none() {
        return;
    }
    random::check(8, cases(), check);
}
