//! Gathers results from all ranks, one for each item.

use super::{DistributedSampler, Uneven};
use crate::{DdpError, Element, ProcessGroup};

impl DistributedSampler {
    /// The results that all ranks computed for their items, in the order in which the items were dealt out.
    /// Results of items that padding repeated are left out, so that a metric counts nothing twice. Corresponds
    /// to Accelerate's `gather_for_metrics`. All ranks call this together, at the end of the epoch.
    ///
    /// `results` are the results of this rank, in the order of its [`indices`](Self::indices), with the same
    /// number of values for each item: for example one label, or the logits of all classes.
    ///
    /// ```
    /// use burn_ddp::{DistributedSampler, ProcessGroup};
    ///
    /// # fn main() -> Result<(), burn_ddp::DdpError> {
    /// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?
    /// let sampler = DistributedSampler::new(5, group.rank(), group.world_size());
    /// let labels: Vec<i32> = sampler.indices().iter().map(|index| *index as i32 * 10).collect();
    /// let all = sampler.gather_for_metrics(&group, &labels)?;
    /// assert_eq!(all, [0, 10, 20, 30, 40]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// A fault of the group. [`DdpError::InvalidArgument`], on all ranks, when a rank's number of results is
    /// not a multiple of its number of items, or ranks have different numbers of results for each item; also on
    /// a rank whose sampler was made for another rank, or another number of ranks, than the group's.
    pub fn gather_for_metrics<T: Element>(
        &self,
        group: &ProcessGroup,
        results: &[T],
    ) -> Result<Vec<T>, DdpError> {
        let all = group.all_gather_uneven(results)?;
        self.check_place(group)?;
        let mut width = None;
        for (rank, results) in all.iter().enumerate() {
            let items = self.share(rank).saturating_sub(self.skip);
            let even = match items {
                0 => results.is_empty(),
                items => {
                    results.len().is_multiple_of(items)
                        && *width.get_or_insert(results.len() / items) == results.len() / items
                }
            };
            if !even {
                return Err(DdpError::InvalidArgument(format!(
                    "rank {} has {} results for {items} items; expected as many for each item \
                     as the other ranks have",
                    group.number(rank),
                    results.len()
                )));
            }
        }
        let width = width.unwrap_or(0);
        let dealt = match self.uneven {
            Uneven::Pad | Uneven::Keep => self.source.len(),
            Uneven::Drop => self.share(self.rank) * self.world_size,
        };
        let mut gathered = Vec::with_capacity(dealt * width);
        for position in self.skip * self.world_size..dealt {
            let (turn, rank) = (position / self.world_size, position % self.world_size);
            let at = (turn - self.skip) * width;
            gathered.extend_from_slice(&all[rank][at..at + width]);
        }
        Ok(gathered)
    }
}
