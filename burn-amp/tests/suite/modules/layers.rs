//! Layers of vectors: linear maps, embeddings, encodings, distances.

use super::{Case, case, check};
use burn::nn::{
    CosineSimilarityConfig, EmbeddingConfig, GateController, Identity, Initializer, LinearConfig,
    LinearLayout, PairwiseDistanceConfig, PositionalEncodingConfig, RotaryEncodingConfig,
    transformer::PositionWiseFeedForwardConfig,
};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            |device| LinearConfig::new(8, 6).init(device),
            |m, feed| m.forward(feed.float([4, 8])),
        ),
        case(
            |device| {
                let linear = LinearConfig::new(8, 6).with_layout(LinearLayout::Col);
                linear.with_bias(false).init(device)
            },
            |m, feed| m.forward(feed.float([2, 3, 8])),
        ),
        case(
            |device| EmbeddingConfig::new(9, 6).init(device),
            |m, feed| m.forward(feed.int([2, 5], 9)),
        ),
        case(|_| Identity::new(), |m, feed| m.forward(feed.float([4, 8]))),
        case(
            |device| {
                PositionalEncodingConfig::new(8)
                    .with_max_sequence_size(6)
                    .init(device)
            },
            |m, feed| m.forward(feed.float([2, 5, 8])),
        ),
        case(
            |device| RotaryEncodingConfig::new(6, 8).init(device),
            |m, feed| m.forward(feed.float([2, 5, 8])),
        ),
        case(
            |_| CosineSimilarityConfig::new().init(),
            |m, feed| m.forward(feed.float([4, 8]), feed.float([4, 8])),
        ),
        case(
            |_| PairwiseDistanceConfig::new().init(),
            |m, feed| m.forward(feed.float([4, 8]), feed.float([4, 8])),
        ),
        case(
            |device| GateController::new(8, 6, true, Initializer::Zeros, device),
            |m, feed| m.gate_product(feed.float([4, 8]), feed.float([4, 6])),
        ),
        case(
            |device| {
                let layer = PositionWiseFeedForwardConfig::new(8, 16);
                layer.with_dropout(0.0).init(device)
            },
            |m, feed| m.forward(feed.float([2, 3, 8])),
        ),
    ]
}

#[test]
fn layers_of_vectors_are_near_f32() {
    check(cases());
}
