//! Compares casts with a copy.

use benches::{Comparison, Goal, Goals, Table, time_left};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_fp8::{Fp8Format, Fp8Tensor};
use cudarc::driver::CudaContext;
use std::time::{Duration, Instant};

use super::{distance, flush, is_computed, random, sync};

pub(crate) const SHAPES: [[usize; 2]; 3] = [[8_192, 8_192], [16_384, 16_384], [32_768, 16_384]];

/// The number of tensors that are quantized in turn. Together they are larger than any cache.
const INPUTS: usize = 4;

const FORMAT: Fp8Format = Fp8Format::E4M3;
const COPY: &str = "CUDA's own copy";
const QUANTIZE: &str = "quantize and amax";
const TRANSPOSE: &str = "quantize, amax and transpose";

/// The ways, and the bytes that each reads and writes per element.
const BYTES: [(&str, usize); 5] = [
    (COPY, 4),
    ("x + 1", 4),
    ("amax, then quantize", 5),
    (QUANTIZE, 3),
    (TRANSPOSE, 4),
];

pub(crate) fn compare(shape: [usize; 2], device: &Device) {
    let [rows, columns] = shape;
    let inputs = [(); INPUTS].map(|()| random(shape, device));
    let scale = Tensor::<1>::ones([1], device);
    let known = |x: Tensor<2>| Fp8Tensor::quantize_with_device_scale(x, scale.clone(), FORMAT);
    let both = |x: Tensor<2>| Fp8Tensor::quantize_with_transpose(x, scale.clone(), FORMAT);
    check(&inputs[0], known, both);

    let question = format!("What does quantizing {shape:?} in bf16 cost?");
    let table = Comparison::empty(&question)
        .within(time_left())
        .with_time(COPY, copy(rows * columns * 2));
    // Sums would be fused with the next ones.
    let add = |x| {
        let sum = x + 1.0;
        flush(device);
        sum
    };
    let table = queued(table, "x + 1", &inputs, add, is_computed);
    let own = |x| Fp8Tensor::quantize(x, FORMAT);
    let table = queued(table, "amax, then quantize", &inputs, own, |x| is_cast(&x));
    let table = queued(table, QUANTIZE, &inputs, known, |(x, _)| is_cast(&x));
    let table = queued(table, TRANSPOSE, &inputs, both, |(x, transposed, _)| {
        is_cast(&x);
        is_cast(&transposed);
    });
    let table = table.run(50);

    let bytes = |way: &str| {
        BYTES
            .iter()
            .find(|(name, _)| *name == way)
            .map_or(0, |(_, b)| *b)
    };
    let table = table.with_column("GB/s", |row| {
        let bytes = (rows * columns * bytes(&row.name)) as f64;
        format!("{:.0}", bytes / row.median.as_secs_f64() / 1e9)
    });
    println!("{table}");
    let mut goals = Goals::new(&question);
    for way in [QUANTIZE, TRANSPOSE] {
        let ratio = rate(&table, way, bytes(way) as f64 / bytes(COPY) as f64);
        goals.add_timed(
            &format!("{way}: bytes a second, of the copy's"),
            ratio,
            table.rounds,
            Goal::AtLeast(0.8),
        );
    }
    println!("{goals}");
}

/// The ratio of a way's rate, in bytes per second, to that of the copy. The way moves `bytes` times as many bytes.
fn rate(table: &Table, way: &str, bytes: f64) -> Option<[f64; 3]> {
    Some(table.ratio(COPY, way)?.map(|times| bytes * times))
}

/// Checks that the quantized values are near those of `x` in every way, and that the amax is that of `x`.
fn check(
    x: &Tensor<2>,
    known: impl Fn(Tensor<2>) -> (Fp8Tensor<2>, Tensor<1>),
    both: impl Fn(Tensor<2>) -> (Fp8Tensor<2>, Fp8Tensor<2>, Tensor<1>),
) {
    let (quantized, amax) = known(x.clone());
    let (again, transposed, second) = both(x.clone());
    let expected: f32 = x.clone().abs().max().cast(FloatDType::F32).into_scalar();
    assert_eq!(
        [amax, second].map(Tensor::into_scalar::<f32>),
        [expected; 2]
    );
    let values = |x: Fp8Tensor<2>| x.dequantize(FloatDType::BF16);
    let own = Fp8Tensor::quantize(x.clone(), FORMAT);
    for (way, found) in [
        ("amax, then quantize", values(own)),
        (QUANTIZE, values(quantized)),
        (TRANSPOSE, values(again)),
        ("its transpose", values(transposed).transpose()),
    ] {
        let distance = distance(found, x.clone()).expect("the device computes");
        // With three bits of mantissa, half a unit in the last place is at most a sixteenth.
        assert!(distance < 0.0625, "{way}: {distance} off");
    }
}

fn is_cast(x: &Fp8Tensor<2>) {
    let corner: Tensor<2, Int> = x.codes().slice([0..1, 0..1]);
    corner.try_into_data().expect("the device computes");
}

fn queued<'a, T: 'a>(
    table: Comparison<'a>,
    name: &str,
    inputs: &'a [Tensor<2>; INPUTS],
    work: impl Fn(Tensor<2>) -> T + 'a,
    check: impl FnMut(T) + 'a,
) -> Comparison<'a> {
    let device = inputs[0].device();
    let mut turn = inputs.iter().cycle();
    let next = move || work(turn.next().expect("it has no end").clone());
    table.with_queue(name, next, move || sync(&device), check)
}

/// Copies `bytes` bytes on the device by the driver, several times in a row, and returns the time of one copy. The bytes are
/// random, because zeros may be copied faster.
fn copy(bytes: usize) -> impl FnMut() -> Duration {
    let context = CudaContext::new(0).expect("a GPU");
    let stream = context.new_stream().expect("a stream");
    let mut state = 1u64;
    let mut noise = || {
        // The generator of Knuth's MMIX.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let block: Vec<u8> = (0..1 << 24).map(|_| noise()).collect();
    let mut from = stream.alloc_zeros::<u8>(bytes).expect("memory");
    for start in (0..bytes).step_by(block.len()) {
        let end = bytes.min(start + block.len());
        let mut part = from.slice_mut(start..end);
        stream
            .memcpy_htod(&block[..end - start], &mut part)
            .expect("both are alive");
    }
    let mut into = stream.alloc_zeros::<u8>(bytes).expect("memory");
    // As many copies as take 5 ms at 5 TB/s, but at least 4.
    let at_once = (25_000_000_000 / (2 * bytes)).max(4) as u32;
    move || {
        stream.synchronize().expect("the device copies");
        let start = Instant::now();
        for _ in 0..at_once {
            stream
                .memcpy_dtod(&from, &mut into)
                .expect("both are alive");
        }
        stream.synchronize().expect("the device copies");
        start.elapsed() / at_once
    }
}
