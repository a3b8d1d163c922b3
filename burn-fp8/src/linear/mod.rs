//! A linear layer in fp8.

mod buffer;
mod buffers;
mod cache;
mod config;
mod forward;
mod grad_amax;
mod share;
mod state;

pub use config::Fp8LinearConfig;
pub use grad_amax::GradAmaxSlot;
pub use share::share_amaxes;

use std::sync::Arc;

use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::Linear;
use burn::tensor::{Tensor, assert_shape, module::linear};

use crate::{
    Bias, Fp8Error, Fp8Scope, Microbatch,
    recipe::{AmaxReducer, Fp8Recipe},
};
use cache::WeightCache;
use state::Fp8State;

/// A linear layer whose three matrix products (forward, input gradient, weight gradient) run in fp8.
///
/// # Dtypes
/// Input and weight are cast to the recipe's forward format, and the gradient of the output to its gradient format. Sums are in
/// f32. The output has the input's dtype, and the gradient of the weight has the weight's (f32 for f32 parameters). The bias is
/// added to the sums in f32, and its gradient is summed in high precision. (For a 16-bit output, cuBLASLt takes the bias in the
/// output's dtype, so an f32 bias is rounded to that first, as in Transformer Engine.)
///
/// # Sizes
/// Any sizes work; they need not be multiples of 16. A layer runs in high precision, like Burn's own `linear` and in the weight's
/// dtype, if the input has no rows, if `d_input` or `d_output` is 0, or if fp8 is off. Kernels for tensor cores pad what they
/// read. For cuBLASLt, operands are copied and padded, unless sizes are multiples of 16 and the layout fits already.
///
/// # State
/// With delayed scaling, amax histories and scales are state of the module. A forward pass on an autodiff device updates them,
/// `into_record` and `load_record` carry them, and a run that resumes from a record continues bit for bit. A clone has its own
/// state. A pass that does not train, such as one of the copy that `valid()` makes, leaves the state as it is and uses the scales
/// that the amaxes of the last training step give, as in Transformer Engine. (With a [reducer](Self::with_amax_reducer) it uses
/// the scales of the last training pass, which the ranks agreed on.) If the input of such a pass is tracked, its gradient is
/// scaled by its own amax. Each pass counts as a step, even if the layer runs several
/// times before backward: see [`DelayedScaling`](crate::recipe::DelayedScaling).
///
/// [`fp8_autocast`](crate::fp8_autocast) switches fp8 off for a while or sets another recipe, [`calibrate`](crate::calibrate)
/// sets the scales of a model that was trained without fp8, and [`Fp8Scope`] says which passes of a step may share the cast
/// weight.
///
/// # Records
/// The record has the `weight` and `bias` of Burn's `Linear`, and `fp8.*`. To load the record of a `Linear`, load it into a
/// `Linear` and convert that, or allow a partial record. To load this record into a `Linear`, allow unused tensors. Load
/// PyTorch's weights into a `Linear` too, and convert it: `burn-store` transposes weights only for modules named `Linear`. An
/// `Fp8Linear` would get them as `[d_output, d_input]`, without an error if both are equal.
///
/// Histories are recorded with the recipe's length (see [`with_recipe`](Self::with_recipe)), and scales independently of the
/// formats. An average of a model's parameters, such as an EMA, averages this state as well: its scales lie between those of the
/// averaged steps.
///
/// # Limits
/// - An infinity is cast to the largest number of its format, and NaN stays NaN. So a layer hides an overflow of fp16 before it: the
///   gradients of input and weight are finite, and a `LossScaler` of burn-amp sees it only in the gradient of a trained bias. Prefer
///   bf16 beside fp8; with fp16, watch the scale.
/// - f64 tensors are rounded to f32 before they are cast, and their products are computed in f32. Gradients of gradients are not
///   available.
/// - Burn's `MultiDevice` strategies fork the module every step, so the replicas' amaxes are lost. Its `DistributedDataParallel` forks
///   it once: every replica scales by its own amaxes, and the model that comes back has those of the first. Use one process a device.
/// - A mapper that casts a model to f16 leaves the state in f32, but rounds it to f16 on the way. A scale or an amax that f16 cannot
///   hold stays as it was.
/// - On burn-amp's autocast devices it needs burn-amp's feature `fp8`, which registers the ops there. Without it, a forward pass panics,
///   or ends the device (`No custom-op handler registered`, in the log).
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fp8::Fp8LinearConfig;
///
/// let device = Device::flex().autodiff();
/// let layer = Fp8LinearConfig::new(16, 4).init(&device);
/// let x = Tensor::<2>::random([8, 16], Distribution::Default, &device);
/// let gradients = layer.forward(x).sum().backward();
/// assert_eq!(layer.weight.val().grad(&gradients).unwrap().dims(), [16, 4]);
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Fp8Linear {
    /// The weight, of shape `[d_input, d_output]`, in high precision.
    pub weight: Param<Tensor<2>>,
    /// The bias, of shape `[d_output]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// The state of delayed scaling; the other recipes do not use it.
    fp8: Fp8State,
    cache: WeightCache,
    #[module(skip)]
    recipe: Fp8Recipe,
    #[module(skip)]
    reducer: Option<Arc<dyn AmaxReducer>>,
}

impl Fp8Linear {
    /// Converts a linear layer. Its parameters keep their ids.
    ///
    /// # Errors
    /// See [`Fp8Recipe::validate`].
    pub fn from_linear(linear: Linear, recipe: impl Into<Fp8Recipe>) -> Result<Self, Fp8Error> {
        let recipe = recipe.into();
        let layer = Self {
            weight: linear.weight,
            bias: linear.bias,
            fp8: Fp8State::default(),
            cache: WeightCache::default(),
            recipe,
            reducer: None,
        };
        layer.with_recipe(recipe)
    }

    /// The layer without fp8, with the same parameters.
    pub fn into_linear(self) -> Linear {
        Linear {
            weight: self.weight,
            bias: self.bias,
        }
    }

    /// Shares scales over the ranks of a group, in training. With delayed scaling, the maximum of each amax over the ranks enters
    /// the histories. With current scaling, the input is scaled by the maximum of its amax over the ranks; weights have equal
    /// amaxes anyway, and each rank scales gradients by its own. Scales per row or block are not shared.
    ///
    /// Each pass makes one call, which all ranks must make together and which waits for them (see [`AmaxReducer`]). In
    /// [`calibrate`](crate::calibrate), a pass of a layer with delayed scaling makes two. [`share_amaxes`] makes one call a step
    /// for a whole model.
    #[must_use]
    pub fn with_amax_reducer(mut self, reducer: Arc<dyn AmaxReducer>) -> Self {
        self.reducer = Some(reducer);
        self
    }

    /// This layer with another recipe. With delayed scaling it continues with the histories that it has; if the new length is
    /// shorter, the newest amaxes stay. ([`Fp8Scope::with_recipe`] changes the recipe for a while, in the same way.)
    ///
    /// The histories in a record are as long as its recipe says, so a record loads only into a layer with the same
    /// `amax_history_len`. Load it first, then change the length.
    ///
    /// # Errors
    /// See [`Fp8Recipe::validate`].
    ///
    /// ```
    /// use burn::{module::Module, tensor::Device};
    /// use burn_fp8::{Fp8LinearConfig, recipe::DelayedScaling};
    ///
    /// let device = Device::flex();
    /// let short = DelayedScaling::new().with_amax_history_len(16);
    /// let config = Fp8LinearConfig::new(4, 2).with_recipe(short.into());
    /// let record = config.init(&device).into_record();
    /// let layer = config.init(&device).load_record(record);
    /// let layer = layer.with_recipe(short.with_amax_history_len(1024))?;
    /// assert_eq!(layer.scaling_state().unwrap()[0].history.len(), 1024);
    /// # Ok::<(), burn_fp8::Fp8Error>(())
    /// ```
    pub fn with_recipe(mut self, recipe: impl Into<Fp8Recipe>) -> Result<Self, Fp8Error> {
        self.recipe = recipe.into();
        self.recipe.validate()?;
        if let Fp8Recipe::Delayed(recipe) = &self.recipe {
            self.fp8.follow(recipe, &self.weight.lazy_device());
        }
        Ok(self)
    }

    /// The recipe that the layer was made with. A scope may set [another](Fp8Scope::with_recipe).
    pub fn recipe(&self) -> &Fp8Recipe {
        &self.recipe
    }

    /// For input, weight and gradient: the scale of the last training pass, the amax history (the newest amax last), and the amax
    /// that the next pass takes into the history. `None` for a layer that never had delayed scaling.
    pub fn scaling_state(&self) -> Option<[ScalingState; 3]> {
        self.fp8.snapshot()
    }

    /// Applies the layer.
    ///
    /// # Shapes
    /// - input: `[..., d_input]`
    /// - output: `[..., d_output]`, in the input's dtype
    ///
    /// # Panics
    /// If the last dimension of `input` is not `d_input`, or the [`AmaxReducer`] fails.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let weight = self.weight.val();
        let bias = self.bias.as_ref().map(Param::val);
        let [d_input, d_output] = weight.dims();
        assert_shape!(input, [.., d_input]);
        let mut dims = input.dims();
        let rows = dims[..D - 1].iter().product::<usize>();
        let scope = Fp8Scope::current();
        let recipe = scope.recipe().unwrap_or(self.recipe);
        let filled = d_input * d_output > 0;
        // Whatever this pass does: its weight may be another one than that of the passes before.
        if scope.microbatch != Microbatch::Later {
            self.cache.clear();
        }
        if scope.calibrating && !scope.enabled && filled {
            self.gather(&recipe, input.clone(), weight.clone());
        }
        if !scope.enabled || !filled {
            return in_high_precision(input, weight, bias);
        }
        let scales = self.scales(&recipe, &input, &weight);
        // Only after the scales, because the ranks whose part of the batch has rows wait for this rank's amaxes.
        if rows == 0 {
            return in_high_precision(input, weight, bias);
        }
        let input = input.reshape([rows, d_input]);
        dims[D - 1] = d_output;

        let bias = match bias {
            Some(bias) => Bias::Row(bias.into_dispatch()),
            None => Bias::None,
        };
        let output = match scales {
            Some(scales) => self.forward_scaled(&recipe, input, weight, bias, scales),
            None => self.forward_blocks(&recipe, input, weight, bias),
        };
        output.reshape(dims)
    }
}

/// Computes in the weight's dtype, because Burn's `linear` takes one dtype for all. The output has the input's dtype, as with
/// fp8.
fn in_high_precision<const D: usize>(
    input: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let [own, dtype] = [input.dtype(), weight.dtype()];
    let bias = bias.map(|bias| bias.cast(dtype));
    if input.shape().num_elements() == 0 {
        // On processors, Burn's own product reads beyond an input without rows, and is not written without terms. What the sums add
        // is nothing, but gives input and weight their gradients.
        let mut dims = input.dims();
        let [_, d_output] = weight.dims();
        dims[D - 1] = d_output;
        let zeros = Tensor::zeros(dims, (&weight.device(), dtype));
        let nothing = input.cast(dtype).sum() + weight.sum();
        let output = zeros + nothing.reshape([1; D]);
        return match bias.filter(|_| d_output > 0) {
            Some(bias) => (output + bias.unsqueeze()).cast(own),
            None => output.cast(own),
        };
    }
    linear(input.cast(dtype), weight, bias).cast(own)
}

/// The state of delayed scaling for one tensor, on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalingState {
    /// The amaxes of earlier steps: slot 0 is free, the others go from the oldest to the newest.
    pub history: Vec<f32>,
    /// The scale.
    pub scale: f32,
    /// The amax of the last step, which the next step takes into the history; 0 if there was none.
    pub amax: f32,
}

impl From<Linear> for Fp8Linear {
    /// With the default recipe: delayed scaling, e4m3 forward, e5m2 gradients.
    fn from(linear: Linear) -> Self {
        Self::from_linear(linear, Fp8Recipe::default()).expect("the default recipe is valid")
    }
}

impl From<Fp8Linear> for Linear {
    fn from(layer: Fp8Linear) -> Self {
        layer.into_linear()
    }
}

impl ModuleDisplay for Fp8Linear {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_input, d_output] = self.weight.shape().dims();
        content
            .add("d_input", &d_input)
            .add("d_output", &d_output)
            .add("bias", &self.bias.is_some())
            .add_debug_attribute("recipe", &self.recipe)
            .optional()
    }
}
