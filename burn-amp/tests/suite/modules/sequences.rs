//! Recurrent layers, attention and transformers.

use super::{Case, base, case, check};
use burn::{
    nn::{
        BiGruConfig, BiLstmConfig, BiRnnConfig, GruConfig, LstmConfig, RnnConfig,
        attention::{
            CrossAttentionConfig, MhaInput, MultiHeadAttentionConfig, generate_autoregressive_mask,
        },
        transformer::{
            TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoderConfig,
            TransformerEncoderInput, TransformerEncoderLayer,
        },
    },
    tensor::{Device, Tensor},
};

pub(super) fn cases() -> Vec<Case> {
    [recurrent(), attention(), transformers()]
        .into_iter()
        .flatten()
        .collect()
}

fn recurrent() -> Vec<Case> {
    let cases = vec![
        case(
            |device| RnnConfig::new(6, 5, true).init(device),
            |m, feed| m.forward(feed.float([2, 4, 6]), None).0,
        ),
        case(
            |device| BiRnnConfig::new(6, 5, true).init(device),
            |m, feed| m.forward(feed.float([2, 4, 6]), None).0,
        ),
        case(
            |device| GruConfig::new(6, 5, true).init(device),
            |m, feed| m.forward(feed.float([2, 4, 6]), Some(feed.float([2, 5]))),
        ),
        case(
            |device| BiGruConfig::new(6, 5, true).init(device),
            |m, feed| m.forward(feed.float([2, 4, 6]), None).0,
        ),
        case(
            |device| LstmConfig::new(6, 5, true).init(device),
            |m, feed| {
                let (output, state) = m.forward(feed.float([2, 4, 6]), None);
                Tensor::cat(vec![output, state.cell.unsqueeze_dim(1)], 1)
            },
        ),
        case(
            |device| BiLstmConfig::new(6, 5, true).init(device),
            |m, feed| m.forward(feed.float([2, 4, 6]), None).0,
        ),
    ];
    cases.into_iter().map(Case::recurs).collect()
}

/// A key's bias adds the same to all scores of a query, which softmax does not notice: its gradient
/// vanishes.
fn attention() -> Vec<Case> {
    vec![
        case(
            |device| {
                MultiHeadAttentionConfig::new(8, 2)
                    .with_dropout(0.0)
                    .init(device)
            },
            |m, feed| {
                let x = feed.float([2, 5, 8]);
                let mask = generate_autoregressive_mask(2, 5, &x.device());
                m.forward(MhaInput::self_attn(x).mask_attn(mask)).context
            },
        )
        .attends(1)
        .vanishing(&["key.bias"]),
        case(
            |device| {
                CrossAttentionConfig::new(8, 6, 4, 2, 3)
                    .with_dropout(0.0)
                    .init(device)
            },
            |m, feed| m.forward(feed.float([2, 3, 8]), feed.float([2, 5, 6]), None),
        )
        .attends(1)
        .vanishing(&["key.bias"]),
    ]
}

fn transformers() -> Vec<Case> {
    let encoder = || TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0);
    let decoder = || TransformerDecoderConfig::new(8, 16, 2, 2).with_dropout(0.0);
    vec![
        case(
            move |device| encoder().init(device),
            |m, feed| m.forward(TransformerEncoderInput::new(feed.float([2, 4, 8]))),
        )
        .attends(2)
        .vanishing(&["layers.0.mha.key.bias", "layers.1.mha.key.bias"]),
        case(
            move |device| TransformerEncoderLayer::new(&encoder(), device),
            |m, feed| m.forward(feed.float([2, 4, 8]), None, None),
        )
        .attends(1)
        .vanishing(&["mha.key.bias"]),
        case(
            move |device| decoder().init(device),
            |m, feed| {
                let (target, memory) = (feed.float([2, 4, 8]), feed.float([2, 3, 8]));
                m.forward(TransformerDecoderInput::new(target, memory))
            },
        )
        // One is enough on Flex, not on a GPU.
        .attends(if base() == Device::flex() { 1 } else { 2 })
        .vanishing(&[
            "layers.0.self_attn.key.bias",
            "layers.0.cross_attn.key.bias",
            "layers.1.self_attn.key.bias",
            "layers.1.cross_attn.key.bias",
        ]),
    ]
}

#[test]
fn recurrent_layers_are_near_f32() {
    check(recurrent());
}

#[test]
fn attention_is_near_f32() {
    check(attention());
}

#[test]
fn transformers_are_near_f32() {
    check(transformers());
}
