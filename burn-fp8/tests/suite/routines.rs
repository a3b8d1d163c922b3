//! Every matmul routine on CubeCL's devices, with its instruction emulated on devices that lack it.
//!
//! Operands are small integers, so that all sums are exact, even in the 14 bits of a tensor core's accumulator.

use std::{
    fmt,
    io::{self, Write},
};

use burn::backend::{
    Backend,
    ops::{FloatTensorOps, IntTensorOps},
};
use burn::tensor::{DType, FloatDType, TensorData};
use burn_backend::try_read_sync;
use burn_cubecl::{CubeBackend, CubeDevice, tensor::CubeTensor};
use burn_dispatch::DispatchDevice;
use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, UnknownRoutine, matmul_by, matmul_policy};
use burn_fp8::{Bias, Fp8Format, Fp8Ops, Granularity, MatmulSpec};
use burn_std::Metadata;

use super::device::{Random, devices};

/// The CubeCL devices among the devices of the tests.
pub(crate) fn cube_devices() -> Vec<CubeDevice> {
    let devices = devices().into_iter();
    let cube = devices.filter_map(|device| match device.as_dispatch() {
        DispatchDevice::Cube(device) => Some(device.clone()),
        _ => None,
    });
    cube.collect()
}

pub(crate) fn float(values: Vec<f32>, shape: &[usize], device: &CubeDevice) -> CubeTensor {
    CubeBackend::float_from_data(TensorData::new(values, shape.to_vec()), device)
}

pub(crate) fn floats(tensor: CubeTensor) -> Vec<f32> {
    let tensor = CubeBackend::float_cast(tensor, FloatDType::F32);
    let data = try_read_sync(CubeBackend::float_into_data(tensor));
    data.unwrap().unwrap().try_to_vec::<f32>().unwrap()
}

/// An operand `[batch.., rows, columns]`, or its transpose in memory.
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

/// The product, by its definition.
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

pub(crate) fn spec(lhs: Fp8Format, rhs: Fp8Format, output: FloatDType) -> MatmulSpec {
    MatmulSpec::new(lhs, rhs, output)
}

/// The routines that have different kernels on a device. If the instruction is emulated, all routines of `wgmma` have the
/// same kernel.
pub(crate) fn routines(device: &CubeDevice) -> Vec<MatmulRoutine> {
    let mut routines = vec![
        MatmulRoutine::Direct,
        MatmulRoutine::Mma,
        MatmulRoutine::Wgmma,
    ];
    if matches!(device, CubeDevice::Cuda(_)) {
        routines.extend([
            MatmulRoutine::WgmmaTma,
            MatmulRoutine::WgmmaTma256,
            MatmulRoutine::WgmmaTmaMulticast,
        ]);
    }
    routines
}

/// Logs what a GPU computes next, so that a kernel that never ends has a name. The test harness keeps what `eprintln!` writes until
/// the test ends.
pub(crate) fn log_next(device: &CubeDevice, next: fmt::Arguments<'_>) {
    if matches!(device, CubeDevice::Cuda(_)) {
        let mut log = io::stderr().lock();
        writeln!(log, "next: {next}").unwrap();
    }
}

/// Edges of tiles, steps and chunks, and operands with and without the layout that tensor cores read.
#[test]
fn sums_are_exact() {
    for device in cube_devices() {
        let mut random = Random::new(21);
        for (left, right, transposed) in [
            ([1, 1, 5, 7], [1, 1, 7, 3], [false, false]),
            ([1, 1, 129, 32], [1, 1, 32, 9], [false, true]),
            ([1, 1, 300, 160], [1, 1, 160, 9], [false, true]),
            ([1, 1, 3, 144], [1, 1, 144, 130], [true, false]),
            ([1, 2, 3, 48], [2, 1, 48, 17], [false, true]),
            ([1, 1, 2, 700], [1, 1, 700, 2], [true, true]),
            // Copied by words, with numbers of rows and terms that are no multiples of a word.
            ([2, 1, 8, 37], [1, 2, 37, 36], [true, false]),
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
                log_next(&device, format_args!("{left:?} by {right:?}, {routine}"));
                let actual = matmul_by(policy, codes, [one(), one()], Bias::None, spec);
                assert_eq!(floats(actual), expected, "{left:?} by {right:?}, {routine}");
            }
        }
    }
}

/// Rows begin at multiples of 16 bytes and end anywhere. The gaps between them must not affect the product.
#[test]
fn gaps_between_rows_are_not_read() {
    for device in cube_devices() {
        let mut random = Random::new(26);
        for k in [1usize, 30, 133] {
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
                log_next(&device, format_args!("{k} terms with gaps, {routine}"));
                let actual = matmul_by(policy, codes, [one(), one()], Bias::None, spec);
                assert_eq!(floats(actual), expected, "{k} terms, {routine}");
            }
        }
    }
}

/// Values have the strides of their codes. No kernel moves bytes, for which WebGPU has no type.
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
        // The same in rows of 5 elements that are 16 apart.
        let turned = CubeBackend::float_swap_dims(input(), 0, 1);
        let gaps = float(vec![0.0; 66], &[6, 11], &device);
        let wide = CubeBackend::float_cat(vec![turned, gaps], 1);
        let (wide, _) = CubeBackend::fp8_quantize(wide, one(), Fp8Format::E4M3);
        let rows_with_gaps = CubeTensor::new(
            wide.client,
            wide.handle,
            Metadata::new([6, 5], [16, 1]),
            wide.device,
            DType::U8,
        );
        for codes in [CubeBackend::int_swap_dims(codes, 0, 1), rows_with_gaps] {
            let strides = codes.meta.strides().to_vec();
            assert_ne!(strides, [5, 1]);
            let values = CubeBackend::fp8_dequantize(
                codes,
                one(),
                Granularity::Tensor,
                Fp8Format::E4M3,
                FloatDType::F32,
            );
            assert_eq!(values.meta.strides().to_vec(), strides);
            let expected: Vec<f32> = (0..30)
                .map(|x| ((x % 5 * 6 + x / 5) * 7 % 16) as f32)
                .collect();
            assert_eq!(floats(values), expected);
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
            if !CubeBackend::supports_dtype(&device, dtype.into()) {
                continue;
            }
            for routine in routines(&device) {
                let codes = [lhs.codes(left, &device), rhs.codes(right, &device)];
                let scales = [0.5, 4.0].map(|scale| float(vec![scale], &[1], &device));
                let bias = Bias::Row(float(bias.to_vec(), &[5], &device));
                let spec = spec(left, right, dtype);
                let policy = MatmulPolicy::Only(routine);
                log_next(
                    &device,
                    format_args!("[6, 33] by [33, 5], {routine}, {spec:?}"),
                );
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

/// The product is the same, whichever policy picks the routine. The larger is one that autotune picks the routine of, on any device.
#[test]
fn every_policy_gives_the_product() {
    for (device, [m, k, n]) in cube_devices()
        .into_iter()
        .flat_map(|device| [[6, 32, 5], [96, 128, 96]].map(|size| (device.clone(), size)))
    {
        let mut random = Random::new(25);
        let lhs = Side::new(&mut random, &[1, 1, m, k], false);
        let rhs = Side::new(&mut random, &[1, 1, k, n], true);
        let expected = product(&lhs, &rhs);
        for policy in [
            MatmulPolicy::Automatic,
            MatmulPolicy::Measured,
            MatmulPolicy::Only(MatmulRoutine::Decoded),
            MatmulPolicy::Only(MatmulRoutine::WgmmaTma),
            // Where there is no cuBLASLt, another routine computes it.
            MatmulPolicy::Only(MatmulRoutine::CublasLt),
        ] {
            let codes = [&lhs, &rhs].map(|side| side.codes(Fp8Format::E4M3, &device));
            let one = || float(vec![1.0], &[1], &device);
            let spec = spec(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32);
            log_next(
                &device,
                format_args!("[{m}, {k}] by [{k}, {n}], {policy:?}"),
            );
            let actual = matmul_by(policy, codes, [one(), one()], Bias::None, spec);
            assert_eq!(floats(actual), expected, "{policy:?}");
        }
    }
}

/// Products that tensor cores cannot compute are computed in another way.
#[test]
fn a_product_without_terms_is_the_bias() {
    for device in cube_devices() {
        let routines = routines(&device).into_iter();
        for routine in routines.chain([MatmulRoutine::Decoded, MatmulRoutine::CublasLt]) {
            let mut random = Random::new(23);
            let codes = [[2, 0], [0, 3]]
                .map(|shape| Side::new(&mut random, &shape, false).codes(Fp8Format::E4M3, &device));
            let one = || float(vec![1.0], &[1], &device);
            let bias = Bias::Row(float(vec![1.0, -2.0, 0.5], &[3], &device));
            let spec = spec(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32);
            let policy = MatmulPolicy::Only(routine);
            log_next(&device, format_args!("[2, 0] by [0, 3], {routine}"));
            let actual = matmul_by(policy, codes, [one(), one()], bias, spec);
            assert_eq!(floats(actual), [1.0, -2.0, 0.5, 1.0, -2.0, 0.5]);
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

/// The variable is read once per process, so this test runs itself again as a process for each value.
#[test]
fn the_environment_names_a_policy() {
    const EXPECTED: &str = "BURN_FP8_TEST_POLICY";
    if let Ok(expected) = std::env::var(EXPECTED) {
        assert_eq!(format!("{:?}", matmul_policy()), expected);
        return;
    }
    for (name, policy) in [
        ("", MatmulPolicy::Automatic),
        ("measured", MatmulPolicy::Measured),
        ("wgmma-tma", MatmulPolicy::Only(MatmulRoutine::WgmmaTma)),
        ("no such routine", MatmulPolicy::Automatic),
    ] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "suite::routines::the_environment_names_a_policy"])
            .env("BURN_FP8_MATMUL", name)
            .env(EXPECTED, format!("{policy:?}"))
            .output()
            .unwrap();
        let found = String::from_utf8_lossy(&output.stdout);
        assert!(found.contains("1 passed"), "{name}: {found}");
    }
}
