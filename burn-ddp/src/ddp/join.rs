//! Training with different numbers of batches on each rank.

use super::Ddp;
use crate::{DdpError, ReduceOp};

impl Ddp {
    /// Lets ranks have different numbers of batches, like PyTorch's `Join`. All ranks call this before each
    /// step, and say whether they have a batch for it. Returns the number of ranks that have one. The loop ends
    /// on all ranks together, when this is 0.
    ///
    /// A rank without a batch passes empty gradients, which count as zeros (see
    /// [`divide_by_initial_world_size`](crate::DdpConfig::divide_by_initial_world_size)), and applies the average like the
    /// others. So parameters and optimizer state stay as equal as in other steps, and nothing has to be copied at the end, unlike in
    /// PyTorch, where ranks that are done stop updating. While a rank has no batch, gradients are averaged after backward, and in
    /// the first step after that too.
    ///
    /// A rank without a batch runs no forward pass, so a model with [`SyncBatchNorm`](crate::SyncBatchNorm)
    /// needs the same number of batches on all ranks, as in PyTorch.
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, optim::{GradientsParams, SgdConfig}, tensor::{Device, Tensor}};
    /// # use burn_ddp::{Ddp, DdpConfig, ProcessGroup};
    /// # fn main() -> Result<(), burn_ddp::DdpError> {
    /// # let group = ProcessGroup::single();
    /// # let device = Device::flex().autodiff();
    /// # let mut model = LinearConfig::new(4, 1).init(&device);
    /// # let mut optimizer = SgdConfig::new().init();
    /// # let mut batches = (0..3).map(|_| Tensor::<2>::ones([2, 4], &device));
    /// let mut ddp = Ddp::new(&group, DdpConfig::new(), &model)?;
    /// loop {
    ///     let batch = batches.next();
    ///     if ddp.join(batch.is_some())? == 0 {
    ///         break;
    ///     }
    ///     let gradients = match batch {
    ///         Some(batch) => {
    ///             let loss = model.forward(batch).mean();
    ///             GradientsParams::from_grads(loss.backward(), &model)
    ///         }
    ///         None => GradientsParams::new(),
    ///     };
    ///     let gradients = ddp.reduce_gradients(gradients, &model)?;
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn join(&mut self, has_batch: bool) -> Result<usize, DdpError> {
        let mut active = [u32::from(has_batch)];
        self.group.all_reduce(&mut active, ReduceOp::Sum)?;
        let active = active[0] as usize;
        self.set_active(active);
        Ok(active)
    }

    /// The factor that averages over all ranks are multiplied by.
    pub(crate) fn factor(&self) -> f64 {
        match self.divide_by_initial_world_size {
            true => 1.0,
            false => self.group.world_size() as f64 / self.active as f64,
        }
    }

    /// Sets how many ranks have a batch for this step, if they have been counted already.
    pub(crate) fn set_active(&mut self, active: usize) {
        self.active = match active {
            // The loop has ended; the next one starts with all ranks.
            0 => self.group.world_size(),
            active => active,
        };
        self.set_synchronize(self.synchronize);
    }
}
