//! Learning rates for larger batches.

/// How a learning rate grows with the batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LrScaling {
    /// In proportion to it: for SGD (Goyal et al. 2017, arXiv:1706.02677).
    Linear,
    /// In proportion to its square root, which keeps the variance of steps: for Adam and similar optimizers
    /// (Krizhevsky 2014, arXiv:1404.5997; Malladi et al. 2022, arXiv:2205.10287).
    Sqrt,
}

/// Scales a learning rate that was tuned on one rank for `ranks` ranks, each with the same batch size as that one.
///
/// A large rate needs a warm-up. Goyal et al. start at the rate for one rank and raise it over five epochs;
/// Burn's schedulers can do this:
///
/// ```
/// use burn::lr_scheduler::{
///     cosine::CosineAnnealingLrSchedulerConfig, linear::LinearLrSchedulerConfig,
///     sequential::SequentialLrSchedulerConfig,
/// };
/// use burn_ddp::{LrScaling, scale_lr};
///
/// let (warm_up, rest) = (500, 8_500); // steps
/// let lr = scale_lr(0.1, 8, LrScaling::Linear);
/// assert_eq!(lr, 0.8);
/// let scheduler = SequentialLrSchedulerConfig::new(
///     vec![
///         LinearLrSchedulerConfig::new(0.1, lr, warm_up).into(),
///         CosineAnnealingLrSchedulerConfig::new(lr, rest).into(),
///     ],
///     vec![warm_up],
/// )
/// .init();
/// # assert!(scheduler.is_ok());
/// ```
pub fn scale_lr(lr: f64, ranks: usize, scaling: LrScaling) -> f64 {
    let ranks = ranks as f64;
    lr * match scaling {
        LrScaling::Linear => ranks,
        LrScaling::Sqrt => ranks.sqrt(),
    }
}
