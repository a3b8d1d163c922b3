//! The models that papers and other frameworks report on, in plain Burn modules.

mod gpt;
mod llama;
mod resnet;
mod training;
mod transformer;
mod vit;

pub use gpt::Gpt2;
pub use llama::{Llama, LlamaSizes};
pub use resnet::ResNet;
pub use training::{Forward, ForwardText, model_training, on_images, on_text};
pub use vit::VisionTransformer;
