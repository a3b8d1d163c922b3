//! What the transformers share: blocks that normalize first, as in GPT-2 and ViT.

use burn::{
    nn::{
        Linear,
        attention::MultiHeadAttention,
        transformer::{TransformerEncoder, TransformerEncoderConfig},
    },
    tensor::{Bool, Device, FloatDType, Tensor, activation::softmax},
};

/// `layers` blocks of width `width`, with heads of 64, an inner layer four times as wide, and no dropout.
pub(super) fn blocks(layers: usize, width: usize, device: &Device) -> TransformerEncoder {
    TransformerEncoderConfig::new(width, 4 * width, (width / 64).max(1), layers)
        .with_norm_first(true)
        .with_dropout(0.0)
        .init(device)
}

/// The forward of `blocks` with casts written by hand. Products compute in `low`, to which their parameters were cast. Norms,
/// softmax and the residuals are in f32. `mask` is `[batch, 1, length, length]`, if tokens see only some others.
pub(super) fn blocks_by_hand(
    blocks: &TransformerEncoder,
    x: Tensor<3>,
    mask: Option<Tensor<4, Bool>>,
    low: FloatDType,
) -> Tensor<3> {
    blocks.layers.iter().fold(x, |x, block| {
        let y = block.norm_2.forward(x.clone()).cast(low);
        let x = x + attention_by_hand(&block.mha, y, mask.clone(), low).cast(FloatDType::F32);
        let y = block.norm_1.forward(x.clone()).cast(low);
        let y = block.pwff.linear_inner.forward(y);
        let y = block.pwff.activation.forward(y);
        x + block.pwff.linear_outer.forward(y).cast(FloatDType::F32)
    })
}

fn attention_by_hand(
    attention: &MultiHeadAttention,
    x: Tensor<3>,
    mask: Option<Tensor<4, Bool>>,
    low: FloatDType,
) -> Tensor<3> {
    let [batch, length, width] = x.dims();
    let heads = |linear: &Linear| {
        let y = linear.forward(x.clone());
        y.reshape([batch, length, attention.n_heads, attention.d_k])
            .swap_dims(1, 2)
    };
    let scores = heads(&attention.query).matmul(heads(&attention.key).transpose());
    let mut scores = scores.div_scalar((attention.d_k as f32).sqrt());
    if let Some(mask) = mask {
        scores = scores.mask_fill(mask, attention.min_float);
    }
    let weights = softmax(scores.cast(FloatDType::F32), 3).cast(low);
    let context = weights.matmul(heads(&attention.value));
    let context = context.swap_dims(1, 2).reshape([batch, length, width]);
    attention.output.forward(context)
}
