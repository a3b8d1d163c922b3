//! What is the peak memory of a training step in bf16, compared with f32? On the CPU (Flex), where each tensor is an allocation
//! of its own. Parameters and the batch count. `gpu_steps` asks the same about a GPU.

use benches::{
    Precision, Training, is_selected,
    models::{Gpt2, ResNet, VisionTransformer, on_images, on_text},
};
use burn::tensor::Device;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// At least the number of images in a batch.
const CLASSES: usize = 128;

fn main() {
    // In the larger batch, activations outweigh the 11 million parameters, as they do in training on a GPU.
    for batch in [32, 128] {
        let resnet = format!("ResNet-18, batch {batch}, 3x96x96");
        compare(&resnet, |precision, device| {
            let model = ResNet::resnet18(CLASSES, device);
            let forward = (ResNet::forward as _, ResNet::forward_by_hand as _);
            on_images(precision, model, forward, [batch, 3, 96, 96], device)
        });
    }
    let vit = "vision transformer, 6 layers of width 128, batch 32, 3x32x32";
    compare(vit, |precision, device| {
        let model = VisionTransformer::new(6, 128, 4, 32, CLASSES, device);
        let forward = (
            VisionTransformer::forward as _,
            VisionTransformer::forward_by_hand as _,
        );
        on_images(precision, model, forward, [32, 3, 32, 32], device)
    });
    let gpt = "GPT, 6 layers of width 128, batch 8 of 128 tokens";
    compare(gpt, |precision, device| {
        let model = Gpt2::new(6, 128, CLASSES, 128, device);
        let forward = (Gpt2::forward as _, Gpt2::forward_by_hand as _);
        on_text(precision, model, forward, [8, 128], CLASSES)
    });
}

/// Measures the steps of the training that `train` returns, in each precision.
fn compare(model: &str, train: impl Fn(Precision, &Device) -> Training) {
    let question = format!("What memory does a step take? {model}");
    if !is_selected(&question) {
        return;
    }
    println!("\n{question}\n\n| | most in use | ratio |\n|---|---|---|");
    let ways = [
        Precision::Plain,
        Precision::O0,
        Precision::Bf16,
        Precision::Bf16Kept,
        Precision::Bf16ByHand,
        Precision::Fp8Delayed,
        Precision::PlainCheckpointed,
        Precision::Bf16Checkpointed,
    ];
    let mut plain = None;
    for precision in ways {
        let device = precision.device(Device::flex()).autodiff();
        let before = ALLOCATOR.current_usage();
        let mut training = train(precision, &device);
        // The first step allocates memory that stays.
        training.step();
        ALLOCATOR.reset_peak_usage();
        training.step();
        training.check().expect("it trains");
        let peak = (ALLOCATOR.peak_usage() - before) as f64;
        drop(training);
        device.sync().expect("the device works");
        let ratio = peak / *plain.get_or_insert(peak);
        println!("| {precision} | {:.1} MB | {ratio:.3} |", peak / 1e6);
    }
}
