//! What does a training step cost on the autocast device, with everything in f32 (`O0`: the cost of the layer) and in
//! bf16, also with gradient checkpointing, compared with the plain device?

use benches::{Comparison, Precision, is_selected, models::ResNet, training_of};
use burn::{
    module::Module,
    tensor::{Device, Distribution, Tensor},
};
use examples::{resnet::ResNetConfig, transformer::TransformerConfig};

fn main() {
    compare(
        "ResNet-18, batch 8, 3x96x96",
        [8, 3, 96, 96],
        12,
        |device| {
            let model = ResNet::resnet18(10, device);
            (model, ResNet::forward)
        },
    );
    compare(
        "ResNet-20, batch 16, 3x32x32",
        [16, 3, 32, 32],
        12,
        |device| {
            let model = ResNetConfig::new(20, 16).init(device);
            (model, |model, images| model.forward(images))
        },
    );
    compare(
        "vision transformer, 4 layers of width 128, batch 16, 3x32x32",
        [16, 3, 32, 32],
        20,
        |device| {
            let model = TransformerConfig::new(4, 128).init(device);
            (model, |model, images| model.forward(images))
        },
    );
}

/// Times the training steps of a model. `init` returns the model and the function that computes its logits `[images, 10]`.
fn compare<M: Module + 'static>(
    name: &str,
    images: [usize; 4],
    rounds: usize,
    init: impl Fn(&Device) -> (M, fn(&M, Tensor<4>) -> Tensor<2>),
) {
    if !is_selected(name) {
        return;
    }
    let step = |precision: Precision| {
        let device = precision.device(Device::flex()).autodiff();
        let (model, forward) = init(&device);
        let labels = Tensor::arange(0..images[0] as i64, &device).remainder_scalar(10);
        let images = Tensor::random(images, Distribution::Default, &device);
        let mut training = training_of(precision, model, labels, move |model, _| {
            forward(model, images.clone())
        });
        move || training.step()
    };
    let table = Comparison::new(
        &format!("What does a training step cost? {name}"),
        "plain f32",
        step(Precision::Plain),
    )
    .with("autocast O0", step(Precision::O0))
    .with("autocast bf16", step(Precision::Bf16))
    .with(
        "autocast bf16, nothing recomputed",
        step(Precision::Bf16Kept),
    )
    .with(
        "autocast bf16, gradient checkpointing",
        step(Precision::Bf16Checkpointed),
    )
    .run(rounds);
    println!("{table}");
}
