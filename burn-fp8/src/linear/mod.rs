//! A linear layer in fp8.

mod cache;
mod config;
mod grad_amax;
mod share;
mod state;

pub use config::Fp8LinearConfig;
pub use grad_amax::GradAmaxSlot;
pub use share::share_amaxes;

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::Linear;
use burn::tensor::{Tensor, assert_shape, module::linear};

use crate::{
    Bias, BlockLinearSpec, Fp8Error, Fp8Format, Fp8Ops, Fp8Scope, Fp8Tensor, LinearSpec,
    Microbatch, Operand, functions,
    recipe::{AmaxReducer, Fp8Recipe},
};
use cache::{CastWeight, WeightCache};
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
/// [`fp8_autocast`](crate::fp8_autocast) turns it off for a while or gives it another recipe,
/// [`calibrate`](crate::calibrate) sets the scales of a model that was trained without it, and [`Fp8Scope`] says which
/// passes of a step may share the cast weight.
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
    fp8: Fp8State,
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
            Fp8Recipe::Delayed(recipe) => Fp8State::new(recipe, &device),
            _ => Fp8State::default(),
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

    /// Share scales over the ranks of a group, in training: take the maximum of the amaxes that enter delayed scaling's
    /// histories, or of the input's with current scaling, whose weights have equal amaxes and whose gradients keep each
    /// rank's own, as scales per row or block do.
    ///
    /// Each pass is a call that all ranks make together, and that waits for them (see [`AmaxReducer`]); so is
    /// [`calibrate`](crate::calibrate), of layers with delayed scaling. [`share_amaxes`] makes one call a step for a model.
    #[must_use]
    pub fn with_amax_reducer(mut self, reducer: Arc<dyn AmaxReducer>) -> Self {
        self.reducer = Some(reducer);
        self
    }

    /// The recipe that the layer was made with. A scope may have [another](Fp8Scope::with_recipe).
    pub fn recipe(&self) -> &Fp8Recipe {
        &self.recipe
    }

    /// The scales of input, weight and gradient that the next step starts from, and their amax histories (the newest
    /// amax last); `None` for a layer that never had delayed scaling.
    pub fn scaling_state(&self) -> Option<[ScalingState; 3]> {
        self.fp8.snapshot()
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
        let recipe = scope.recipe().unwrap_or(self.recipe);
        let filled = d_input * d_output > 0;
        if scope.calibrating() && filled {
            self.gather(&recipe, input.clone(), weight.clone());
        }
        if !scope.enabled() || !filled {
            return linear(input, weight, bias);
        }
        let scales = self.scales(&recipe, &input, &weight);
        // Not before the scales: ranks whose part of the batch has rows wait for this one's amaxes.
        if rows == 0 {
            return linear(input, weight, bias);
        }
        let input = input.reshape([rows, d_input]);
        dims[D - 1] = d_output;

        let bias = match bias {
            Some(bias) => Bias::Row(bias.into_dispatch()),
            None => Bias::None,
        };
        let output = match scales {
            Some(scales) => self.forward_scaled(&recipe, input, weight, bias, scales),
            None => forward_blocks(&recipe, input, weight, bias),
        };
        output.reshape(dims)
    }

    /// With one scale a tensor.
    fn forward_scaled(
        &self,
        recipe: &Fp8Recipe,
        input: Tensor<2>,
        weight: Tensor<2>,
        bias: Bias<Dispatch>,
        scales: Scales,
    ) -> Tensor<2> {
        let training = weight.is_autodiff();
        let device = weight.device().without_autodiff();
        let format = recipe.format();
        let spec = LinearSpec {
            forward: format.forward(),
            gradient: format.gradient(),
            current_gradient_scale: !matches!(recipe, Fp8Recipe::Delayed(_)),
            power_of_two: recipe.power_of_two(),
            gradient_amax: scales.gradient_amax,
        };
        let weight_scale = || {
            let current = || current_scale(recipe, functions::amax(weight.clone()));
            scales.weight.unwrap_or_else(current)
        };
        let (codes, weight_amax) = self.weight_codes(&weight, weight_scale, spec.forward);
        let (output, input_amax) = Dispatch::fp8_linear(
            input.into_dispatch(),
            weight.into_dispatch(),
            codes,
            scales.input.into_dispatch(),
            scales.gradient.into_dispatch(),
            bias,
            spec,
        );
        if let (Fp8Recipe::Delayed(recipe), true) = (recipe, training) {
            let input_amax = Tensor::<1>::from_dispatch(input_amax).without_autodiff();
            self.fp8.stage(recipe, &device, input_amax, weight_amax);
        }
        Tensor::from_dispatch(output)
    }

    /// The weight in fp8, and its amax if it was cast just now.
    fn weight_codes(
        &self,
        weight: &Tensor<2>,
        scale: impl FnOnce() -> Tensor<1>,
        format: Fp8Format,
    ) -> (Operand<Dispatch>, Option<Tensor<1>>) {
        let microbatch = Fp8Scope::current().microbatch();
        if let (Microbatch::Later, Some(cast)) = (microbatch, self.cache.get()) {
            return (cast.into(), None);
        }
        let (codes, transposed, amax) =
            Fp8Tensor::quantize_with_transpose(weight.clone(), scale(), format);
        let cast = CastWeight { codes, transposed };
        let keep = microbatch != Microbatch::Only;
        self.cache.set(keep.then(|| cast.clone()));
        (cast.into(), Some(amax))
    }

    /// Take the amaxes of input and weight into the scales at once.
    fn gather<const D: usize>(&self, recipe: &Fp8Recipe, input: Tensor<D>, weight: Tensor<2>) {
        if let Fp8Recipe::Delayed(recipe) = recipe {
            let device = weight.device().without_autodiff();
            let reducer = self.reducer.as_deref();
            let (input, weight) = (functions::amax(input), functions::amax(weight));
            self.fp8.update(recipe, &device, reducer);
            self.fp8.stage(recipe, &device, input, Some(weight));
            self.fp8.update(recipe, &device, reducer);
        }
    }

    /// The scales of a pass, in training those that its ranks agree on; `None` for a recipe with many a tensor.
    fn scales<const D: usize>(
        &self,
        recipe: &Fp8Recipe,
        input: &Tensor<D>,
        weight: &Tensor<2>,
    ) -> Option<Scales> {
        let training = weight.is_autodiff();
        let reducer = self.reducer.as_deref().filter(|_| training);
        match recipe {
            Fp8Recipe::Delayed(recipe) => {
                let device = weight.device().without_autodiff();
                if training {
                    self.fp8.update(recipe, &device, reducer);
                }
                let [input, weight, gradient] = self.fp8.scales(recipe, &device);
                Some(Scales {
                    input,
                    weight: Some(weight),
                    gradient,
                    gradient_amax: self.fp8.gradient_amax(),
                })
            }
            Fp8Recipe::Current(_) => {
                let amax = functions::amax(input.clone());
                let amax = match reducer {
                    Some(reducer) => state::reduce(reducer, amax),
                    None => amax,
                };
                let input = current_scale(recipe, amax);
                Some(Scales {
                    // Not used: the gradient's is computed in backward.
                    gradient: input.clone(),
                    input,
                    weight: None,
                    gradient_amax: GradAmaxSlot::default(),
                })
            }
            Fp8Recipe::Rowwise(_) | Fp8Recipe::Block(_) => None,
        }
    }
}

/// The scales of a pass with one scale a tensor.
struct Scales {
    input: Tensor<1>,
    /// `None` where it is that of the weight's own amax, found when the weight is cast.
    weight: Option<Tensor<1>>,
    gradient: Tensor<1>,
    gradient_amax: GradAmaxSlot,
}

fn current_scale(recipe: &Fp8Recipe, amax: Tensor<1>) -> Tensor<1> {
    functions::scales(amax, recipe.format().forward(), recipe.power_of_two())
}

/// With many scales a tensor.
fn forward_blocks(
    recipe: &Fp8Recipe,
    input: Tensor<2>,
    weight: Tensor<2>,
    bias: Bias<Dispatch>,
) -> Tensor<2> {
    let format = recipe.format();
    let spec = BlockLinearSpec {
        forward: format.forward(),
        gradient: format.gradient(),
        casts: recipe.casts(),
        power_of_two: recipe.power_of_two(),
    };
    let (input, weight) = (input.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(Dispatch::fp8_linear_blocks(input, weight, bias, spec))
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
