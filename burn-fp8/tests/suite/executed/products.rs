//! All routines, compared with a product by its definition.

use burn::backend::ops::IntTensorOps;
use burn::tensor::{DType, FloatDType};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, matmul_amax_by, matmul_by};
use burn_fp8::{Bias, Fp8Format, Fp8Ops, Granularity, MatmulSpec};
use half::{bf16, f16};

use super::super::{
    device::Random,
    gpu::{Gpu, elements, launched, tensor},
};
use super::side::Side;

struct Case {
    formats: [Fp8Format; 2],
    output: FloatDType,
    /// Batch, rows, columns, terms.
    size: [usize; 4],
    /// The number of matrices of each side: that of the batch, or one.
    batches: [usize; 2],
    granularities: [Granularity; 2],
    bias: bool,
    /// Whether each side's inner dimension is innermost in memory.
    inner: [bool; 2],
}

/// The numbers of rows and of terms that share a scale.
fn block(granularity: Granularity, rows: usize, terms: usize, right: bool) -> [usize; 2] {
    match (granularity, right) {
        (Granularity::Tensor, _) => [rows.max(1), terms.max(1)],
        (Granularity::Row, false) | (Granularity::Column, true) => [1, terms],
        (Granularity::Block { rows, columns }, false) => [rows, columns],
        (Granularity::Block { rows, columns }, true) => [columns, rows],
        _ => unreachable!("scales of terms alone"),
    }
}

/// The elements of a float tensor.
fn numbers(tensor: &CubeTensor) -> Vec<f64> {
    match tensor.dtype {
        DType::F32 => elements(tensor)
            .into_iter()
            .map(|x| f64::from(f32::from_le_bytes(x)))
            .collect(),
        DType::F16 => elements(tensor)
            .into_iter()
            .map(|x| f16::from_le_bytes(x).to_f64())
            .collect(),
        DType::BF16 => elements(tensor)
            .into_iter()
            .map(|x| bf16::from_le_bytes(x).to_f64())
            .collect(),
        dtype => panic!("{dtype:?}"),
    }
}

fn check(gpu: Gpu, routine: MatmulRoutine, case: &Case) {
    let Some(client) = gpu.client() else { return };
    let mut random = Random::new(case.size.iter().sum::<usize>() as u64);
    let [batch, m, n, k] = case.size;
    let [left, right] = case.granularities;
    let mut lhs = Side::new(
        &mut random,
        case.formats[0],
        [case.batches[0], m, k],
        block(left, m, k, false),
    );
    let mut rhs = Side::new(
        &mut random,
        case.formats[1],
        [case.batches[1], n, k],
        block(right, n, k, true),
    );
    for (side, granularity) in [(&mut lhs, left), (&mut rhs, right)] {
        if granularity == Granularity::Tensor {
            // One scale for all matrices.
            let first = side.scales[0];
            side.scales.fill(first);
        }
    }
    let bias: Vec<f32> = (0..n).map(|column| column as f32 / 8.0 - 3.0).collect();
    let [lhs_codes, mut lhs_scales] = lhs.tensors(&client, false, !case.inner[0]);
    let [rhs_codes, mut rhs_scales] = rhs.tensors(&client, true, case.inner[1]);
    let single = |side: &Side| {
        tensor(
            &client,
            bytemuck::cast_slice(&side.scales[..1]),
            &[1],
            DType::F32,
        )
    };
    if left == Granularity::Tensor {
        lhs_scales = single(&lhs);
    }
    if right == Granularity::Tensor {
        rhs_scales = single(&rhs);
    }
    let short: Vec<bf16> = bias.iter().map(|&x| bf16::from_f32(x)).collect();
    let row = match (case.bias, case.output) {
        (false, _) => Bias::<CubeBackend>::None,
        (_, FloatDType::F32) => Bias::Row(tensor(
            &client,
            bytemuck::cast_slice(&bias),
            &[n],
            DType::F32,
        )),
        _ => Bias::Row(tensor(
            &client,
            bytemuck::cast_slice(&short),
            &[n],
            DType::BF16,
        )),
    };
    let (policy, operands) = (MatmulPolicy::Only(routine), [lhs_codes, rhs_codes]);
    let scales = [lhs_scales, rhs_scales];
    let spec = MatmulSpec::new(case.formats[0], case.formats[1], case.output)
        .with_granularities(case.granularities);
    let (product, amax) = if case.bias {
        let (product, amax) = matmul_amax_by(policy, operands, scales, row, spec);
        (product, Some(amax))
    } else {
        let product = matmul_by(policy, operands, scales, row, spec);
        (product, None)
    };
    let kernel = match routine {
        // A tensor map needs the distance between rows, which a single row does not have.
        MatmulRoutine::WgmmaTma | MatmulRoutine::WgmmaTma256 if m > 1 => "tma_kernel",
        MatmulRoutine::Direct => "matmul_kernel",
        _ => "tile_kernel",
    };
    let rows = match (routine, kernel) {
        (MatmulRoutine::WgmmaTma256, "tma_kernel") => 256,
        _ => 128,
    };
    let grid = format!("{}x{}x{batch}", n.div_ceil(128), m.div_ceil(rows));
    let ran = launched(&client).into_iter().any(|name| {
        name.starts_with(kernel) && (kernel == "matmul_kernel" || name.ends_with(&grid))
    });
    assert!(ran, "{routine} did not run: {:?}", launched(&client));
    let found = numbers(&product);
    if kernel != "matmul_kernel" && m.is_multiple_of(4) && !case.inner[0] {
        assert!(
            launched(&client)
                .iter()
                .any(|name| name.starts_with("turn_rows"))
        );
    }
    let rounding = match case.output {
        FloatDType::F32 => 0.0,
        FloatDType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-8),
    };
    assert_eq!(found.len(), batch * m * n);
    if let Some(amax) = amax {
        let largest = found.iter().fold(0f64, |max, value| max.max(value.abs()));
        assert_eq!(numbers(&amax), [largest], "{routine}, {:?}", case.size);
    }
    for (index, &found) in found.iter().enumerate() {
        let (matrix, row, column) = (index / (m * n), index / n % m, index % n);
        let terms =
            (0..k).map(|term| lhs.value(matrix, row, term) * rhs.value(matrix, column, term));
        let size = terms.clone().map(f64::abs).sum::<f64>() + 16.0;
        let added = if case.bias {
            f64::from(bias[column])
        } else {
            0.0
        };
        let expected = terms.sum::<f64>() + added;
        let allowed = size * 2f64.powi(-20) + expected.abs() * rounding;
        assert!(
            (found - expected).abs() <= allowed,
            "{routine}: {found} instead of {expected} in row {row}, column {column} of matrix {matrix} of {:?}",
            case.size
        );
    }
}

const WHOLE: [Granularity; 2] = [Granularity::Tensor; 2];

fn plain(formats: [Fp8Format; 2], size: [usize; 4]) -> Case {
    Case {
        formats,
        output: FloatDType::F32,
        size,
        batches: [size[0]; 2],
        granularities: WHOLE,
        bias: false,
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
        bias: true,
        ..plain(formats, size)
    })
    .collect()
}

/// A scale for each row and each column.
fn rows() -> Case {
    Case {
        output: FloatDType::F16,
        granularities: [Granularity::Row, Granularity::Column],
        bias: true,
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
        bias: true,
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
        bias: true,
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

#[test]
fn direct_multiplies() {
    let cases = [[1, 5, 9, 70], [2, 1, 3, 130]].map(|size| Case {
        bias: true,
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
        let float = |values: &[f32], shape: &[usize]| {
            tensor(&client, bytemuck::cast_slice(values), shape, DType::F32)
        };
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
        let expected: Vec<f64> = (0..m * n)
            .map(|index| {
                let term = |i: usize| left[index / n * k + i] * right[i * n + index % n];
                f64::from((0..k).map(term).sum::<f32>())
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
    let lhs = Side::new(&mut random, E4M3, [batch, m, k], [m, k]);
    let rhs = Side::new(&mut random, E5M2, [batch, n, k], [n, k]);
    let [lhs, _] = lhs.tensors(&client, false, false);
    let [rhs, _] = rhs.tensors(&client, true, true);
    let one = || tensor(&client, bytemuck::cast_slice(&[1f32]), &[1], DType::F32);
    let spec = MatmulSpec::new(E4M3, E5M2, FloatDType::F16);
    let (product, amax) = CubeBackend::fp8_matmul_amax(lhs, rhs, one(), one(), Bias::None, spec);
    let largest = numbers(&product)
        .into_iter()
        .map(f64::abs)
        .fold(0.0, f64::max);
    assert_eq!(numbers(&amax), [largest]);
}
