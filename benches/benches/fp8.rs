//! What do fp8 casts, products and layers cost on Flex, compared with Burn's own in f32 and bf16? No kernel of Flex uses fp8
//! instructions: fp8 can only lose time, and the question is how much. Arguments choose questions by a part of their text.

use benches::{Comparison, is_selected};
use burn::{
    nn::LinearConfig,
    tensor::{Device, Distribution, FloatDType, Tensor},
};
use burn_fp8::{
    Fp8Format, Fp8Linear, Fp8Tensor, amax,
    recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RowwiseScaling},
    scaled_matmul,
};

fn main() {
    casts();
    products();
    steps();
}

fn matrix(shape: [usize; 2]) -> Tensor<2> {
    Tensor::random(shape, Distribution::Default, &Device::flex())
}

fn casts() {
    for elements in [1_024, 1_048_576] {
        let question = format!("What does a cast cost? {elements} elements of f32");
        if !is_selected(&question) {
            continue;
        }
        let x = matrix([1, elements]);
        let scale = Tensor::<1>::ones([1], &Device::flex());
        let codes = Fp8Tensor::quantize(x.clone(), Fp8Format::E4M3);
        // The scale is given. The amax is computed as well.
        let quantize = |format| {
            let (x, scale) = (&x, &scale);
            move || {
                drop(Fp8Tensor::quantize_with_device_scale(
                    x.clone(),
                    scale.clone(),
                    format,
                ));
            }
        };
        let table = Comparison::new(&question, "x * 2", || drop(x.clone() * 2.0))
            .with("to bf16, by Burn", || {
                drop(x.clone().cast(FloatDType::BF16))
            })
            .with("amax", || drop(amax(x.clone())))
            .with("to e4m3, and amax", quantize(Fp8Format::E4M3))
            .with("to e5m2, and amax", quantize(Fp8Format::E5M2))
            .with("from e4m3", || drop(codes.dequantize(FloatDType::F32)))
            .run(100);
        println!("{table}");
    }
}

fn products() {
    for size in [64, 512] {
        let question = format!("What does a product cost? [{size}, {size}] by [{size}, {size}]");
        if !is_selected(&question) {
            continue;
        }
        let [a, b] = [(); 2].map(|()| matrix([size, size]));
        let [a8, b8] = [&a, &b].map(|x| Fp8Tensor::quantize(x.clone(), Fp8Format::E4M3));
        let [a16, b16] = [&a, &b].map(|x| x.clone().cast(FloatDType::BF16));
        let product = || drop(scaled_matmul(&a8, &b8, None, FloatDType::F32));
        let table = Comparison::new(&question, "f32, Burn", || drop(a.clone().matmul(b.clone())))
            .with("bf16, Burn", || drop(a16.clone().matmul(b16.clone())))
            .with("e4m3, cast before", product)
            .run(50);
        println!("{table}");
    }
}

fn steps() {
    let question = "What do forward and backward of a layer cost? linear, [256, 512] to 512";
    if !is_selected(question) {
        return;
    }
    let device = Device::flex().autodiff();
    let x = Tensor::<2>::random([256, 512], Distribution::Default, &device).require_grad();
    let linear = LinearConfig::new(512, 512).init(&device);
    let fp8 = |recipe: Fp8Recipe| {
        let layer = Fp8Linear::from_linear(linear.clone(), recipe).expect("the recipe is valid");
        let x = x.clone();
        move || drop(layer.forward(x.clone()).sum().backward())
    };
    let table = Comparison::new(question, "f32", || {
        drop(linear.forward(x.clone()).sum().backward());
    })
    .with("fp8, delayed scaling", fp8(DelayedScaling::new().into()))
    .with("fp8, current scaling", fp8(CurrentScaling::new().into()))
    .with("fp8, a scale a row", fp8(RowwiseScaling::new().into()))
    .with("fp8, a scale a block", fp8(BlockScaling::new().into()))
    .run(20);
    println!("{table}");
}
