//! Losses.

use super::{Case, case, check};
use burn::{
    nn::loss::*,
    tensor::activation::{log_softmax, softmax},
};

pub(super) fn cases() -> Vec<Case> {
    [of_numbers(), of_classes(), of_embeddings(), of_sequences()]
        .into_iter()
        .flatten()
        .collect()
}

/// Predictions beside targets, element by element.
fn of_numbers() -> Vec<Case> {
    use Reduction::Mean;
    vec![
        case(
            |_| MseLoss::new(),
            |m, feed| m.forward(feed.float([4, 8]), feed.target([4, 8]), Mean),
        ),
        case(
            |_| HuberLossConfig::new(0.7).init(),
            |m, feed| m.forward(feed.float([4, 8]), feed.target([4, 8]), Mean),
        ),
        case(
            |_| SmoothL1LossConfig::new().init(),
            |m, feed| m.forward_with_reduction(feed.float([4, 8]), feed.target([4, 8]), Mean),
        ),
        case(
            |_| LpLossConfig::new(3.0).init(),
            |m, feed| m.forward(feed.float([4, 8]), feed.target([4, 8]), Mean),
        ),
        case(
            |_| PoissonNllLossConfig::new().with_full(true).init(),
            |m, feed| m.forward(feed.float([4, 8]), feed.unit_target([4, 8]), Mean),
        ),
        case(
            |_| GaussianNLLLossConfig::new().with_full(true).init(),
            |m, feed| {
                let (mean, variance) = (feed.float([4, 8]), feed.unit([4, 8]));
                m.forward(mean, feed.target([4, 8]), variance, Mean)
            },
        ),
        case(
            |_| KLDivLossConfig::new().init(),
            |m, feed| {
                let predicted = log_softmax(feed.float([4, 8]), 1);
                let targets = softmax(feed.target([4, 8]), 1);
                m.forward(predicted, targets, Reduction::BatchMean)
            },
        ),
    ]
}

fn of_classes() -> Vec<Case> {
    use Reduction::Mean;
    vec![
        case(
            |device| CrossEntropyLossConfig::new().init(device),
            |m, feed| m.forward(feed.float([6, 5]), feed.int([6], 5)),
        ),
        case(
            |device| {
                let loss = CrossEntropyLossConfig::new().with_smoothing(Some(0.1));
                loss.with_weights(Some(vec![0.5, 1.0, 1.5, 2.0, 3.0]))
                    .init(device)
            },
            |m, feed| m.forward(feed.float([6, 5]), feed.int([6], 5)),
        ),
        case(
            |device| {
                BinaryCrossEntropyLossConfig::new()
                    .with_logits(true)
                    .init(device)
            },
            |m, feed| m.forward(feed.float([4, 8]), feed.int([4, 8], 2)),
        ),
        case(
            |device| BinaryCrossEntropyLossConfig::new().init(device),
            |m, feed| m.forward(feed.unit([4, 8]), feed.int([4, 8], 2)),
        ),
        case(
            |_| MultiMarginLossConfig::new().init(),
            |m, feed| m.forward(feed.float([6, 5]), feed.int([6], 5), Mean),
        ),
        case(
            |_| SoftMarginLoss::new(),
            |m, feed| m.forward(feed.float([4, 8]), feed.signs([4, 8]), Mean),
        ),
        case(
            |_| HingeEmbeddingLossConfig::new().init(),
            |m, feed| m.forward(feed.float([4, 8]), feed.signs([4, 8]), Mean),
        ),
        case(
            |_| MarginRankingLossConfig::new().with_margin(0.3).init(),
            |m, feed| {
                let (first, second) = (feed.float([4, 8]), feed.float([4, 8]));
                m.forward(first, second, feed.signs([4, 8]), Mean)
            },
        ),
    ]
}

fn of_embeddings() -> Vec<Case> {
    vec![
        case(
            |_| CosineEmbeddingLossConfig::new().init(),
            |m, feed| {
                let signs = feed.int([6], 2) * 2 - 1;
                m.forward(feed.float([6, 8]), feed.float([6, 8]), signs)
            },
        ),
        case(
            |_| TripletMarginLossConfig::new().init(),
            |m, feed| {
                let (anchor, positive) = (feed.float([6, 8]), feed.float([6, 8]));
                m.forward(anchor, positive, feed.float([6, 8]), Reduction::Mean)
            },
        ),
    ]
}

/// Sequences against shorter ones of labels 1 to 4; 0 is the blank.
fn of_sequences() -> Vec<Case> {
    vec![
        case(
            |_| CTCLossConfig::new().init(),
            |m, feed| {
                let predicted = log_softmax(feed.float([6, 2, 5]), 2);
                let labels = feed.int([2, 3], 4) + 1;
                m.forward(
                    predicted,
                    labels,
                    feed.lengths([6, 5]),
                    feed.lengths([2, 2]),
                )
            },
        ),
        case(
            |_| RNNTLossConfig::new().init(),
            |m, feed| {
                let labels = feed.int([2, 3], 4) + 1;
                let (logits, lengths) = (feed.float([2, 5, 4, 5]), feed.lengths([5, 4]));
                m.forward(logits, labels, lengths, feed.lengths([3, 2]))
            },
        ),
    ]
}

#[test]
fn losses_of_numbers_are_near_f32() {
    check(of_numbers());
}

#[test]
fn losses_of_classes_are_near_f32() {
    check(of_classes());
}

#[test]
fn losses_of_embeddings_and_sequences_are_near_f32() {
    check(of_embeddings().into_iter().chain(of_sequences()).collect());
}
