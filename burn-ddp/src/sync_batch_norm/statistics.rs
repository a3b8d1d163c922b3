//! The numbers that ranks exchange: statistics per channel, merged on the host in `f64`.

use crate::{DdpError, ProcessGroup, ReduceOp};

/// Mean and biased variance per channel, and the number of samples.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Statistics {
    pub(super) mean: Vec<f64>,
    pub(super) variance: Vec<f64>,
    pub(super) count: f64,
}

impl Statistics {
    /// The statistics of an empty batch.
    pub(super) fn empty(channels: usize) -> Self {
        Self {
            mean: vec![0.0; channels],
            variance: vec![0.0; channels],
            count: 0.0,
        }
    }

    /// The statistics of all ranks' batches together: one all-gather of 2C + 1 numbers.
    pub(super) fn over_ranks(&self, group: &ProcessGroup) -> Result<Self, DdpError> {
        let own = [&self.mean[..], &self.variance[..], &[self.count]].concat();
        let all = group.all_gather(&own)?;
        Ok(Self::merge(self.mean.len(), &all))
    }

    /// Merges rows of 2C + 1 numbers:
    /// n = Σ nᵢ, µ = Σ nᵢ µᵢ / n, σ² = Σ nᵢ (σᵢ² + (µᵢ - µ)²) / n.
    pub(super) fn merge(channels: usize, rows: &[f64]) -> Self {
        let rows = || {
            rows.chunks_exact(2 * channels + 1)
                .filter(|row| row[2 * channels] > 0.0)
        };
        let count: f64 = rows().map(|row| row[2 * channels]).sum();
        let mut merged = Self {
            count,
            ..Self::empty(channels)
        };
        if count == 0.0 {
            // No rank has samples. A variance of -1 marks this: nothing is normalized.
            merged.variance.fill(-1.0);
            return merged;
        }
        for row in rows() {
            let weight = row[2 * channels] / count;
            for (mean, value) in merged.mean.iter_mut().zip(row) {
                *mean += weight * value;
            }
        }
        for row in rows() {
            let weight = row[2 * channels] / count;
            for channel in 0..channels {
                let distance = row[channel] - merged.mean[channel];
                merged.variance[channel] +=
                    weight * (row[channels + channel] + distance * distance);
            }
        }
        merged
    }
}

/// The sums over all ranks that the backward pass needs, and the total number of samples: one all-reduce of 2C + 1 numbers.
pub(super) fn sum_over_ranks(
    sums: &[f64],
    count: f64,
    group: &ProcessGroup,
) -> Result<(Vec<f64>, f64), DdpError> {
    let mut all = [sums, &[count]].concat();
    group.all_reduce(&mut all, ReduceOp::Sum)?;
    let count = all.pop().unwrap_or(count);
    Ok((all, count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(samples: &[f64]) -> [f64; 3] {
        let count = samples.len() as f64;
        if samples.is_empty() {
            return [0.0; 3];
        }
        let mean = samples.iter().sum::<f64>() / count;
        let variance = samples.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / count;
        [mean, variance, count]
    }

    proptest! {
        #[test]
        fn merging_is_as_good_as_one_batch(
            batches in prop::collection::vec(prop::collection::vec(-1e3..1e3, 0..6), 1..5),
        ) {
            let rows: Vec<f64> = batches.iter().flat_map(|batch| of(batch)).collect();
            let merged = Statistics::merge(1, &rows);
            let [mean, variance, count] = of(&batches.concat());
            prop_assert_eq!(merged.count, count);
            prop_assert_eq!(merged.variance[0] < 0.0, count == 0.0);
            if count > 0.0 {
                prop_assert!((merged.mean[0] - mean).abs() < 1e-9);
                prop_assert!((merged.variance[0] - variance).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn far_from_zero_the_variance_is_still_right() {
        let (a, b) = ([1e8, 1e8 + 1.0], [1e8 + 2.0, 1e8 + 3.0]);
        let merged = Statistics::merge(1, &[of(&a), of(&b)].concat());
        assert!((merged.variance[0] - 1.25).abs() < 1e-6);
    }
}
