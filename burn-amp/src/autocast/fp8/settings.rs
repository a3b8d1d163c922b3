//! What of an [`Autocast`] is about fp8.

use super::{Fp8Filter, Fp8Settings};
use crate::{Autocast, Policy};
use burn_fp8::{
    Fp8Error,
    recipe::{AmaxReducer, Fp8Recipe},
};
use std::sync::Arc;

impl Autocast {
    /// The linear layers in fp8, the rest as [`bf16`](Self::bf16). The model stays as it is.
    ///
    /// All three products of a layer run in fp8 and sum in f32: input and weight cast to the recipe's forward format
    /// (e4m3), the gradient of the output to its gradient format (e5m2 if hybrid). The output is stored in bf16, the
    /// gradient of the weight in f32. A cast is kept with its tensor, for the other products and micro-batches that need it.
    /// [`Fp8Filter`] says which layers are taken, [`AutocastReport::fp8_runs`](crate::AutocastReport::fp8_runs) how many products were.
    ///
    /// Burn 0.22 sends a layer to its device as plain matrix products. So a product counts as a linear layer if its right factor
    /// is one matrix, transposed or not, that is no activation: that did not come of a product, a convolution, an embedding or
    /// another op of a layer. Embeddings tied to the output are weights; keys and values of an attention are none, nor is a matrix
    /// times itself. So is data that the program multiplies by, which looks the same. A weight that was made by
    /// products (orthogonal initialization, a merged LoRA) is one from its first step of an optimizer, or its record, on. Backward
    /// multiplies gradients by what was such a layer's weight or input. An optimizer that multiplies matrices, such as Muon with
    /// the momentum of a record, is best stepped in `autocast(&Policy::bf16(), ..)`.
    ///
    /// - `CurrentScaling`, `RowwiseScaling` and `BlockScaling` need no state and suit any model.
    /// - `DelayedScaling` keeps a layer's histories with its weight, and with what an optimizer's steps make of that: sums,
    ///   differences, multiples, clamps (not L-BFGS's). Histories move when a backward comes to their layer, and not in evaluation
    ///   (of inputs that go with it). Before that, and of a weight that is computed anew in each step, a tensor is scaled by its own amax; so are the
    ///   gradients of several layers of one size on an input that is not trained. A model's record does not have histories:
    ///   [`AutocastDevice::fp8_state`](crate::AutocastDevice::fp8_state) gives them for a checkpoint. A clone of a model has the
    ///   model's histories, as it has its weights: right for an average of weights or the best model so far, which are not trained.
    ///   Two clones that are trained side by side want a device each: load one of them from a record on another [lease](Self::lease).
    ///
    /// With [`Device::gradient_checkpointing`](burn::tensor::Device::gradient_checkpointing) the same products run in fp8, with the same
    /// casts, but for layers whose weights are used transposed: their gradients are made as the rest is. The history of an input that
    /// is computed again has the amax of the layer's last one, where the layer is used several times in a step.
    ///
    /// On devices without bf16, give another policy for the [`rest`](Self::rest).
    ///
    /// What backward needs is kept as the program computed it, so fp8 saves no memory here. In a data-parallel run the ranks
    /// scale inputs and gradients each by their own, unless delayed scaling [shares](Self::amax_reducer) amaxes; equal weights have
    /// equal scales.
    ///
    /// # Errors
    ///
    /// For a recipe that `burn_fp8::recipe::Fp8Recipe::validate` refuses.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::{Device, Distribution, Tensor}};
    /// use burn_amp::{Autocast, recipe::CurrentScaling};
    ///
    /// let autocast = Autocast::fp8(CurrentScaling::new())?.with_report(Device::flex())?;
    /// let device = autocast.device.clone().autodiff();
    /// let linear = LinearConfig::new(32, 16).init(&device); // unmodified Burn code
    /// let x = Tensor::<2>::random([4, 32], Distribution::Default, &device);
    /// linear.forward(x).sum().backward();
    /// device.sync()?;
    /// assert_eq!(autocast.report().fp8_runs(), 2); // the output and the gradient of the weight
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fp8(recipe: impl Into<Fp8Recipe>) -> Result<Self, Fp8Error> {
        let mut autocast = Self::bf16();
        autocast.fp8 = Some(Fp8Settings::new(recipe.into())?);
        Ok(autocast)
    }

    /// The policy of all that does not run in fp8, where it is not to be [`Policy::bf16`]: on a device without bf16. Without
    /// [`Autocast::fp8`] it changes nothing, and the log says so: there [`new`](Self::new) takes the policy.
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use burn_amp::{Autocast, Policy, recipe::CurrentScaling};
    ///
    /// let autocast = Autocast::fp8(CurrentScaling::new())?.rest(Policy::fp16());
    /// let device = autocast.device(Device::flex())?; // or Device::wgpu(..)
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rest(mut self, policy: Policy) -> Self {
        match self.fp8 {
            Some(_) => self.policy = policy,
            None => for_nothing("rest"),
        }
        self
    }

    /// Which linear layers run in fp8. Without [`Autocast::fp8`] none does, and the log says that the filter is for nothing.
    pub fn fp8_filter(mut self, filter: Fp8Filter) -> Self {
        match &mut self.fp8 {
            Some(fp8) => fp8.filter = filter,
            None => for_nothing("fp8_filter"),
        }
        self
    }

    /// Share the scales of `DelayedScaling` over the ranks of a data-parallel run: the largest of all ranks' amaxes enter the
    /// histories. `burn-ddp`'s `ProcessGroup` is such a reducer; give the device a duplicate of its own.
    ///
    /// It is one call a layer and backward pass, on the thread on which the device runs its ops, which waits for the other ranks:
    /// all of them run the same layers in the same order, each with rows in its part of the batch. A pass without a backward, as
    /// in evaluation, makes no call. Scales of the first step are each rank's own, and so are
    /// those of all steps by other recipes. When the reducer fails, or answers with a tensor of another shape or device, the log
    /// says so, each rank goes on by its own amaxes, and [`AutocastDevice::fp8_state`](crate::AutocastDevice::fp8_state) is an error from then on. Without
    /// [`Autocast::fp8`] the log says that the reducer is for nothing.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
    /// use burn_amp::{Autocast, recipe::{AmaxReducer, DelayedScaling}};
    /// use std::{error::Error, sync::Arc};
    ///
    /// /// Stands for a group, another rank of which saw larger numbers.
    /// #[derive(Debug)]
    /// struct Doubled;
    ///
    /// impl AmaxReducer for Doubled {
    ///     fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
    ///         Ok(amaxes * 2.0)
    ///     }
    /// }
    ///
    /// let autocast = Autocast::fp8(DelayedScaling::new())?.amax_reducer(Arc::new(Doubled));
    /// let device = autocast.device(Device::flex())?.autodiff();
    /// let linear = LinearConfig::new(32, 16).init(&device);
    /// linear.forward(Tensor::<2>::ones([4, 32], &device)).sum().backward();
    /// # Ok::<(), Box<dyn Error>>(())
    /// ```
    pub fn amax_reducer(mut self, reducer: Arc<dyn AmaxReducer>) -> Self {
        match &mut self.fp8 {
            Some(fp8) => fp8.share(reducer),
            None => for_nothing("amax_reducer"),
        }
        self
    }
}

fn for_nothing(what: &str) {
    log::warn!(
        "Autocast::{what} changes nothing: no layer runs in fp8 here. Begin with Autocast::fp8(recipe)"
    );
}
