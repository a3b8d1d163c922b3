//! All routines, on sizes at the edges of tiles, steps and chunks, and on layouts that they read in place.

use burn::backend::ops::IntTensorOps;
use burn::tensor::FloatDType;
use burn_cubecl::CubeBackend;
use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, matmul_by};
use burn_fp8::{Bias, Fp8Format, Fp8Ops, Granularity, MatmulSpec};

use super::super::{
    device::Random,
    gpu::{Gpu, launched},
};
use super::{
    case::{Case, check},
    elements::{floats, numbers},
    side::{Codes, Side},
};

const WHOLE: [Granularity; 2] = [Granularity::Tensor; 2];

fn plain(formats: [Fp8Format; 2], size: [usize; 4]) -> Case {
    Case {
        formats,
        codes: [Codes::Small; 2],
        output: FloatDType::F32,
        size,
        batches: [size[0]; 2],
        granularities: WHOLE,
        bias: None,
        amax: false,
        inner: [true; 2],
    }
}

const E4M3: Fp8Format = Fp8Format::E4M3;
const E5M2: Fp8Format = Fp8Format::E5M2;

fn all(gpu: Gpu, routine: MatmulRoutine, cases: impl IntoIterator<Item = Case>) {
    for case in cases {
        check(gpu, routine, &case);
    }
}

/// One scale for each side, with a bias, sizes at the edges of tiles and chunks, and more steps than can be in flight.
fn whole(formats: [Fp8Format; 2]) -> Vec<Case> {
    [
        ([1, 5, 9, 1200], [1, 1], [true, true]),
        // The left side is copied by words, the right side by codes.
        ([1, 132, 3, 37], [1, 1], [false, false]),
        ([2, 3, 130, 144], [2, 1], [true, false]),
        ([2, 2, 2, 16], [1, 2], [false, true]),
        ([1, 1, 4, 48], [1, 1], [true, true]),
    ]
    .into_iter()
    .map(|(size, batches, inner)| Case {
        batches,
        inner,
        bias: Some(FloatDType::F32),
        amax: true,
        ..plain(formats, size)
    })
    .collect()
}

/// A scale for each row and each column.
fn rows() -> Case {
    Case {
        output: FloatDType::F16,
        granularities: [Granularity::Row, Granularity::Column],
        bias: Some(FloatDType::BF16),
        amax: true,
        ..plain([E4M3, E5M2], [2, 6, 10, 272])
    }
}

/// Scales that change along the inner dimension, in blocks of the left side's rows and of the right side's columns.
fn blocks(columns: usize) -> Case {
    Case {
        output: FloatDType::BF16,
        granularities: [
            Granularity::Block {
                rows: 1,
                columns: 128,
            },
            Granularity::Block { rows: 128, columns },
        ],
        ..plain([E5M2, E4M3], [2, 5, 131, 400])
    }
}

#[test]
fn mma_multiplies_with_one_scale() {
    all(Gpu::Ada, MatmulRoutine::Mma, whole([E4M3, E4M3]));
}

#[test]
fn mma_multiplies_with_scales_of_rows_and_blocks() {
    all(Gpu::Ada, MatmulRoutine::Mma, [rows(), blocks(128)]);
}

#[test]
fn wgmma_multiplies_with_one_scale() {
    // More rows of tiles than are computed together, with one left over.
    let many = Case {
        bias: Some(FloatDType::F32),
        amax: true,
        ..plain([E5M2, E5M2], [1, 1025, 130, 16])
    };
    let cases = whole([E5M2, E5M2]).into_iter().chain([many]);
    all(Gpu::Hopper, MatmulRoutine::Wgmma, cases);
}

#[test]
fn wgmma_multiplies_with_scales_of_rows_and_blocks() {
    all(Gpu::Hopper, MatmulRoutine::Wgmma, [rows(), blocks(1)]);
}

#[test]
fn tma_multiplies_with_one_scale() {
    all(Gpu::Hopper, MatmulRoutine::WgmmaTma, whole([E4M3, E5M2]));
}

#[test]
fn tma_multiplies_with_scales_of_blocks() {
    all(Gpu::Hopper, MatmulRoutine::WgmmaTma, [blocks(128)]);
}

/// More than one tile of 256 rows, of which the last has a row in its first half, or in both; more steps than are in flight.
#[test]
fn tma_multiplies_in_tall_tiles() {
    let whole = [[1, 257, 9, 1200], [2, 390, 131, 144]].map(|size| Case {
        bias: Some(FloatDType::F32),
        amax: true,
        ..plain([E4M3, E5M2], size)
    });
    all(Gpu::Hopper, MatmulRoutine::WgmmaTma256, whole);
}

/// Scales of rows, of blocks of one row, and of blocks of 128 rows, of which a tall tile has two.
#[test]
fn tall_tiles_multiply_with_scales() {
    let block = |rows| Granularity::Block { rows, columns: 128 };
    let blocks = [1, 128].map(|rows| Case {
        granularities: [block(rows), block(128)],
        ..plain([E5M2, E4M3], [1, 390, 20, 400])
    });
    let rows = Case {
        size: [1, 262, 10, 272],
        batches: [1, 1],
        ..rows()
    };
    let cases = blocks.into_iter().chain([rows]);
    all(Gpu::Hopper, MatmulRoutine::WgmmaTma256, cases);
}

/// Clusters of two tall tiles, of which the last has columns for one alone; more steps than are in flight; batches.
#[test]
fn clusters_load_tiles_for_each_other() {
    let block = Granularity::Block {
        rows: 128,
        columns: 128,
    };
    let whole = [[1, 257, 140, 1200], [2, 130, 259, 144]].map(|size| Case {
        bias: Some(FloatDType::F32),
        amax: true,
        ..plain([E4M3, E5M2], size)
    });
    let blocks = Case {
        granularities: [block, block],
        ..plain([E5M2, E4M3], [1, 300, 300, 400])
    };
    let rows = Case {
        size: [1, 262, 150, 272],
        batches: [1, 1],
        ..rows()
    };
    let cases = whole.into_iter().chain([blocks, rows]);
    all(Gpu::Hopper, MatmulRoutine::WgmmaTmaMulticast, cases);
}

#[test]
fn direct_multiplies() {
    let cases = [[1, 5, 9, 70], [2, 1, 3, 130]].map(|size| Case {
        bias: Some(FloatDType::F32),
        amax: true,
        inner: [false, true],
        ..plain([E4M3, E5M2], size)
    });
    all(Gpu::Ada, MatmulRoutine::Direct, cases);
    all(Gpu::Ada, MatmulRoutine::Direct, [rows(), blocks(1)]);
}

/// The codes and transposed codes of a linear layer's cast are read in place: their rows may end within a chunk, and the bytes
/// behind that are unwritten.
#[test]
fn casts_are_multiplied_in_place() {
    let [m, n, k] = [30, 21, 133];
    for (gpu, routine) in [
        (Gpu::Ada, MatmulRoutine::Mma),
        (Gpu::Hopper, MatmulRoutine::Wgmma),
        (Gpu::Hopper, MatmulRoutine::WgmmaTma),
    ] {
        let Some(client) = gpu.client() else { return };
        let mut random = Random::new(9);
        // Small integers, so everything is exact.
        let mut matrix = |rows: usize, columns: usize| -> Vec<f32> {
            (0..rows * columns)
                .map(|_| (random.bits() % 9) as f32 - 4.0)
                .collect()
        };
        let (left, right) = (matrix(m, k), matrix(k, n));
        let float =
            |values: &[f32], shape: &[usize]| floats(&client, values, shape, FloatDType::F32);
        let one = || float(&[1.0], &[1]);
        let cast = |values: &[f32], shape: &[usize], format| {
            CubeBackend::fp8_quantize_transposed(float(values, shape), one(), format)
        };
        let (lhs, _, _) = cast(&left, &[m, k], E4M3);
        let (_, turned, _) = cast(&right, &[k, n], E5M2);
        let product = matmul_by(
            MatmulPolicy::Only(routine),
            [lhs, CubeBackend::int_swap_dims(turned, 0, 1)],
            [one(), one()],
            Bias::Row(float(&vec![0.0; n], &[n])),
            MatmulSpec::new(E4M3, E5M2, FloatDType::F32),
        );
        let expected: Vec<f32> = (0..m * n)
            .map(|index| {
                let term = |i: usize| left[index / n * k + i] * right[i * n + index % n];
                (0..k).map(term).sum::<f32>()
            })
            .collect();
        assert_eq!(numbers(&product), expected);
        assert!(
            !launched(&client).iter().any(|name| name.contains("rows")),
            "{routine} copies"
        );
    }
}

/// The amax is that of the product as it is stored.
#[test]
fn the_amax_of_a_product_is_its_largest() {
    let Some(client) = Gpu::Ada.client() else {
        return;
    };
    let case = rows();
    let mut random = Random::new(3);
    let [batch, m, n, k] = case.size;
    let mut side = |format, shape| {
        Side::new(
            &mut random,
            format,
            Codes::Small,
            shape,
            Granularity::Tensor,
        )
    };
    let (lhs, rhs) = (side(E4M3, [batch, m, k]), side(E5M2, [batch, n, k]));
    let [lhs, _] = lhs.tensors(&client, false, false);
    let [rhs, _] = rhs.tensors(&client, true, true);
    let one = || floats(&client, &[1.0], &[1], FloatDType::F32);
    let spec = MatmulSpec::new(E4M3, E5M2, FloatDType::F16);
    let (product, amax) = CubeBackend::fp8_matmul_amax(lhs, rhs, one(), one(), Bias::None, spec);
    let largest = numbers(&product)
        .into_iter()
        .map(f32::abs)
        .fold(0.0, f32::max);
    assert_eq!(numbers(&amax), [largest]);
}
