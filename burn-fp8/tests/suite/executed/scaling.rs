//! Scales from amaxes, from histories, and of blocks.

use burn::tensor::FloatDType;
use burn_cubecl::{CubeBackend, cubecl::client::Client, tensor::CubeTensor};
use burn_fp8::recipe::{AmaxCompute, ScaleUpdate};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Ops, Granularity};

use super::super::{
    device::Random,
    fixtures,
    gpu::{Gpu, launched},
};
use super::elements::{self, numbers};

fn floats(client: &Client, values: &[f32], shape: &[usize]) -> CubeTensor {
    elements::floats(client, values, shape, FloatDType::F32)
}

/// Transformer Engine's rule, as the documentation of `DelayedScaling` describes it.
fn updated(history: &[f32], scale: f32, amax: f32, update: ScaleUpdate) -> (Vec<f32>, f32) {
    if amax == 0.0 {
        return (history.to_vec(), scale);
    }
    let mut window = history[1..].to_vec();
    window.push(amax);
    let largest = match update.algorithm {
        AmaxCompute::MostRecent => amax,
        AmaxCompute::Max => window.iter().copied().fold(0.0, f32::max),
    };
    window[0] = if history.len() == 1 { 0.0 } else { window[0] };
    // The oldest amax is dropped, and the first slot is free.
    let mut new = window;
    new[0] = 0.0;
    let scale = match largest > 0.0 && largest.is_finite() {
        true => (update.fp8_max / 2f32.powi(update.margin) / largest).min(f32::MAX),
        false => scale,
    };
    (new, scale)
}

#[test]
fn histories_move_on() {
    let Some(client) = Gpu::Ada.client() else {
        return;
    };
    // Fewer slots than a warp has threads, up to more than a block has.
    for length in [1, 2, 5, 40, 1100] {
        for algorithm in [AmaxCompute::Max, AmaxCompute::MostRecent] {
            let update = ScaleUpdate {
                fp8_max: 448.0,
                margin: 1,
                algorithm,
            };
            for (step, amax) in [3.0, 0.0, f32::NAN, f32::INFINITY, 1e-42, 99.0]
                .into_iter()
                .enumerate()
            {
                // The largest amax of the history is in a different slot each time.
                let mut history: Vec<f32> = (0..length)
                    .map(|slot| ((slot * 5 + step * 11) % 37) as f32)
                    .collect();
                history[0] = 0.0;
                let (new_history, new_scale) = CubeBackend::fp8_update_scale(
                    floats(&client, &history, &[length]),
                    floats(&client, &[2.0], &[1]),
                    floats(&client, &[amax], &[1]),
                    update,
                );
                let (expected_history, expected_scale) = updated(&history, 2.0, amax, update);
                let case = (length, algorithm, amax);
                for (found, expected) in numbers(&new_history).into_iter().zip(expected_history) {
                    assert!(
                        found == expected || found.is_nan() && expected.is_nan(),
                        "{case:?}"
                    );
                }
                assert_eq!(numbers(&new_scale), [expected_scale], "{case:?}");
            }
        }
    }
}

/// Every block has the scale of its own amax, and every code is the nearest.
#[test]
fn blocks_have_scales_of_their_own() {
    let Some(client) = Gpu::Hopper.client() else {
        return;
    };
    let mut random = Random::new(5);
    let block = |rows, columns| Granularity::Block { rows, columns };
    // Rows of 70 are no whole words, and blocks of 10 rows are no whole tiles. There, zeros, amaxes, scales and codes take one
    // kernel each.
    for (columns, granularity, [block_rows, block_columns], kernels) in [
        (70, Granularity::Row, [1, 70], 4),
        (72, Granularity::Row, [1, 72], 1),
        (70, Granularity::Column, [37, 1], 1),
        (70, block(1, 16), [1, 16], 4),
        (72, block(1, 16), [1, 16], 1),
        (72, block(10, 1), [10, 1], 4),
        (70, block(32, 32), [32, 32], 1),
    ] {
        let (format, [batch, rows]) = (Fp8Format::E4M3, [2, 37]);
        let mut inputs = random.normals(batch * rows * columns);
        inputs[..80].fill(0.0);
        let cast = Fp8Cast::new(granularity, format);
        let input = floats(&client, &inputs, &[batch, rows, columns]);
        let before = launched(&client).len();
        let (codes, scales) = CubeBackend::fp8_quantize_blocks(input, cast);
        let launched = launched(&client);
        // Rows with gaps are copied first if one kernel cannot do it all.
        let copies = usize::from(kernels > 1);
        assert_eq!(launched.len() - before - copies, kernels, "{launched:?}");
        // The codes lie along the sums that such scales are meant for, if the build can use a GPU's tensor cores.
        let accelerated = cfg!(any(not(feature = "cuda"), feature = "cuda-cpp"));
        let [row_stride, column_stride] = [1, 2].map(|dim| codes.meta.strides()[dim]);
        match accelerated && block_rows >= block_columns {
            true => assert_eq!((row_stride, column_stride % 16), (1, 0)),
            false => assert_eq!((row_stride, column_stride), (columns, 1)),
        }
        let (down, across) = (rows.div_ceil(block_rows), columns.div_ceil(block_columns));
        let mut expected = vec![0.0f32; batch * down * across];
        let block_of = |index: usize| {
            let (matrix, row, column) = (
                index / (rows * columns),
                index / columns % rows,
                index % columns,
            );
            (matrix * down + row / block_rows) * across + column / block_columns
        };
        for (index, input) in inputs.iter().enumerate() {
            let largest = &mut expected[block_of(index)];
            *largest = largest.max(input.abs());
        }
        for amax in &mut expected {
            *amax = if *amax == 0.0 { 1.0 } else { 448.0 / *amax };
        }
        assert_eq!(numbers(&scales), expected);
        let meaning = fixtures::values(format);
        let found = elements::codes(&codes);
        for (index, (&input, &code)) in inputs.iter().zip(&found).enumerate() {
            let scaled = input * expected[block_of(index)];
            let distance = |code: usize| (meaning[code] - scaled).abs();
            let best = (0..256)
                .map(distance)
                .filter(|x| !x.is_nan())
                .fold(f32::MAX, f32::min);
            assert_eq!(distance(code as usize), best, "{scaled} as {code:#x}");
        }
        let back = CubeBackend::fp8_dequantize(codes, scales, granularity, format, FloatDType::F32);
        for (index, value) in numbers(&back).into_iter().enumerate() {
            let exact =
                f64::from(meaning[found[index] as usize]) / f64::from(expected[block_of(index)]);
            assert!((f64::from(value) - exact).abs() <= exact.abs() * 2f64.powi(-22));
        }
    }
}

#[test]
fn scales_are_bounded() {
    let Some(client) = Gpu::Ada.client() else {
        return;
    };
    let amaxes = [1.0, 3.0, 0.0, f32::NAN, f32::INFINITY, 1e-42, 448.0];
    for power_of_two in [false, true] {
        let scales = CubeBackend::fp8_scales(
            floats(&client, &amaxes, &[7]),
            Fp8Format::E4M3,
            power_of_two,
        );
        let expected = amaxes.map(|amax| {
            let scale = match amax > 0.0 && amax.is_finite() {
                true => (448.0 / amax).min(f32::MAX),
                false => 1.0,
            };
            match power_of_two {
                true => f32::from_bits(scale.to_bits() & 0xFF80_0000),
                false => scale,
            }
        });
        assert_eq!(numbers(&scales), expected);
    }
}
