//! The methods of [`Autocast`] for fp8.

use super::{Fp8Filter, Fp8Settings};
use crate::{Autocast, Policy};
use burn_fp8::{
    Fp8Error,
    recipe::{AmaxReducer, Fp8Recipe},
};
use std::sync::Arc;

impl Autocast {
    /// Runs the linear layers in fp8 and the rest like [`bf16`](Self::bf16). The model does not change.
    ///
    /// All three products of a layer run in fp8 and accumulate in f32 (the one for the gradient of the weight does not, if the recipe
    /// has `high_precision_weight_gradient`: it runs by the [rest](Self::rest)'s policy). Input and weight are cast to the recipe's
    /// forward format (e4m3), the gradient of the output to its gradient format (e5m2 if hybrid). The output is stored in bf16, the
    /// gradient of the weight in f32. A cast is kept with its tensor, for the other products and micro-batches that need it.
    /// [`Fp8Filter`] selects the layers; [`AutocastReport::fp8_runs`](crate::AutocastReport::fp8_runs) says how many products ran
    /// in fp8.
    ///
    /// Burn 0.22 sends a layer to its device as plain matrix products. So a product counts as a linear layer if its right factor
    /// is one matrix, transposed or not, and no activation: it was not computed by a product, a convolution, an embedding or a
    /// similar op of a network. Embeddings tied to the output count as weights, and so does data that the program multiplies by,
    /// which looks the same. Keys and values of attention do not count, nor does a matrix times itself. A weight that was
    /// computed by products (orthogonal initialization, a merged LoRA) counts after its first optimizer step, or once it is
    /// loaded from a record. In backward, the products of gradients with such a layer's weight or input count. An optimizer that
    /// multiplies matrices, such as Muon with the momentum of a record, or with gradients that burn-ddp's `Ddp::new` has averaged,
    /// is best stepped in `autocast(&Policy::bf16(), ..)`.
    ///
    /// - `CurrentScaling`, `RowwiseScaling` and `BlockScaling` need no state and suit any model.
    /// - `DelayedScaling` keeps a layer's histories with its weight, and passes them on to what an optimizer's steps make of it:
    ///   sums, differences, multiples, clamps (not L-BFGS's). Histories are updated when backward reaches their layer, and not
    ///   by evaluation (provided that its inputs are dropped with it). Before the first update, and for a weight that is
    ///   computed anew in each step, a tensor is scaled by its own amax. (The update by a tensor of zeros, such as a layer that
    ///   begins at 0, leaves the scale at 1 for one step more, as in Transformer Engine.) So are the gradients of several layers
    ///   of one size on the same input, if that needs no gradient. A model's record does not contain histories:
    ///   [`AutocastDevice::fp8_state`](crate::AutocastDevice::fp8_state) returns them for a checkpoint. A clone of a model
    ///   shares the model's histories, as it shares its weights. That is right for an average of weights or the best model so
    ///   far, which are not trained. Two clones that are trained side by side need a device each: load one of them from a record
    ///   on another [lease](Self::lease).
    ///
    /// With [`Device::gradient_checkpointing`](burn::tensor::Device::gradient_checkpointing), the same products run in fp8 with
    /// the same casts, except for layers whose weights are used transposed: their gradients are computed like the rest. If a
    /// layer is used several times in a step, the history of inputs that are computed again gets the amax of the layer's last
    /// input.
    ///
    /// On devices without bf16, set another policy for the [`rest`](Self::rest).
    ///
    /// A step takes about the memory of one in bf16. Inputs, weights and gradients keep their casts beside them: a byte an element
    /// more, or two where a tensor is cast in two ways or copied transposed for tensor cores. What a norm or `gelu` made for a
    /// layer is freed once it is cast. In a data-parallel run, each rank scales inputs and gradients by its own amaxes, unless
    /// delayed scaling [shares](Self::amax_reducer) them; equal weights have equal scales.
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
        autocast.settings.fp8 = Some(Fp8Settings::new(recipe.into())?);
        Ok(autocast)
    }

    /// Sets the policy for everything that does not run in fp8, in place of [`Policy::bf16`], for example on a device without
    /// bf16. Without [`Autocast::fp8`] this changes nothing, and the log says so: pass the policy to [`new`](Self::new) then.
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
        match self.settings.fp8 {
            Some(_) => self.settings.policy = policy,
            None => for_nothing("rest"),
        }
        self
    }

    /// Selects the linear layers that run in fp8. Without [`Autocast::fp8`] none does, and the log says that the filter changes
    /// nothing.
    pub fn fp8_filter(mut self, filter: Fp8Filter) -> Self {
        match &mut self.settings.fp8 {
            Some(fp8) => fp8.filter = filter,
            None => for_nothing("fp8_filter"),
        }
        self
    }

    /// Shares the scales of `DelayedScaling` over the ranks of a data-parallel run: the histories get the largest of all ranks'
    /// amaxes. `ProcessGroup::amax_reducer` of `burn-ddp` makes such a reducer.
    ///
    /// The reducer is called on the thread on which the device runs its ops: in the first backward pass once per layer (or once per
    /// use, if the layer is used several times), after that once per backward pass, with the amaxes of all layers (or once per use
    /// of the last one). That thread waits for the other ranks, so all of them have to run the same layers in the same order, each
    /// with rows in its part of the batch. A pass without a backward, as in evaluation, makes no call.
    ///
    /// The call comes with the layer that has been the last one in backward. If a backward pass ends before it, because only a part
    /// of the model is trained, the call comes in the next forward pass or [`fp8_state`](crate::AutocastDevice::fp8_state) (once;
    /// from then on that part has a call of its own). So after the first such pass, one rank must not evaluate or save while others
    /// wait for it.
    ///
    /// The scales of the first step are each rank's own, and so are those of all steps with other recipes. If the reducer
    /// fails, or returns a tensor of another shape or device, the log says so, each rank goes on with its own amaxes, and
    /// [`AutocastDevice::fp8_state`](crate::AutocastDevice::fp8_state) is an error from then on. Without [`Autocast::fp8`] the
    /// log says that the reducer changes nothing.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
    /// use burn_amp::{Autocast, recipe::{AmaxReducer, DelayedScaling}};
    /// use std::{error::Error, sync::Arc};
    ///
    /// /// Stands for a group in which another rank saw larger numbers.
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
        match &mut self.settings.fp8 {
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
