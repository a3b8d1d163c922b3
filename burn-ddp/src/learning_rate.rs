//! Learning rates for larger batches.

/// How a learning rate grows with the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LrScaling {
    /// In proportion: for SGD (Goyal et al. 2017, arXiv:1706.02677).
    Linear,
    /// With the square root, which keeps the variance of steps: for Adam and its like (Krizhevsky 2014,
    /// arXiv:1404.5997; Malladi et al. 2022, arXiv:2205.10287).
    Sqrt,
}

/// A learning rate that was found good on one rank, for `ranks` ranks with batches of the same size each.
///
/// A large rate needs a warm-up. Goyal et al. start from the rate of one rank, for five epochs; Burn's
/// schedulers do that:
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
