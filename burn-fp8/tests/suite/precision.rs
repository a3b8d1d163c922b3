//! The precision of the matmul routines on CubeCL's devices, with scales of every granularity.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::FloatDType;
use burn_cubecl::{CubeBackend, CubeDevice, tensor::CubeTensor};
use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, matmul_by};
use burn_fp8::{Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity};

use super::{
    device::Random,
    routines::{cube_devices, float, floats, log_next, routines, spec},
};

/// An operand of normally distributed numbers, or its transpose, with a scale for each row, column or block; and its values.
fn scaled(
    random: &mut Random,
    shape: [usize; 3],
    granularity: Granularity,
    transposed: bool,
    device: &CubeDevice,
) -> (CubeTensor, CubeTensor, Vec<f32>) {
    let format = Fp8Format::E4M3;
    let [batches, rows, columns] = shape;
    let (stored, stored_granularity) = match transposed {
        true => ([batches, columns, rows], granularity.transposed()),
        false => (shape, granularity),
    };
    let mut values = random.normals(shape.iter().product());
    for (index, value) in values.iter_mut().enumerate() {
        *value *= 4f32.powi((index / 100 % 7) as i32 - 3);
    }
    let tensor = float(values, &stored, device);
    let cast = Fp8Cast::new(stored_granularity, format);
    let (mut codes, mut scale) = match granularity {
        Granularity::Tensor => {
            let scale = float(vec![2.0], &[1], device);
            (
                CubeBackend::fp8_quantize(tensor, scale.clone(), format).0,
                scale,
            )
        }
        _ => CubeBackend::fp8_quantize_blocks(tensor, cast),
    };
    if transposed {
        codes = CubeBackend::int_swap_dims(codes, 1, 2);
        if granularity != Granularity::Tensor {
            scale = CubeBackend::float_swap_dims(scale, 1, 2);
        }
    }
    let values = CubeBackend::fp8_dequantize(
        codes.clone(),
        scale.clone(),
        granularity,
        format,
        FloatDType::F32,
    );
    (codes, scale, floats(values))
}

/// The error of every element of a product that `policy` computes, in units of the sum of the magnitudes of its terms.
fn errors(
    policy: MatmulPolicy,
    [m, k, n]: [usize; 3],
    granularities: [Granularity; 2],
    transposed: [bool; 2],
    device: &CubeDevice,
) -> Vec<f64> {
    let mut random = Random::new(27);
    let [left, right] = granularities;
    let (lhs, lhs_scale, x) = scaled(&mut random, [2, m, k], left, transposed[0], device);
    let (rhs, rhs_scale, y) = scaled(&mut random, [1, k, n], right, transposed[1], device);
    let bias: Vec<f32> = random.normals(n);
    log_next(
        device,
        format_args!("[{m}, {k}] by [{k}, {n}], {granularities:?}, {policy:?}"),
    );
    let product = floats(matmul_by(
        policy,
        [lhs, rhs],
        [lhs_scale, rhs_scale],
        Bias::Row(float(bias.clone(), &[n], device)),
        spec(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32).with_granularities(granularities),
    ));
    assert_eq!(product.len(), 2 * m * n);
    product
        .iter()
        .enumerate()
        .map(|(index, &value)| {
            let (row, column) = (index / n, index % n);
            let term = |i: usize| f64::from(x[row * k + i]) * f64::from(y[i * n + column]);
            let sum: f64 = (0..k).map(term).sum::<f64>() + f64::from(bias[column]);
            let size: f64 = (0..k).map(|i| term(i).abs()).sum();
            (f64::from(value) - sum).abs() / (size + f64::from(bias[column].abs()))
        })
        .collect()
}

/// The largest error of a product that the README allows, in units of the sum of the magnitudes of its terms. Accumulators of
/// tensor cores cut sums to 14 bits every 32 terms, four times before they are emptied.
fn tolerance(routine: MatmulRoutine, cuts: i32) -> f64 {
    match routine {
        MatmulRoutine::Direct | MatmulRoutine::Decoded => 1e-6,
        _ => f64::from(cuts) * 2f64.powi(-13),
    }
}

/// With normally distributed numbers, whose sums are small compared with their terms.
#[test]
fn tensor_cores_are_as_precise_as_stated() {
    for device in cube_devices() {
        for routine in routines(&device) {
            let whole = [Granularity::Tensor; 2];
            // An H200 is 1.08 cuts off.
            let cuts = if matches!(device, CubeDevice::Cuda(_)) {
                2
            } else {
                1
            };
            let policy = MatmulPolicy::Only(routine);
            let errors = errors(policy, [9, 512, 6], whole, [false, true], &device);
            let worst = errors.into_iter().fold(0.0, f64::max);
            assert!(worst <= tolerance(routine, cuts), "{routine}: {worst}");
        }
    }
}

/// With the casts of the three products of `RowwiseScaling` and `BlockScaling`, among others, and sizes that are no multiples of
/// a tile.
#[test]
fn scales_of_rows_columns_and_blocks() {
    let block = |rows, columns| Granularity::Block { rows, columns };
    for device in cube_devices() {
        let mut routines = routines(&device);
        let cpu = matches!(device, CubeDevice::Cpu(_));
        // Decoded operands are f32 here, which a GPU may multiply in TF32.
        if cpu {
            routines.push(MatmulRoutine::Decoded);
        }
        for routine in routines {
            let cases = [
                ([Granularity::Row, Granularity::Column], [false, false], 5),
                ([Granularity::Row, Granularity::Column], [true, true], 5),
                ([block(1, 128), block(128, 128)], [false, true], 131),
                ([block(1, 128), block(128, 1)], [true, false], 5),
                ([block(64, 256), block(128, 3)], [false, false], 5),
                ([Granularity::Tensor, block(128, 2)], [false, true], 5),
                ([Granularity::Column, Granularity::Row], [false, false], 3),
                ([block(1, 32), block(48, 5)], [false, false], 3),
            ];
            // The instructions differ in where a thread's sums are. On the CPU runtime, where every case is a kernel to compile,
            // scales after the sum and scales within it, by rows and columns, cover that.
            let few = cpu && routine == MatmulRoutine::Mma;
            let cases = cases.into_iter().enumerate();
            let cases = cases.filter(|(index, _)| !few || [0, 4].contains(index));
            for (_, (granularities, transposed, columns)) in cases {
                let sizes = [2, 300, columns];
                let policy = MatmulPolicy::Only(routine);
                let errors = errors(policy, sizes, granularities, transposed, &device);
                let worst = errors.into_iter().fold(0.0, f64::max);
                assert!(
                    worst <= tolerance(routine, 4),
                    "{routine}, {granularities:?}: {worst}"
                );
            }
        }
    }
}

/// A sum of `terms`, 32 per instruction, in an accumulator that keeps 14 bits and is emptied into an f32 every `interval` terms.
/// DeepSeek-V3 (arXiv 2412.19437, section 3.5.2) describes the tensor cores of Hopper so.
fn tensor_core_sum(terms: &[f64], interval: usize) -> f64 {
    let cut = |sum: f64| f64::from(f32::from_bits((sum as f32).to_bits() & !0x3FF));
    let slices = terms.chunks(interval).map(|slice| {
        slice
            .chunks(32)
            .fold(0.0, |sum, terms| cut(sum + terms.iter().sum::<f64>()))
    });
    f64::from(slices.fold(0f32, |sum, slice| sum + slice as f32))
}

/// At 2048 terms, sums of 128 terms lose less than a tenth of what a single accumulator loses, and the kernels agree with the
/// formula.
#[test]
fn partial_sums_keep_precision() {
    const TERMS: usize = 2048;
    for device in cube_devices() {
        let mut random = Random::new(24);
        let mut factors = || -> Vec<f32> {
            (0..TERMS)
                .map(|_| (random.bits() % 8) as f32 / 8.0 + 1.0)
                .collect()
        };
        let (left, right) = (factors(), factors());
        let terms: Vec<f64> = left
            .iter()
            .zip(&right)
            .map(|(&x, &y)| f64::from(x) * f64::from(y))
            .collect();
        let exact: f64 = terms.iter().sum();
        let error = |sum: f64| (exact - sum).abs() / exact;
        let lost = error(tensor_core_sum(&terms, TERMS));
        let promoted = error(tensor_core_sum(&terms, 128));
        assert!(
            lost > 1e-3 && promoted < lost / 10.0,
            "{lost} against {promoted}"
        );

        for routine in [MatmulRoutine::Mma, MatmulRoutine::Wgmma] {
            let codes = [(&left, [1, TERMS]), (&right, [TERMS, 1])].map(|(values, shape)| {
                let tensor = float(values.clone(), &shape, &device);
                let one = float(vec![1.0], &[1], &device);
                CubeBackend::fp8_quantize(tensor, one, Fp8Format::E4M3).0
            });
            let one = || float(vec![1.0], &[1], &device);
            let policy = MatmulPolicy::Only(routine);
            let spec = spec(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32);
            log_next(&device, format_args!("{TERMS} terms, {routine}"));
            let sum = floats(matmul_by(policy, codes, [one(), one()], Bias::None, spec))[0];
            let error = error(f64::from(sum));
            assert!(error < lost / 8.0, "{routine}: {error} against {lost}");
        }
    }
}
