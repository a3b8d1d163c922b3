//! What the transformers share: blocks that normalize first, as GPT-2 and ViT have them.

use burn::{
    nn::transformer::{TransformerEncoder, TransformerEncoderConfig},
    tensor::Device,
};

/// `layers` blocks of `width`, with heads of 64 and an inner layer four times as wide; no dropout.
pub(super) fn blocks(layers: usize, width: usize, device: &Device) -> TransformerEncoder {
    TransformerEncoderConfig::new(width, 4 * width, (width / 64).max(1), layers)
        .with_norm_first(true)
        .with_dropout(0.0)
        .init(device)
}
