//! Every matmul routine of CubeCL's devices, its instruction emulated where the device has none.
//!
//! Factors are small integers, so that all sums are exact, in the 14 bits of a tensor core's accumulator too.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{DType, FloatDType, TensorData};
use burn_backend::try_read_sync;
use burn_cubecl::{CubeBackend, CubeDevice, tensor::CubeTensor};
use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, UnknownRoutine, matmul_blocks_by, matmul_by};
use burn_fp8::{Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, MatmulSpec};
use burn_std::Metadata;

use super::device::Random;

fn cube_devices() -> Vec<CubeDevice> {
    let mut devices = Vec::new();
    #[cfg(feature = "cpu")]
    devices.push(CubeDevice::Cpu(Default::default()));
    #[cfg(feature = "cuda")]
    if std::path::Path::new("/dev/nvidiactl").exists() {
        devices.push(CubeDevice::Cuda(Default::default()));
    } else {
        eprintln!("no NVIDIA GPU on this machine: CUDA is skipped");
    }
    devices
}

fn float(values: Vec<f32>, shape: &[usize], device: &CubeDevice) -> CubeTensor {
    CubeBackend::float_from_data(TensorData::new(values, shape.to_vec()), device)
}

fn floats(tensor: CubeTensor) -> Vec<f32> {
    let tensor = CubeBackend::float_cast(tensor, FloatDType::F32);
    let data = try_read_sync(CubeBackend::float_into_data(tensor));
    data.unwrap().unwrap().try_to_vec::<f32>().unwrap()
}

/// An operand `[batch.., rows, columns]`, or the transpose of one that is stored so.
struct Side {
    values: Vec<f32>,
    shape: Vec<usize>,
    transposed: bool,
}

impl Side {
    fn new(random: &mut Random, shape: &[usize], transposed: bool) -> Self {
        let count = shape.iter().product();
        Self {
            values: (0..count)
                .map(|_| (random.bits() % 7) as f32 - 3.0)
                .collect(),
            shape: shape.to_vec(),
            transposed,
        }
    }

    fn codes(&self, format: Fp8Format, device: &CubeDevice) -> CubeTensor {
        let one = float(vec![1.0], &[1], device);
        let rank = self.shape.len();
        let tensor = float(self.values.clone(), &self.shape, device);
        if !self.transposed {
            return CubeBackend::fp8_quantize(tensor, one, format).0;
        }
        let stored = CubeBackend::float_swap_dims(tensor, rank - 2, rank - 1);
        let (codes, _) = CubeBackend::fp8_quantize(stored, one, format);
        CubeBackend::int_swap_dims(codes, rank - 2, rank - 1)
    }

    fn get(&self, batch: [usize; 2], row: usize, column: usize) -> f32 {
        let [outer, inner, rows, columns] = *self.shape else {
            unreachable!("four dimensions")
        };
        let matrix = batch[0] % outer * inner + batch[1] % inner;
        self.values[(matrix * rows + row) * columns + column]
    }
}

/// The product, from its definition.
fn product(lhs: &Side, rhs: &Side) -> Vec<f32> {
    let dim = |index: usize| lhs.shape[index].max(rhs.shape[index]);
    let (m, k, n) = (lhs.shape[2], lhs.shape[3], rhs.shape[3]);
    let mut output = Vec::new();
    for batch in (0..dim(0)).flat_map(|outer| (0..dim(1)).map(move |inner| [outer, inner])) {
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let term = |i| lhs.get(batch, row, i) * rhs.get(batch, i, column);
            output.push((0..k).map(term).sum());
        }
    }
    output
}

fn spec(lhs: Fp8Format, rhs: Fp8Format, output: FloatDType) -> MatmulSpec {
    MatmulSpec::new(lhs, rhs, output)
}

/// The routines that have kernels of their own on a device: the two of `wgmma` are one where there is no TMA.
fn routines(device: &CubeDevice) -> Vec<MatmulRoutine> {
    let mut routines = vec![
        MatmulRoutine::Direct,
        MatmulRoutine::Mma,
        MatmulRoutine::Wgmma,
    ];
    if !matches!(device, CubeDevice::Cpu(_)) {
        routines.push(MatmulRoutine::WgmmaTma);
    }
    routines
}

/// Edges of tiles, steps and chunks; operands that lie as tensor cores want them, and operands that do not.
#[test]
fn sums_are_exact() {
    for device in cube_devices() {
        let mut random = Random::new(21);
        for (left, right, transposed) in [
            ([1, 1, 5, 7], [1, 1, 7, 3], [false, false]),
            ([1, 1, 129, 32], [1, 1, 32, 9], [false, true]),
            ([1, 1, 3, 144], [1, 1, 144, 130], [true, false]),
            ([1, 2, 3, 48], [2, 1, 48, 17], [false, true]),
            ([1, 1, 2, 700], [1, 1, 700, 2], [true, true]),
        ] {
            let lhs = Side::new(&mut random, &left, transposed[0]);
            let rhs = Side::new(&mut random, &right, transposed[1]);
            let expected = product(&lhs, &rhs);
            for routine in routines(&device) {
                let one = || float(vec![1.0], &[1], &device);
                let codes = [
                    lhs.codes(Fp8Format::E4M3, &device),
                    rhs.codes(Fp8Format::E5M2, &device),
                ];
                let spec = spec(Fp8Format::E4M3, Fp8Format::E5M2, FloatDType::F32);
                let policy = MatmulPolicy::Only(routine);
                let actual = matmul_by(policy, codes, [one(), one()], Bias::None, spec);
                assert_eq!(floats(actual), expected, "{left:?} by {right:?}, {routine}");
            }
        }
    }
}

/// Rows that begin at 16 bytes and end anywhere: what is between them has no part in the product.
#[test]
fn gaps_between_rows_are_not_read() {
    for device in cube_devices() {
        let mut random = Random::new(26);
        for k in [1, 30, 133] {
            let pitch = k.next_multiple_of(16) + 16;
            let sides =
                [[1, 1, 3, k], [1, 1, 5, k]].map(|shape| Side::new(&mut random, &shape, false));
            let [lhs, rhs] = sides.each_ref().map(|side| {
                let rows = side.shape[2];
                let mut values = vec![f32::NAN; rows * pitch];
                for row in 0..rows {
                    values[row * pitch..][..k].copy_from_slice(&side.values[row * k..][..k]);
                }
                let one = float(vec![1.0], &[1], &device);
                let whole = float(values, &[1, 1, rows, pitch], &device);
                let (codes, _) = CubeBackend::fp8_quantize(whole, one, Fp8Format::E4M3);
                let strides = [rows * pitch, rows * pitch, pitch, 1];
                CubeTensor::new(
                    codes.client,
                    codes.handle,
                    Metadata::new([1, 1, rows, k], strides),
                    codes.device,
                    DType::U8,
                )
            });
            let rhs = CubeBackend::int_swap_dims(rhs, 2, 3);
            let expected: Vec<f32> = (0..15)
                .map(|index| {
                    let term =
                        |i| sides[0].get([0, 0], index / 5, i) * sides[1].get([0, 0], index % 5, i);
                    (0..k).map(term).sum()
                })
                .collect();
            for routine in routines(&device) {
                let one = || float(vec![1.0], &[1], &device);
                let spec = spec(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32);
                let policy = MatmulPolicy::Only(routine);
                let codes = [lhs.clone(), rhs.clone()];
                let actual = matmul_by(policy, codes, [one(), one()], Bias::None, spec);
                assert_eq!(floats(actual), expected, "{k} terms, {routine}");
            }
        }
    }
}

/// Values have the strides of their codes: no kernel moves bytes, which WebGPU has no type for.
#[test]
fn values_lie_as_their_codes_do() {
    for device in cube_devices() {
        let one = || float(vec![1.0], &[1], &device);
        let input = || {
            float(
                (0..30).map(|x| (x * 7 % 16) as f32).collect(),
                &[5, 6],
                &device,
            )
        };
        let (codes, _) = CubeBackend::fp8_quantize(input(), one(), Fp8Format::E4M3);
        let (_, rows_with_gaps, _) =
            CubeBackend::fp8_quantize_transposed(input(), one(), Fp8Format::E4M3);
        for codes in [CubeBackend::int_swap_dims(codes, 0, 1), rows_with_gaps] {
            let strides = codes.meta.strides().to_vec();
            assert_ne!(strides, [5, 1]);
            let values =
                CubeBackend::fp8_dequantize(codes, one(), Fp8Format::E4M3, FloatDType::F32);
            assert_eq!(values.meta.strides().to_vec(), strides);
            let expected: Vec<f32> = (0..30)
                .map(|x| ((x % 5 * 6 + x / 5) * 7 % 16) as f32)
                .collect();
            assert_eq!(floats(values), expected);
        }
    }
}

/// An operand of normal numbers with a scale for each row, column or block, or the transpose of one; and its values.
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
    let values = CubeBackend::fp8_dequantize_blocks(
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
    let product = floats(matmul_blocks_by(
        policy,
        [lhs, rhs],
        [lhs_scale, rhs_scale],
        Bias::Row(float(bias.clone(), &[n], device)),
        granularities,
        spec(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32),
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

/// How far a product may be from the exact one, in units of the sum of the magnitudes of its terms, as the README states it.
/// Accumulators of tensor cores cut sums to 14 bits, every 32 terms, and four times before they are emptied.
fn tolerance(routine: MatmulRoutine, cuts: i32) -> f64 {
    match routine {
        MatmulRoutine::Direct | MatmulRoutine::Decoded => 1e-6,
        _ => f64::from(cuts) * 2f64.powi(-13),
    }
}

/// Normal numbers, whose sums are small beside their terms.
#[test]
fn tensor_cores_are_as_precise_as_stated() {
    for device in cube_devices() {
        for routine in routines(&device) {
            let whole = [Granularity::Tensor; 2];
            let policy = MatmulPolicy::Only(routine);
            let errors = errors(policy, [9, 512, 6], whole, [false, true], &device);
            let worst = errors.into_iter().fold(0.0, f64::max);
            assert!(worst <= tolerance(routine, 1), "{routine}: {worst}");
        }
    }
}

/// The casts of the three products of `RowwiseScaling` and `BlockScaling`, and others; sizes that no tile divides.
#[test]
fn scales_of_rows_columns_and_blocks() {
    let block = |rows, columns| Granularity::Block { rows, columns };
    for device in cube_devices() {
        let mut routines = routines(&device);
        // Decoded operands are f32 here, which a GPU may multiply as tf32.
        if matches!(device, CubeDevice::Cpu(_)) {
            routines.push(MatmulRoutine::Decoded);
        }
        for routine in routines {
            for (granularities, transposed) in [
                ([Granularity::Row, Granularity::Column], [false, false]),
                ([Granularity::Row, Granularity::Column], [true, true]),
                ([block(1, 128), block(128, 128)], [false, false]),
                ([block(1, 128), block(128, 128)], [false, true]),
                ([block(1, 128), block(128, 1)], [true, false]),
                ([block(64, 256), block(128, 3)], [false, false]),
                ([Granularity::Tensor, block(128, 2)], [false, true]),
                ([Granularity::Column, Granularity::Row], [false, false]),
                ([block(1, 32), block(48, 5)], [false, false]),
            ] {
                let sizes = [3, 300, 131];
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

#[test]
fn formats_scales_bias_and_output_dtypes() {
    for device in cube_devices() {
        let mut random = Random::new(22);
        let lhs = Side::new(&mut random, &[1, 1, 6, 33], false);
        let rhs = Side::new(&mut random, &[1, 1, 33, 5], true);
        let bias = [1.0, -2.0, 0.5, 8.0, -16.0];
        let product = product(&lhs, &rhs);
        let expected: Vec<f32> = product
            .iter()
            .enumerate()
            .map(|(index, sum)| sum / 2.0 + bias[index % 5])
            .collect();
        for (left, right, dtype, precision) in [
            (Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32, 0.0),
            (
                Fp8Format::E4M3,
                Fp8Format::E5M2,
                FloatDType::F16,
                1.0 / 2048.0,
            ),
            (
                Fp8Format::E5M2,
                Fp8Format::E4M3,
                FloatDType::BF16,
                1.0 / 256.0,
            ),
            (Fp8Format::E5M2, Fp8Format::E5M2, FloatDType::F32, 0.0),
        ] {
            for routine in routines(&device) {
                let codes = [lhs.codes(left, &device), rhs.codes(right, &device)];
                let scales = [0.5, 4.0].map(|scale| float(vec![scale], &[1], &device));
                let bias = Bias::Row(float(bias.to_vec(), &[5], &device));
                let spec = spec(left, right, dtype);
                let policy = MatmulPolicy::Only(routine);
                let actual = floats(matmul_by(policy, codes, scales, bias, spec));
                for (actual, expected) in actual.into_iter().zip(&expected) {
                    let error = (actual - expected).abs();
                    assert!(
                        error <= precision * expected.abs(),
                        "{actual} is not {expected} ({routine}, {spec:?})"
                    );
                }
            }
        }
    }
}

/// However it is picked, the product is the same.
#[test]
fn every_policy_gives_the_product() {
    for device in cube_devices() {
        let mut random = Random::new(25);
        let lhs = Side::new(&mut random, &[1, 1, 6, 32], false);
        let rhs = Side::new(&mut random, &[1, 1, 32, 5], true);
        let expected = product(&lhs, &rhs);
        for policy in [
            MatmulPolicy::Automatic,
            MatmulPolicy::Measured,
            MatmulPolicy::Only(MatmulRoutine::Decoded),
            MatmulPolicy::Only(MatmulRoutine::WgmmaTma),
        ] {
            let codes = [&lhs, &rhs].map(|side| side.codes(Fp8Format::E4M3, &device));
            let one = || float(vec![1.0], &[1], &device);
            let spec = spec(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32);
            let actual = matmul_by(policy, codes, [one(), one()], Bias::None, spec);
            assert_eq!(floats(actual), expected, "{policy:?}");
        }
    }
}

/// What tensor cores cannot compute is computed all the same.
#[test]
fn a_product_without_terms_is_the_bias() {
    for device in cube_devices() {
        for routine in routines(&device) {
            let mut random = Random::new(23);
            let codes = [[2, 0], [0, 3]]
                .map(|shape| Side::new(&mut random, &shape, false).codes(Fp8Format::E4M3, &device));
            let one = || float(vec![1.0], &[1], &device);
            let bias = Bias::Row(float(vec![1.0, -2.0, 0.5], &[3], &device));
            let spec = spec(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32);
            let policy = MatmulPolicy::Only(routine);
            let actual = matmul_by(policy, codes, [one(), one()], bias, spec);
            assert_eq!(floats(actual), [1.0, -2.0, 0.5, 1.0, -2.0, 0.5]);
        }
    }
}

/// A sum of `terms`, 32 to an instruction, in an accumulator that keeps 14 bits and is emptied into an f32 every
/// `interval` terms: the tensor cores of Hopper as DeepSeek-V3 (arXiv 2412.19437, section 3.5.2) describes them.
fn tensor_core_sum(terms: &[f64], interval: usize) -> f64 {
    let cut = |sum: f64| f64::from(f32::from_bits((sum as f32).to_bits() & !0x3FF));
    let slices = terms.chunks(interval).map(|slice| {
        slice
            .chunks(32)
            .fold(0.0, |sum, terms| cut(sum + terms.iter().sum::<f64>()))
    });
    f64::from(slices.fold(0f32, |sum, slice| sum + slice as f32))
}

/// At 2048 terms, sums of 128 lose less than a tenth of what one accumulator loses, and the kernels do as the formula.
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
            let sum = floats(matmul_by(policy, codes, [one(), one()], Bias::None, spec))[0];
            let error = error(f64::from(sum));
            assert!(error < lost / 8.0, "{routine}: {error} against {lost}");
        }
    }
}

#[test]
fn routines_have_names() {
    for routine in MatmulRoutine::ALL {
        assert_eq!(routine.to_string().parse(), Ok(routine));
    }
    let unknown = "qmma".parse::<MatmulRoutine>();
    assert_eq!(unknown, Err(UnknownRoutine("qmma".to_string())));
}
