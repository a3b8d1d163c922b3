//! [`Model`]: the histories of some layers on a device of `Autocast::fp8`, and what their products are by them.

use burn::tensor::TensorData;
use burn_amp::recipe::{AmaxCompute, DelayedScaling, Fp8Recipe};
use burn_fp8::{Fp8Cast, Fp8Format, Granularity};

use super::reference::{self, Matrix, Sum};

/// The role of a tensor in a layer.
pub(super) const INPUT: usize = 0;
pub(super) const WEIGHT: usize = 1;
pub(super) const GRADIENT: usize = 2;

/// A matrix on the host.
#[derive(Clone, Debug)]
pub(super) struct Floats {
    pub(super) shape: [usize; 2],
    pub(super) values: Vec<f32>,
}

impl Floats {
    pub(super) fn of(data: TensorData) -> Self {
        Self {
            shape: data.shape().dims(),
            values: data.try_to_vec().unwrap(),
        }
    }

    pub(super) fn amax(&self) -> f32 {
        reference::amax(self.values.iter().copied())
    }

    /// The numbers that a cast gives.
    fn cast(&self, cast: Fp8Cast, scale: Option<f32>) -> Matrix {
        Matrix::of(&reference::cast(cast, scale, &self.shape, &self.values))
    }
}

/// The delayed scaling of a tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct History {
    /// From the oldest to the newest; one slot of the history is free.
    pub(super) seen: Vec<f32>,
    /// `None` before the first step.
    pub(super) scale: Option<f32>,
    steps: usize,
    /// The largest amax of a backward that may not be over.
    pending: Option<f32>,
}

impl History {
    fn learn(&mut self, amax: f32, recipe: &DelayedScaling, format: Fp8Format) {
        let scale = *self.scale.get_or_insert(1.0);
        if amax == 0.0 {
            return;
        }
        self.seen.push(amax);
        let window = match recipe.amax_compute {
            AmaxCompute::Max => &self.seen[..],
            AmaxCompute::MostRecent => &[amax],
        };
        let largest = window.iter().copied().fold(0f32, f32::max);
        if self.steps == 0 {
            self.scale = Some(scale_by(largest, recipe, format).unwrap_or(scale));
        }
        self.steps = (self.steps + 1) % recipe.interval;
        let old = self.seen.len().saturating_sub(recipe.amax_history_len - 1);
        self.seen.drain(..old);
    }

    fn end(&mut self, recipe: &DelayedScaling, format: Fp8Format) {
        if let Some(amax) = self.pending.take() {
            self.learn(amax, recipe, format);
        }
    }
}

/// The scale that an amax gives, if it gives any.
fn scale_by(amax: f32, recipe: &DelayedScaling, format: Fp8Format) -> Option<f32> {
    let top = format.max() * 2f32.powi(-recipe.margin);
    (amax > 0.0 && amax.is_finite()).then(|| (top / amax).min(f32::MAX))
}

#[derive(Clone, Debug, Default)]
struct Layer {
    histories: [History; 3],
    /// How the weight is cast.
    cast: Option<f32>,
    /// The amax of the weight, if it is cast and not learned.
    weight: Option<f32>,
    /// Whether it ran since its last backward.
    ran: bool,
}

/// A use of a layer that backward may come to.
#[derive(Clone, Debug)]
pub(super) struct Use {
    pub(super) layer: usize,
    /// Which input it has.
    pub(super) input: usize,
    pub(super) tracked: bool,
}

/// How an input was cast, by which layer.
#[derive(Clone, Debug)]
struct InputCast {
    input: usize,
    layer: usize,
    scale: f32,
    /// The amax, if it is not learned.
    amax: Option<f32>,
}

#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) recipe: Fp8Recipe,
    /// What a reducer multiplies amaxes by.
    factor: f32,
    layers: Vec<Layer>,
    /// Of inputs that backward may need.
    casts: Vec<InputCast>,
}

impl Model {
    pub(super) fn new(recipe: Fp8Recipe, layers: usize, factor: f32) -> Self {
        Self {
            recipe,
            factor,
            layers: vec![Layer::default(); layers],
            casts: vec![],
        }
    }

    fn format(&self, role: usize) -> Fp8Format {
        match role {
            GRADIENT => self.recipe.format().gradient(),
            _ => self.recipe.format().forward(),
        }
    }

    fn cast(&self, granularity: Granularity, role: usize) -> Fp8Cast {
        let cast = Fp8Cast::new(granularity, self.format(role));
        cast.with_power_of_two(self.recipe.power_of_two())
    }

    fn delayed(&self) -> Option<DelayedScaling> {
        match self.recipe {
            Fp8Recipe::Delayed(recipe) => Some(recipe),
            _ => None,
        }
    }

    /// The histories of a layer between two steps.
    pub(super) fn histories(&self, layer: usize) -> [History; 3] {
        let mut histories = self.layers[layer].histories.clone();
        if let Some(recipe) = self.delayed() {
            let format = self.format(GRADIENT);
            histories[GRADIENT].end(&recipe, format);
        }
        histories
    }

    /// The scale of a cast by a history: before the first step, by the tensor's own amax.
    fn scale(&self, layer: usize, role: usize, amax: f32, recipe: &DelayedScaling) -> f32 {
        let own = || scale_by(amax, recipe, self.format(role)).unwrap_or(1.0);
        self.layers[layer].histories[role].scale.unwrap_or_else(own)
    }

    /// The output of a use. With `kept`, backward may come to it.
    pub(super) fn forward(
        &mut self,
        it: &Use,
        x: &Floats,
        weight: &Floats,
        kept: bool,
    ) -> Vec<Sum> {
        let mut scales = [None; 2];
        if let Some(recipe) = self.delayed() {
            let known = self.casts.iter().find(|cast| cast.input == it.input);
            let input = known.map(|cast| cast.scale).filter(|_| kept);
            let input = input.unwrap_or_else(|| {
                let scale = self.scale(it.layer, INPUT, x.amax(), &recipe);
                if kept {
                    self.casts.push(InputCast {
                        input: it.input,
                        layer: it.layer,
                        scale,
                        amax: Some(x.amax()),
                    });
                }
                scale
            });
            let by = self.scale(it.layer, WEIGHT, weight.amax(), &recipe);
            let layer = &mut self.layers[it.layer];
            layer.ran |= kept;
            if layer.cast.is_none() {
                layer.weight = Some(weight.amax());
            }
            scales = [Some(input), Some(*layer.cast.get_or_insert(by))];
        }
        let [input, right] = self.recipe.casts().output;
        let input = x.cast(self.cast(input, INPUT), scales[0]);
        let weight = weight.cast(self.cast(right, WEIGHT), scales[1]);
        input.times(&weight, None).1
    }

    /// The first product of backward since a layer ran ends the backward before.
    fn in_backward(&mut self, layer: usize, recipe: &DelayedScaling) {
        let format = self.format(GRADIENT);
        let layer = &mut self.layers[layer];
        if core::mem::take(&mut layer.ran) {
            layer.histories[GRADIENT].end(recipe, format);
        }
    }

    /// Takes in what waits in a layer.
    fn learn(&mut self, layer: usize, gradient: Option<f32>, recipe: &DelayedScaling) {
        let formats = [INPUT, WEIGHT, GRADIENT].map(|role| self.format(role));
        let factor = self.factor;
        let own = self.casts.iter_mut().filter(|cast| cast.layer == layer);
        let inputs: Vec<f32> = own.filter_map(|cast| cast.amax.take()).collect();
        let layer = &mut self.layers[layer];
        if !inputs.is_empty() {
            let amax = reference::amax(inputs) * factor;
            layer.histories[INPUT].learn(amax, recipe, formats[INPUT]);
        }
        if let Some(amax) = layer.weight.take() {
            layer.histories[WEIGHT].learn(amax * factor, recipe, formats[WEIGHT]);
        }
        if let Some(amax) = gradient {
            let pending = &mut layer.histories[GRADIENT].pending;
            *pending = Some(reference::amax([pending.unwrap_or(0.0), amax * factor]));
        }
    }

    /// The gradients of input and weight. `candidates`: the layers of this size that the input is an input of.
    pub(super) fn backward(
        &mut self,
        it: &Use,
        [x, weight, gradient]: [&Floats; 3],
        candidates: &[usize],
    ) -> [Vec<Sum>; 2] {
        let mut scales = [None; 3];
        if let Some(recipe) = self.delayed() {
            let cast = self.casts.iter().find(|cast| cast.input == it.input);
            scales[INPUT] = cast.map(|cast| cast.scale);
            scales[WEIGHT] = self.layers[it.layer].cast;
            // Its other product tells whose gradient it is; otherwise, if there are several candidates, nothing does.
            let known = it.tracked || candidates.len() == 1;
            let layers = if it.tracked {
                &[it.layer][..]
            } else {
                candidates
            };
            for &layer in layers {
                self.in_backward(layer, &recipe);
            }
            scales[GRADIENT] = Some(match known {
                true => self.scale(it.layer, GRADIENT, gradient.amax(), &recipe),
                false => reference::scale(self.format(GRADIENT), gradient.amax(), false),
            });
            for &layer in layers {
                self.learn(layer, known.then(|| gradient.amax()), &recipe);
            }
        }
        let casts = self.recipe.casts();
        let [left, right] = casts.input_gradient;
        let by_gradient = gradient.cast(self.cast(left, GRADIENT), scales[GRADIENT]);
        let turned = weight.cast(self.cast(right, WEIGHT), scales[WEIGHT]);
        let for_input = by_gradient.times(&turned.transposed(), None).1;
        let [left, right] = casts.weight_gradient;
        let input = x.cast(self.cast(left, INPUT), scales[INPUT]);
        let gradient = gradient.cast(self.cast(right, GRADIENT), scales[GRADIENT]);
        let for_weight = input.transposed().times(&gradient, None).1;
        [for_input, for_weight]
    }

    /// Only these uses are left that backward may come to.
    pub(super) fn keep<'a>(&mut self, uses: impl Iterator<Item = &'a Use> + Clone) {
        self.casts
            .retain(|cast| uses.clone().any(|it| it.input == cast.input));
        for (place, layer) in self.layers.iter_mut().enumerate() {
            layer.ran &= uses.clone().any(|it| it.layer == place);
        }
    }

    /// The weight of a layer is another one.
    pub(super) fn weight_changes(&mut self, layer: usize) {
        self.layers[layer].cast = None;
        self.layers[layer].weight = None;
    }
}
