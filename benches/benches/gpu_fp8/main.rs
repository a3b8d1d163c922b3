//! What do fp8 casts, products and layers cost on a GPU, beside a copy, Burn's products in bf16, and PyTorch's
//! `torch._scaled_mm` (cuBLASLt) where it is installed? Arguments choose questions by name.

use benches::{Comparison, Precision, is_selected, torch_script};
use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{Device, Distribution, FloatDType, Tensor},
};
use burn_fp8::{
    Fp8Format, Fp8Linear, Fp8Tensor,
    kernels::{MatmulPolicy, MatmulRoutine, set_matmul_policy},
    recipe::DelayedScaling,
    scaled_matmul,
};
use cudarc::driver::CudaContext;
use serde::Deserialize;
use std::{
    error, iter,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// M, K and N: squares, and the layers of a language model of width 4,096 over 8,192 tokens.
const PRODUCTS: [[usize; 3]; 7] = [
    [2_048, 2_048, 2_048],
    [4_096, 4_096, 4_096],
    [8_192, 8_192, 8_192],
    [16_384, 16_384, 16_384],
    [8_192, 4_096, 6_144],
    [8_192, 4_096, 14_336],
    [8_192, 14_336, 4_096],
];

/// Products that are started before the first is waited for; `torch/scaled_mm.py` has the same number.
const AT_ONCE: u32 = 8;

fn main() {
    let device = Device::cuda(0);
    quantize(&device);
    products(&device);
    layers(&device);
}

/// Seconds of PyTorch's products of one size.
#[derive(Clone, Copy, Deserialize)]
struct Torch {
    bf16: f64,
    /// By `torch._scaled_mm`, with precise sums, as ours are, and with fast ones.
    e4m3: f64,
    fast: f64,
}

/// PyTorch's products of some sizes, where it is installed.
fn torch_products(sizes: &[[usize; 3]]) -> Result<Vec<Torch>, Box<dyn error::Error>> {
    let mut command = torch_script("scaled_mm.py");
    command.args(sizes.iter().map(|[m, k, n]| format!("{m}x{k}x{n}")));
    let output = command.stderr(Stdio::inherit()).output()?;
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout)?),
        false => Err(output.status.to_string().into()),
    }
}

fn random(shape: [usize; 2], device: &Device) -> Tensor<2> {
    let x = Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), device);
    x.cast(FloatDType::BF16)
}

/// Waits until everything is computed.
fn sync(device: &Device) {
    device.sync().expect("the device computes");
}

/// Tensors that are quantized at once, each another: what is done to one, fusion would do by one kernel.
const INPUTS: usize = 4;

fn quantize(device: &Device) {
    if !is_selected("quantize") {
        return;
    }
    for shape @ [rows, columns] in [[8_192, 8_192], [16_384, 16_384], [32_768, 16_384]] {
        let inputs = [(); INPUTS].map(|()| random(shape, device));
        let scale = Tensor::<1>::ones([1], device);
        let format = Fp8Format::E4M3;
        let question = format!("What does quantizing {shape:?} in bf16 cost?");
        let mut table = Comparison::empty(&question).with_time(COPY, copy(rows * columns * 2));
        let known = |x: Tensor<2>| Fp8Tensor::quantize_with_device_scale(x, scale.clone(), format);
        let both = |x: Tensor<2>| Fp8Tensor::quantize_with_transpose(x, scale.clone(), format);
        table = queued(table, "x + 1", &inputs, |x| x + 1.0);
        table = queued(table, "amax, then quantize", &inputs, |x| {
            Fp8Tensor::quantize(x, format)
        });
        table = queued(table, "quantize and amax", &inputs, known);
        table = queued(table, "quantize, amax and transpose", &inputs, both);
        let table = table.run(50);
        println!("{table}");
        // The bytes that each way reads and writes for an element.
        let rates: Vec<f64> = [4, 4, 5, 3, 4]
            .iter()
            .zip(&table.rows)
            .map(|(bytes, row)| (rows * columns * bytes) as f64 / row.median.as_secs_f64() / 1e9)
            .collect();
        for (row, rate) in table.rows.iter().zip(&rates) {
            let name = &row.name;
            println!(
                "- {name}: {rate:.0} GB/s, {:.2} of the copy's",
                rate / rates[0]
            );
        }
        println!();
    }
}

fn queued<'a, T: 'a>(
    table: Comparison<'a>,
    name: &str,
    inputs: &'a [Tensor<2>; INPUTS],
    work: impl Fn(Tensor<2>) -> T + 'a,
) -> Comparison<'a> {
    let device = inputs[0].device();
    let mut turn = inputs.iter().cycle();
    let next = move || work(turn.next().expect("it has no end").clone());
    table.with_queue(name, INPUTS as u32, next, move || sync(&device))
}

const COPY: &str = "CUDA's own copy";

/// Copies some bytes on the device, by the driver: the time of one of several.
fn copy(bytes: usize) -> impl FnMut() -> Duration {
    let context = CudaContext::new(0).expect("a GPU");
    let stream = context.new_stream().expect("a stream");
    let from = stream.alloc_zeros::<u8>(bytes).expect("memory");
    let mut into = stream.alloc_zeros::<u8>(bytes).expect("memory");
    move || {
        stream.synchronize().expect("the device copies");
        let start = Instant::now();
        for _ in 0..INPUTS {
            stream
                .memcpy_dtod(&from, &mut into)
                .expect("both are alive");
        }
        stream.synchronize().expect("the device copies");
        start.elapsed() / INPUTS as u32
    }
}

fn products(device: &Device) {
    let wait = || sync(device);
    let native = native_routines();
    let selected = |[m, k, n]: [usize; 3]| is_selected(&format!("product {m}x{k}x{n}"));
    let sizes: Vec<[usize; 3]> = PRODUCTS
        .into_iter()
        .filter(|size| selected(*size))
        .collect();
    let torch = torch_products(&sizes).unwrap_or_else(|problem| {
        println!("PyTorch's products could not be timed: {problem}\n");
        Vec::new()
    });
    let torch = torch.into_iter().map(Some).chain(iter::repeat(None));
    for ([m, k, n], torch) in sizes.into_iter().zip(torch) {
        let (a, b) = (random([m, k], device), random([n, k], device));
        let [a8, b8] = [&a, &b].map(|x| Fp8Tensor::quantize(x.clone(), Fp8Format::E4M3));
        // As a weight's gradient has it, and as fp8 hardware wants it: with the inner dimension contiguous.
        let (b, b8) = (b.transpose(), b8.transpose());
        let by = |policy| {
            let (a8, b8) = (a8.clone(), b8.clone());
            move || {
                set_matmul_policy(policy);
                scaled_matmul(&a8, &b8, None, FloatDType::BF16).expect("the shapes fit")
            }
        };
        let mut ways = vec![
            ("e4m3, as it is picked".to_owned(), MatmulPolicy::Automatic),
            (
                "e4m3, decoded".to_owned(),
                MatmulPolicy::Only(MatmulRoutine::Decoded),
            ),
        ];
        ways.extend(native.iter().map(|routine| {
            let policy = MatmulPolicy::Only(*routine);
            (format!("e4m3, {routine}"), policy)
        }));
        let question = format!("What does a product cost? [{m}, {k}] by [{k}, {n}]");
        let mut table = Comparison::empty(&question).with_queue(
            "bf16, Burn",
            AT_ONCE,
            || a.clone().matmul(b.clone()),
            wait,
        );
        for (name, policy) in &ways {
            table = table.with_queue(name, AT_ONCE, by(*policy), wait);
        }
        let table = table.run(20);
        set_matmul_policy(MatmulPolicy::Automatic);
        println!("{table}");
        for row in &table.rows {
            let rate = 2.0 * (m * k * n) as f64 / row.median.as_secs_f64() / 1e12;
            print!("- {}: {rate:.1} TFLOP/s", row.name);
            if let Some(torch) = torch {
                let ratio = |theirs: f64| theirs / row.median.as_secs_f64();
                print!(
                    "; PyTorch takes {:.3} of its time in bf16, by `_scaled_mm` {:.3}, {:.3} with fast sums",
                    ratio(torch.bf16),
                    ratio(torch.e4m3),
                    ratio(torch.fast),
                );
            }
            println!();
        }
        println!();
    }
}

/// The routines that multiply fp8 itself on this GPU: where they are compiled in those for its tensor cores (others would be
/// emulated), and cuBLASLt (another, as it is picked, where that is not installed).
fn native_routines() -> Vec<MatmulRoutine> {
    let query = ["--id=0", "--query-gpu=compute_cap", "--format=csv,noheader"];
    let output = Command::new("nvidia-smi").args(query).output();
    let capability = output.map_or_else(|_| Vec::new(), |output| output.stdout);
    let mut native = match capability.trim_ascii() {
        b"9.0" => vec![MatmulRoutine::Wgmma, MatmulRoutine::WgmmaTma],
        b"8.9" | b"12.0" | b"12.1" => vec![MatmulRoutine::Mma],
        b"10.0" | b"10.3" => vec![],
        _ => return vec![],
    };
    native.retain(|_| cfg!(feature = "cuda-cpp"));
    native.push(MatmulRoutine::CublasLt);
    native
}

/// Steps of one layer by SGD, so that its weight is another each time and its casts are made again.
fn steps<'a, M: Module + 'a>(
    model: M,
    device: Device,
    shape: [usize; 2],
    forward: impl Fn(&M, Tensor<2>) -> Tensor<2> + 'a,
) -> impl FnMut() + 'a {
    let x = Tensor::<2>::random(shape, Distribution::Default, &device).require_grad();
    let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
    let mut model = Some(model);
    move || {
        let before = model.take().expect("the model is put back");
        // Another tensor each time, as inputs are.
        let loss = forward(&before, x.clone() * 1.0).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &before);
        model = Some(optimizer.step(1e-3, before, gradients));
        sync(&device);
    }
}

fn layers(device: &Device) {
    if !is_selected("linear") {
        return;
    }
    for [rows, from, to] in [[8_192, 4_096, 14_336], [8_192, 1_280, 5_120]] {
        let config = LinearConfig::new(from, to).with_bias(false);
        let linear = |precision: Precision| {
            let device = precision.device(device.clone()).autodiff();
            let layer = config.init(&device);
            steps(layer, device, [rows, from], |layer: &Linear, x| {
                layer.forward(x)
            })
        };
        let own = || {
            let device = Precision::Bf16.device(device.clone()).autodiff();
            let layer = Fp8Linear::from_linear(config.init(&device), DelayedScaling::new());
            let layer = layer.expect("the recipe is valid");
            steps(layer, device, [rows, from], |layer: &Fp8Linear, x| {
                layer.forward(x)
            })
        };
        let question =
            format!("What does a training step of a layer cost? linear, [{rows}, {from}] to {to}");
        let bf16 = linear(Precision::Bf16);
        let mut table = Comparison::new(&question, "Linear, autocast bf16", bf16);
        for precision in [
            Precision::Plain,
            Precision::Fp8Current,
            Precision::Fp8Delayed,
        ] {
            table = table.with(&format!("Linear, {precision}"), linear(precision));
        }
        let table = table.with("Fp8Linear, delayed scaling", own()).run(20);
        println!("{table}");
    }
}
