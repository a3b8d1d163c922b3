//! The models that papers and other frameworks report on, in plain Burn modules.

mod gpt;
mod resnet;
mod training;
mod transformer;
mod vit;

pub use gpt::Gpt2;
pub use resnet::ResNet;
pub use training::model_training;
pub use vit::VisionTransformer;
