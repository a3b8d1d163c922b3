//! How much memory does a training step have in use at most, in bf16 beside f32? On the CPU (Flex), where each tensor is an allocation of
//! its own; parameters and the batch count. `gpu_steps` asks the same of a GPU.

use benches::{
    Precision, Training, is_selected,
    models::{Gpt2, ResNet, VisionTransformer},
    training_of,
};
use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const CLASSES: usize = 64;

fn main() {
    compare("ResNet-18, batch 32, 3x96x96", |precision, device| {
        let model = ResNet::resnet18(CLASSES, device);
        let (images, labels) = images([32, 3, 96, 96], device);
        training_of(precision, model, labels, move |model, _| match precision {
            Precision::Bf16ByHand => model.forward_by_hand(images.clone(), FloatDType::BF16),
            _ => model.forward(images.clone()),
        })
    });
    let vit = "vision transformer, 6 layers of width 128, batch 32, 3x32x32";
    compare(vit, |precision, device| {
        let model = VisionTransformer::new(6, 128, 4, 32, CLASSES, device);
        let (images, labels) = images([32, 3, 32, 32], device);
        training_of(precision, model, labels, move |model, _| match precision {
            Precision::Bf16ByHand => model.forward_by_hand(images.clone(), FloatDType::BF16),
            _ => model.forward(images.clone()),
        })
    });
    let gpt = "GPT, 6 layers of width 128, batch 8 of 128 tokens";
    compare(gpt, |precision, device| {
        let model = Gpt2::new(6, 128, CLASSES, 128, device);
        let labels = Tensor::<1, Int>::arange(0..8 * 128, device).remainder_scalar(CLASSES as i64);
        let tokens = labels.clone().reshape([8, 128]);
        training_of(precision, model, labels, move |model, _| {
            let logits = match precision {
                Precision::Bf16ByHand => model.forward_by_hand(tokens.clone(), FloatDType::BF16),
                _ => model.forward(tokens.clone()),
            };
            logits.flatten(0, 1)
        })
    });
}

fn images(shape: [usize; 4], device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    let images = Tensor::random(shape, Distribution::Default, device);
    (images, Tensor::arange(0..shape[0] as i64, device))
}

/// Measures the steps that `train` makes on each device.
fn compare(model: &str, train: impl Fn(Precision, &Device) -> Training) {
    let question = format!("What memory does a step take? {model}");
    if !is_selected(&question) {
        return;
    }
    println!("\n{question}\n\n| | most in use | ratio |\n|---|---|---|");
    let ways = [
        (Precision::Plain, false),
        (Precision::O0, false),
        (Precision::Bf16, false),
        (Precision::Bf16ByHand, false),
        (Precision::Plain, true),
        (Precision::Bf16, true),
    ];
    let mut plain = None;
    for (precision, checkpointing) in ways {
        let device = precision.device(Device::flex()).autodiff();
        let (device, besides) = match checkpointing {
            true => (device.gradient_checkpointing(), ", gradient checkpointing"),
            false => (device, ""),
        };
        let before = ALLOCATOR.current_usage();
        let mut training = train(precision, &device);
        // The first step sets up what stays.
        training.step();
        ALLOCATOR.reset_peak_usage();
        training.step();
        training.check().expect("it trains");
        let peak = (ALLOCATOR.peak_usage() - before) as f64;
        drop(training);
        device.sync().expect("the device works");
        let ratio = peak / *plain.get_or_insert(peak);
        println!(
            "| {precision}{besides} | {:.1} MB | {ratio:.3} |",
            peak / 1e6
        );
    }
}
