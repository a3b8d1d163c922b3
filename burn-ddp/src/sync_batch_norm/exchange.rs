//! How ranks exchange statistics of their batches: on the device if the group uses NCCL, so that nothing waits
//! for a readback; otherwise on the host, in `f64`.

use burn::{
    backend::{
        Backend,
        tensor::{Device, FloatTensor},
    },
    tensor::{FloatDType, Shape, Slice, TensorData},
};
use burn_std::reader::try_read_sync;

use super::statistics::{Statistics, sum_over_ranks};
use crate::{ProcessGroup, ReduceOp, TensorOp};

/// Exchanges numbers per channel between ranks.
pub(super) struct Exchange<'a, B: Backend> {
    pub(super) group: &'a ProcessGroup,
    pub(super) channels: usize,
    pub(super) dtype: FloatDType,
    pub(super) device: &'a Device<B>,
}

impl<B: Backend> Exchange<'_, B> {
    /// Whether the numbers stay on their device.
    fn stays(&self) -> bool {
        // `Ddp` gets the same errors, and reports them.
        self.group
            .primitives_stay::<B>(self.device)
            .unwrap_or(false)
    }

    /// The mean and the biased variance over all ranks' batches. The variance is -1 if there are no samples.
    /// `own` are this rank's mean and variance, concatenated, and its number of samples, if it has any.
    pub(super) fn statistics(
        &self,
        own: Option<(FloatTensor<B>, usize)>,
    ) -> (FloatTensor<B>, FloatTensor<B>) {
        if self.stays() {
            let row = self.with_count(own);
            let width = 2 * self.channels + 1;
            let row = B::float_reshape(row, Shape::new([1, width]));
            // The group's next call reports a fault: see `SyncBatchNorm`.
            let rows = self
                .group
                .collective_primitive::<B>(TensorOp::AllGather, row.clone());
            return merge::<B>(rows.unwrap_or(row), self.channels);
        }
        let own = match own {
            None => Statistics::empty(self.channels),
            Some((own, count)) => {
                let mut mean = read::<B>(own);
                let variance = mean.split_off(self.channels);
                Statistics {
                    mean,
                    variance,
                    count: count as f64,
                }
            }
        };
        let all = own.over_ranks(self.group).unwrap_or(own);
        (self.write(&all.mean), self.write(&all.variance))
    }

    /// Two sums per channel over all ranks, divided by the total number of samples. `own` are this rank's sums, concatenated, and
    /// its number of samples, if it has any.
    pub(super) fn means(&self, own: Option<(FloatTensor<B>, usize)>) -> [FloatTensor<B>; 2] {
        if self.stays() {
            let row = self.with_count(own);
            let sums = TensorOp::AllReduce(ReduceOp::Sum);
            let all = self
                .group
                .collective_primitive::<B>(sums, row.clone())
                .unwrap_or(row);
            let part = |range| B::float_slice(all.clone(), &[Slice::from(range)]);
            let width = 2 * self.channels;
            let count = part(width..width + 1);
            let sums = [part(0..self.channels), part(self.channels..width)];
            return sums.map(|sums| B::float_div(sums, count.clone()));
        }
        let (own, count) = match own {
            None => (vec![0.0; 2 * self.channels], 0.0),
            Some((own, count)) => (read::<B>(own), count as f64),
        };
        let sums = sum_over_ranks(&own, count, self.group);
        let (sums, count) = sums.unwrap_or((own, count));
        let means: Vec<f64> = sums.iter().map(|sum| sum / count).collect();
        let (first, second) = means.split_at(self.channels);
        [first, second].map(|means| self.write(means))
    }

    /// The `2 C` numbers followed by the number of samples; all zero if there are none.
    fn with_count(&self, own: Option<(FloatTensor<B>, usize)>) -> FloatTensor<B> {
        match own {
            None => self.write(&vec![0.0; 2 * self.channels + 1]),
            Some((own, count)) => B::float_cat(vec![own, self.write(&[count as f64])], 0),
        }
    }

    fn write(&self, values: &[f64]) -> FloatTensor<B> {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        B::float_from_data(data.convert_dtype(self.dtype.into()), self.device)
    }
}

fn read<B: Backend>(tensor: FloatTensor<B>) -> Vec<f64> {
    let data = try_read_sync(B::float_into_data(tensor))
        .expect("statistics are read where waiting is possible")
        .expect("statistics can be read from the device");
    data.iter::<f64>().collect()
}

/// [`Statistics::merge`] on the device: `rows` has shape `[ranks, 2 C + 1]`.
fn merge<B: Backend>(rows: FloatTensor<B>, channels: usize) -> (FloatTensor<B>, FloatTensor<B>) {
    let columns = |range| B::float_slice(rows.clone(), &[Slice::full(), Slice::from(range)]);
    let means = columns(0..channels);
    let counts = columns(2 * channels..2 * channels + 1);
    let total = B::float_sum_dim(counts.clone(), 0);
    // If no rank has samples, all weights are 0 and nothing is normalized: the variance is -1.
    let weights = B::float_div(counts, B::float_clamp_min(total.clone(), 1.0.into()));
    let nobody = B::float_add_scalar(
        B::float_neg(B::float_clamp_max(total, 1.0.into())),
        1.0.into(),
    );

    let mean = B::float_sum_dim(B::float_mul(means.clone(), weights.clone()), 0);
    let distance = B::float_sub(means, mean.clone());
    let spread = B::float_mul(distance.clone(), distance);
    let variance = B::float_add(columns(channels..2 * channels), spread);
    let variance = B::float_sum_dim(B::float_mul(variance, weights), 0);
    let variance = B::float_sub(variance, nobody);
    let flat = |tensor| B::float_reshape(tensor, Shape::new([channels]));
    (flat(mean), flat(variance))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn_backend::ops::FloatTensorOps;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn merging_on_the_device_is_merging_on_the_host(
            batches in prop::collection::vec((0u8..4, -9.0..9.0, 0.0..4.0, -9.0..9.0, 0.0..4.0), 1..5),
        ) {
            let rows: Vec<f64> = batches
                .iter()
                .flat_map(|(count, mean, variance, other_mean, other_variance)| {
                    let has = f64::from((*count > 0) as u8);
                    [mean * has, other_mean * has, variance * has, other_variance * has, f64::from(*count)]
                })
                .collect();
            let expected = Statistics::merge(2, &rows);
            let data = TensorData::new(rows, [batches.len(), 5]);
            let (mean, variance) = merge::<Flex>(Flex::float_from_data(data, &Default::default()), 2);
            for (found, expected) in [(mean, expected.mean), (variance, expected.variance)] {
                for (found, expected) in read::<Flex>(found).iter().zip(expected) {
                    prop_assert!((found - expected).abs() < 1e-9, "{} and {}", found, expected);
                }
            }
        }
    }
}
