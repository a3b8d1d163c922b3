//! Ranks with different numbers of batches.

use super::Ddp;
use crate::{DdpError, ReduceOp};

impl Ddp {
    /// Lets ranks have different numbers of batches: PyTorch's `Join`. Called by all ranks before each
    /// step, with whether this rank has a batch for it; returns how many ranks have one. The loop ends
    /// for all ranks together, when that is 0.
    ///
    /// A rank without a batch passes on empty gradients, which count as zeros (see
    /// [`divide_by_initial_world_size`](crate::DdpConfig::divide_by_initial_world_size)), and applies the
    /// average as the others do. So parameters and the optimizer's state stay equal on all ranks, and
    /// nothing has to be copied at the end, as it has in PyTorch, where the ranks that are done stop
    /// updating. Gradients are averaged after backward while a rank has no batch.
    ///
    /// A rank without a batch runs no forward pass, so that a model with
    /// [`SyncBatchNorm`](crate::SyncBatchNorm) needs equally many batches on all ranks, as in PyTorch.
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

    /// What averages over all ranks are multiplied by.
    pub(crate) fn factor(&self) -> f64 {
        match self.divide_by_initial_world_size {
            true => 1.0,
            false => self.group.world_size() as f64 / self.active as f64,
        }
    }

    /// Says how many ranks have a batch for this step, where they have counted already.
    pub(crate) fn set_active(&mut self, active: usize) {
        self.active = match active {
            // The end of this loop: the next starts afresh.
            0 => self.group.world_size(),
            active => active,
        };
        self.set_synchronize(self.synchronize);
    }
}
