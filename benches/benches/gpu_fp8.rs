//! What do fp8 casts, products and layers cost on a GPU, beside a copy, Burn's products in bf16, and PyTorch's
//! `torch._scaled_mm` (cuBLASLt) where it is installed? Arguments choose questions by name.

use benches::{Comparison, Precision, is_selected, torch_script};
use burn::{
    nn::LinearConfig,
    tensor::{Device, Distribution, FloatDType, Tensor},
};
use burn_fp8::{Fp8Format, Fp8Linear, Fp8Tensor, recipe::DelayedScaling, scaled_matmul};

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

fn main() {
    let device = Device::cuda(0);
    quantize(&device);
    products(&device);
    layers(&device);
    if is_selected("torch") {
        let shapes = PRODUCTS.map(|[m, k, n]| format!("{m}x{k}x{n}"));
        let status = torch_script("scaled_mm.py").args(shapes).status();
        if !status.as_ref().is_ok_and(|status| status.success()) {
            println!("PyTorch's products could not be timed: {status:?}");
        }
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

fn quantize(device: &Device) {
    if !is_selected("quantize") {
        return;
    }
    let x = random([16_384, 8_192], device);
    let copy = || {
        // A copy that no one can skip: another value for every element.
        let y = x.clone() + 1.0;
        sync(device);
        drop(y);
    };
    let table = Comparison::new(
        "What does quantizing [16384, 8192] in bf16 cost?",
        "x + 1",
        copy,
    )
    .with("amax and quantize", || {
        let y = Fp8Tensor::quantize(x.clone(), Fp8Format::E4M3);
        sync(device);
        drop(y);
    })
    .run(50);
    println!("{table}");
}

fn products(device: &Device) {
    for [m, k, n] in PRODUCTS {
        let name = format!("[{m}, {k}] by [{k}, {n}]");
        if !is_selected("product") {
            return;
        }
        let (a, b) = (random([m, k], device), random([k, n], device));
        let [a8, b8] = [&a, &b].map(|x| Fp8Tensor::quantize(x.clone(), Fp8Format::E4M3));
        let bf16 = || {
            let c = a.clone().matmul(b.clone());
            sync(device);
            drop(c);
        };
        let question = format!("What does a product cost? {name}");
        let table = Comparison::new(&question, "bf16, Burn", bf16)
            .with("e4m3, to bf16", || {
                let c = scaled_matmul(&a8, &b8, None, FloatDType::BF16);
                sync(device);
                drop(c);
            })
            .run(20);
        println!("{table}");
        for row in &table.rows {
            let rate = 2.0 * (m * k * n) as f64 / row.median.as_secs_f64() / 1e12;
            println!("- {}: {rate:.1} TFLOP/s", row.name);
        }
        println!();
    }
}

fn layers(device: &Device) {
    if !is_selected("linear") {
        return;
    }
    let autocast = Precision::Bf16.device(device.clone()).autodiff();
    let plain = device.clone().autodiff();
    let [rows, from, to] = [8_192, 4_096, 14_336];
    let input = |device: &Device| {
        Tensor::<2>::random([rows, from], Distribution::Default, device).require_grad()
    };
    let config = LinearConfig::new(from, to).with_bias(false);
    let (linear, x) = (config.init(&autocast), input(&autocast));
    let fp8 = Fp8Linear::from_linear(config.init(&plain), DelayedScaling::new());
    let (fp8, y) = (fp8.expect("the recipe is valid"), input(&plain));
    let table = Comparison::new(
        &format!("What do forward and backward of a layer cost? [{rows}, {from}] to {to}"),
        "Linear, bf16 autocast",
        || {
            drop(linear.forward(x.clone()).mean().backward());
            sync(&autocast);
        },
    )
    .with("Fp8Linear, delayed scaling", || {
        drop(fp8.forward(y.clone()).mean().backward());
        sync(&plain);
    })
    .run(20);
    println!("{table}");
}
