//! The learning rate schedule: a linear warm-up, then half a cosine down to zero.
//!
//! The warm-up is that of Goyal et al. 2017 (<https://arxiv.org/abs/1706.02677>), and the cosine that of Loshchilov and
//! Hutter 2016 (<https://arxiv.org/abs/1608.03983>) without restarts.

use std::f64::consts::PI;

/// A linear warm-up to `peak`, then a cosine to zero at the end.
///
/// ```
/// let schedule = examples::schedule::WarmupCosine { peak: 0.1, warmup: 10, total: 100 };
/// assert_eq!(schedule.at(9), 0.1);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WarmupCosine {
    /// The highest learning rate, reached in the last step of the warm-up.
    pub peak: f64,
    /// The number of warm-up steps.
    pub warmup: usize,
    /// The number of all steps, warm-up included.
    pub total: usize,
}

impl WarmupCosine {
    /// The learning rate of step `step`, counted from 0. It is zero from `total` on, if the warm-up is over.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        if step >= self.total {
            return 0.0;
        }
        let progress = (step - self.warmup) as f64 / (self.total - self.warmup) as f64;
        self.peak * 0.5 * (1.0 + (PI * progress).cos())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_rises_linearly_and_falls_as_a_cosine() {
        let schedule = WarmupCosine {
            peak: 0.4,
            warmup: 4,
            total: 12,
        };
        let rates: Vec<f64> = (0..13).map(|step| schedule.at(step)).collect();
        let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
        for (step, rate) in [0.1, 0.2, 0.3, 0.4].into_iter().enumerate() {
            assert!(near(rates[step], rate));
        }
        // Halfway down, the cosine has reached half of the peak; a quarter of the way down, (1 + sqrt(1/2)) / 2 of it.
        assert!(near(rates[4], 0.4) && near(rates[8], 0.2));
        assert!(near(rates[6], 0.4 * (1.0 + 0.5_f64.sqrt()) / 2.0));
        assert!(rates[4..].windows(2).all(|pair| pair[1] < pair[0]));
        assert_eq!(rates[12], 0.0);
    }

    #[test]
    fn no_warm_up_starts_at_the_peak() {
        assert_eq!(
            WarmupCosine {
                peak: 1.0,
                warmup: 0,
                total: 3
            }
            .at(0),
            1.0
        );
    }
}
