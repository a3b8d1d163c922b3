//! The models that papers and other frameworks report on, in plain Burn modules.

mod gpt;
mod resnet;
mod training;
mod transformer;
mod vit;

pub use gpt::Gpt2;
pub use resnet::ResNet;
pub use training::{Forward, model_training, on_images, on_text};
pub use vit::VisionTransformer;
