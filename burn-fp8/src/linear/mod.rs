//! A linear layer in fp8.

mod cache;
mod config;
mod grad_amax;
mod state;

pub use config::Fp8LinearConfig;
pub use grad_amax::GradAmaxSlot;

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::Linear;
use burn::tensor::{Tensor, assert_shape, module::linear};

use crate::{
    Bias, BlockLinearSpec, Fp8Error, Fp8Format, Fp8Ops, Fp8Scope, Fp8Tensor, LinearSpec,
    Microbatch, functions,
    recipe::{AmaxReducer, Fp8Recipe, LinearCasts},
};
use cache::WeightCache;
use state::Fp8State;

/// A linear layer whose three matrix products (forward, input gradient, weight gradient) run in fp8.
///
/// Input and weight are cast to the recipe's forward format, the gradient of the output to its gradient format; sums
/// are in f32; the output has the input's dtype and the weight gradient the weight's (f32 for f32 parameters). The
/// bias and its gradient stay in high precision. Sizes need not be multiples of 16. An input without rows is passed
/// to Burn's own `linear`.
///
/// With delayed scaling, amax histories and scales are state of the module: a forward pass on an autodiff device
/// updates them, `into_record` and `load_record` carry them, and a run that is resumed from a record continues bit for
/// bit. A clone has its own state. `valid()` makes a copy that keeps its scales as they are.
///
/// [`fp8_autocast`](crate::fp8_autocast) turns it off for a while, [`calibrate`](crate::calibrate) sets the scales of a model
/// that was trained without it, and [`Fp8Scope`] says which passes of a step may share the cast weight.
///
/// The record has the `weight` and `bias` of Burn's `Linear`, and `fp8.*` besides; to load the record of a `Linear`,
/// load it there and convert, or allow a partial record.
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
    /// Matrix of shape `[d_input, d_output]`, in high precision.
    pub weight: Param<Tensor<2>>,
    /// Vector of size `d_output`.
    pub bias: Option<Param<Tensor<1>>>,
    /// Delayed scaling's state; the other recipes have none.
    fp8: Option<Fp8State>,
    cache: WeightCache,
    #[module(skip)]
    recipe: Fp8Recipe,
    #[module(skip)]
    reducer: Option<Arc<dyn AmaxReducer>>,
}

impl Fp8Linear {
    /// Wrap a linear layer. Its parameters keep their ids.
    ///
    /// # Errors
    /// See [`Fp8Recipe::validate`].
    pub fn from_linear(linear: Linear, recipe: impl Into<Fp8Recipe>) -> Result<Self, Fp8Error> {
        let recipe = recipe.into();
        recipe.validate()?;
        let device = linear.weight.lazy_device().without_autodiff();
        let fp8 = match &recipe {
            Fp8Recipe::Delayed(recipe) => Some(Fp8State::new(recipe, &device)),
            _ => None,
        };
        Ok(Self {
            weight: linear.weight,
            bias: linear.bias,
            fp8,
            cache: WeightCache::default(),
            recipe,
            reducer: None,
        })
    }

    /// The layer without fp8, with the same parameters.
    pub fn into_linear(self) -> Linear {
        Linear {
            weight: self.weight,
            bias: self.bias,
        }
    }

    /// Take the maximum of all amaxes over the ranks of a group: those of delayed scaling's history, or those of input and
    /// weight with current scaling. Scales per row or block are each rank's own.
    #[must_use]
    pub fn with_amax_reducer(mut self, reducer: Arc<dyn AmaxReducer>) -> Self {
        self.reducer = Some(reducer);
        self
    }

    /// The recipe.
    pub fn recipe(&self) -> &Fp8Recipe {
        &self.recipe
    }

    /// The scales of input, weight and gradient that the next step starts from, and their amax histories (the newest
    /// amax last); `None` for a recipe without state.
    pub fn scaling_state(&self) -> Option<[ScalingState; 3]> {
        self.fp8.as_ref().map(Fp8State::snapshot)
    }

    /// Apply the layer.
    ///
    /// # Shapes
    /// - input: `[..., d_input]`
    /// - output: `[..., d_output]`, in the input's dtype
    ///
    /// # Panics
    /// Where the last dimension of `input` is not `d_input`, or the [`AmaxReducer`] fails.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let weight = self.weight.val();
        let bias = self.bias.as_ref().map(Param::val);
        let [d_input, d_output] = weight.dims();
        assert_shape!(input, [.., d_input]);
        let mut dims = input.dims();
        let rows = dims[..D - 1].iter().product::<usize>();
        let scope = Fp8Scope::current();
        if scope.calibrating() && rows * d_input * d_output > 0 {
            self.gather(input.clone(), weight.clone());
        }
        if !scope.enabled() || rows * d_input * d_output == 0 {
            return linear(input, weight, bias);
        }
        let input = input.reshape([rows, d_input]);
        dims[D - 1] = d_output;

        let bias = match bias {
            Some(bias) => Bias::Row(bias.into_dispatch()),
            None => Bias::None,
        };
        let output = match self.recipe.casts() {
            LinearCasts::TENSOR => self.forward_scaled(input, weight, bias),
            casts => self.forward_blocks(input, weight, bias, casts),
        };
        output.reshape(dims)
    }

    /// With many scales a tensor.
    fn forward_blocks(
        &self,
        input: Tensor<2>,
        weight: Tensor<2>,
        bias: Bias<Dispatch>,
        casts: LinearCasts,
    ) -> Tensor<2> {
        let format = self.recipe.format();
        let spec = BlockLinearSpec {
            forward: format.forward(),
            gradient: format.gradient(),
            casts,
            power_of_two: self.recipe.power_of_two(),
        };
        let (input, weight) = (input.into_dispatch(), weight.into_dispatch());
        Tensor::from_dispatch(Dispatch::fp8_linear_blocks(input, weight, bias, spec))
    }

    /// With one scale a tensor.
    fn forward_scaled(
        &self,
        input: Tensor<2>,
        weight: Tensor<2>,
        bias: Bias<Dispatch>,
    ) -> Tensor<2> {
        let training = weight.is_autodiff();
        let (scales, slot) = self.scales(&input, &weight, training);
        let format = self.recipe.format();
        let spec = LinearSpec {
            forward: format.forward(),
            gradient: format.gradient(),
            current_gradient_scale: self.fp8.is_none(),
            power_of_two: self.recipe.power_of_two(),
            gradient_amax: slot,
        };
        let [input_scale, weight_scale, gradient_scale] = scales;
        let (codes, weight_amax) = self.weight_codes(&weight, weight_scale, spec.forward);
        let (output, input_amax) = Dispatch::fp8_linear(
            input.into_dispatch(),
            weight.into_dispatch(),
            codes.codes().into_dispatch(),
            input_scale.into_dispatch(),
            codes.scale().reshape([1]).into_dispatch(),
            gradient_scale.into_dispatch(),
            bias,
            spec,
        );
        if let (Some(state), true) = (&self.fp8, training) {
            let input_amax = Tensor::<1>::from_dispatch(input_amax).without_autodiff();
            state.stage(input_amax, weight_amax);
        }
        Tensor::from_dispatch(output)
    }

    /// The weight in fp8, and its amax if it was cast just now.
    fn weight_codes(
        &self,
        weight: &Tensor<2>,
        scale: Tensor<1>,
        format: Fp8Format,
    ) -> (Fp8Tensor<2>, Option<Tensor<1>>) {
        let microbatch = Fp8Scope::current().microbatch();
        if let (Microbatch::Later, Some(codes)) = (microbatch, self.cache.get()) {
            return (codes, None);
        }
        let (codes, amax) = Fp8Tensor::quantize_with_device_scale(weight.clone(), scale, format);
        let keep = microbatch != Microbatch::Only;
        self.cache.set(keep.then(|| codes.clone()));
        (codes, Some(amax))
    }

    /// Take the amaxes of input and weight into the scales at once.
    fn gather<const D: usize>(&self, input: Tensor<D>, weight: Tensor<2>) {
        if let (Fp8Recipe::Delayed(recipe), Some(state)) = (&self.recipe, &self.fp8) {
            state.update(recipe, self.reducer.as_deref());
            state.stage(functions::amax(input), Some(functions::amax(weight)));
            state.update(recipe, self.reducer.as_deref());
        }
    }

    /// The scales of input, weight and gradient, and the slot for the gradient's amax.
    fn scales(
        &self,
        input: &Tensor<2>,
        weight: &Tensor<2>,
        training: bool,
    ) -> ([Tensor<1>; 3], GradAmaxSlot) {
        match (&self.recipe, &self.fp8) {
            (Fp8Recipe::Delayed(recipe), Some(state)) => {
                if training {
                    state.update(recipe, self.reducer.as_deref());
                }
                (state.scales(), state.gradient_amax())
            }
            _ => {
                let forward = self.recipe.format().forward();
                let input = self.current_scale(input, forward);
                let weight = self.current_scale(weight, forward);
                // The gradient's is computed in backward.
                ([input, weight.clone(), weight], GradAmaxSlot::default())
            }
        }
    }

    fn current_scale(&self, tensor: &Tensor<2>, format: Fp8Format) -> Tensor<1> {
        let amax = functions::amax(tensor.clone());
        let amax = match &self.reducer {
            Some(reducer) => state::reduce(reducer.as_ref(), amax),
            None => amax,
        };
        functions::scales(amax, format, self.recipe.power_of_two())
    }
}

/// Delayed scaling's state of one tensor, on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalingState {
    /// The amaxes of earlier steps: slot 0 is free, then from the oldest to the newest.
    pub history: Vec<f32>,
    /// The scale.
    pub scale: f32,
    /// The amax of the last step, which the next one takes into the history; 0 if there was none.
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
