//! How a layer runs under each kind of recipe.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::{Fp8Linear, GradAmaxSlot, buffers::reduce, cache::CastKey};
use crate::{
    Bias, BlockLinearSpec, Fp8Cast, Fp8Ops, Fp8Scope, Granularity, LinearSpec, Microbatch, Operand,
    functions, recipe::Fp8Recipe,
};

impl Fp8Linear {
    /// Forward with one scale per tensor.
    pub(super) fn forward_scaled(
        &self,
        recipe: &Fp8Recipe,
        input: Tensor<2>,
        weight: Tensor<2>,
        bias: Bias<Dispatch>,
        scales: Scales,
    ) -> Tensor<2> {
        let training = weight.is_autodiff();
        let device = weight.device();
        let format = recipe.format();
        let spec = LinearSpec {
            forward: format.forward(),
            gradient: format.gradient(),
            // A pass that does not train has gradients too, if its input is tracked. The history is not of these.
            current_gradient_scale: !(training && matches!(recipe, Fp8Recipe::Delayed(_))),
            power_of_two: recipe.power_of_two(),
            high_precision_weight_gradient: recipe.high_precision_weight_gradient(),
            gradient_amax: scales.gradient_amax,
        };
        let cast =
            Fp8Cast::new(Granularity::Tensor, spec.forward).with_power_of_two(spec.power_of_two);
        let (codes, weight_amax) = self.weight_codes(recipe, cast, || {
            let weight = weight.clone().without_autodiff().into_dispatch();
            match scales.weight {
                Some(scale) => {
                    let (codes, amax) =
                        Operand::cast_with(weight, scale.into_dispatch(), spec.forward);
                    (codes, Some(Tensor::from_dispatch(amax)))
                }
                None => (Operand::cast(weight, cast), None),
            }
        });
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

    /// Forward with several scales per tensor.
    pub(super) fn forward_blocks(
        &self,
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
            high_precision_weight_gradient: recipe.high_precision_weight_gradient(),
        };
        let cast = |granularity| {
            let cast = spec.forward_cast(granularity);
            let (codes, ()) = self.weight_codes(recipe, cast, || {
                let weight = weight.clone().without_autodiff().into_dispatch();
                (Operand::cast(weight, cast), ())
            });
            codes
        };
        let [_, for_output] = spec.casts.output;
        let [_, for_gradient] = spec.casts.input_gradient;
        let output_weight = cast(for_output);
        // Square blocks fit both products.
        let gradient_weight = match for_gradient == for_output || !input.is_tracked() {
            true => output_weight.clone(),
            false => cast(for_gradient),
        };
        Tensor::from_dispatch(Dispatch::fp8_linear_blocks(
            input.into_dispatch(),
            weight.into_dispatch(),
            output_weight,
            gradient_weight,
            bias,
            spec,
        ))
    }

    /// The weight in fp8: from the cache in a later micro-batch, otherwise from `make`. The second value is what else `make`
    /// found, or the default if the weight came from the cache.
    fn weight_codes<T: Default>(
        &self,
        recipe: &Fp8Recipe,
        cast: Fp8Cast,
        make: impl FnOnce() -> (Operand<Dispatch>, T),
    ) -> (Operand<Dispatch>, T) {
        let key = CastKey {
            weight: self.weight.id,
            recipe: *recipe,
            cast,
        };
        if let Some(codes) = self.cache.get(&key) {
            return (codes, T::default());
        }
        let (codes, found) = make();
        if Fp8Scope::current().microbatch != Microbatch::Only {
            self.cache.keep(key, codes.clone());
        }
        (codes, found)
    }

    /// Takes the amaxes of input and weight into the histories and scales at once.
    pub(super) fn gather<const D: usize>(
        &self,
        recipe: &Fp8Recipe,
        input: Tensor<D>,
        weight: Tensor<2>,
    ) {
        if let Fp8Recipe::Delayed(recipe) = recipe {
            let device = weight.device();
            let reducer = self.reducer.as_deref();
            let (input, weight) = (functions::amax(input), functions::amax(weight));
            self.fp8.update(recipe, &device, reducer);
            self.fp8.stage(recipe, &device, input, Some(weight));
            // Whatever the interval is, because these amaxes are there to set the scales.
            let at_once = recipe.with_interval(1);
            self.fp8.update(&at_once, &device, reducer);
        }
    }

    /// The scales of a pass; `None` for a recipe with several scales per tensor. In training, the ranks agree on them; otherwise
    /// they are those that the last step gives.
    pub(super) fn scales<const D: usize>(
        &self,
        recipe: &Fp8Recipe,
        input: &Tensor<D>,
        weight: &Tensor<2>,
    ) -> Option<Scales> {
        let training = weight.is_autodiff();
        let reducer = self.reducer.as_deref().filter(|_| training);
        match recipe {
            Fp8Recipe::Delayed(recipe) => {
                let device = weight.device();
                let [input, weight, gradient] = match training {
                    true => {
                        self.fp8.update(recipe, &device, reducer);
                        self.fp8.scales(recipe, &device)
                    }
                    // With a reducer, the waiting amaxes are this rank's alone, and only training asks the other ranks for theirs.
                    false => {
                        let updated = self.reducer.is_none();
                        self.fp8.scales_to_evaluate(recipe, &device, updated)
                    }
                };
                let gradient_amax = match training {
                    true => self.fp8.gradient_amax(),
                    false => GradAmaxSlot::default(),
                };
                Some(Scales {
                    input,
                    weight: Some(weight),
                    gradient,
                    gradient_amax,
                })
            }
            Fp8Recipe::Current(_) => {
                let amax = functions::amax(input.clone());
                let amax = match reducer {
                    Some(reducer) => reduce(reducer, amax),
                    None => amax,
                };
                let (format, power_of_two) = (recipe.format(), recipe.power_of_two());
                let input = functions::scales(amax, format.forward(), power_of_two);
                Some(Scales {
                    // Not used: the gradient's scale is computed in backward.
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

/// The scales of a pass with one scale per tensor.
pub(super) struct Scales {
    input: Tensor<1>,
    /// `None` if the scale comes from the weight's own amax, which is found when the weight is cast.
    weight: Option<Tensor<1>>,
    gradient: Tensor<1>,
    gradient_amax: GradAmaxSlot,
}
