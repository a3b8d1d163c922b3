//! The three products of a linear layer.

use super::{
    Fp8,
    history::{Histories, Known, Scaled},
    product::{self, GradientOf, InputOf, Product, WasWeight},
    ranks::Lift,
    state::LayerName,
};
use crate::autocast::nan_guard::Name;
use burn::{
    backend::{
        Backend, TensorMetadata,
        tensor::{Device, FloatTensor},
    },
    tensor::Shape,
};
use burn_fp8::{
    Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, Operand,
    recipe::{Fp8Recipe, RecipeFormat},
};
use burn_layer::{Descent, Op, Run, RunInput};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The role of a tensor in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Role {
    Input,
    Weight,
    Gradient,
}

pub(super) fn format_of(recipe: RecipeFormat, role: Role) -> Fp8Format {
    match role {
        Role::Input | Role::Weight => recipe.forward(),
        Role::Gradient => recipe.gradient(),
    }
}

/// Why a factor of a backward product has an untransposed form: such products are recognized by the transposition.
const TRANSPOSED: &str = "it is transposed";

/// The casts of a tensor, kept with it.
type Casts<B> = Vec<Made<B>>;

struct Made<B: Backend> {
    cast: Fp8Cast,
    operand: Operand<B>,
    /// How the tensor was scaled, with delayed scaling.
    scaled: Option<Scaled<B>>,
    /// Dropped with the cast. Histories hold weak references to it.
    _alive: Arc<()>,
}

/// The histories of a layer, with delayed scaling.
pub(super) type Layer<B> = Arc<Mutex<Histories<B>>>;

impl Fp8 {
    /// Computes one of the products, in the dtype that the plan stores it in.
    pub(super) fn compute<B: Backend + Fp8Ops>(
        &self,
        run: &Run<'_>,
        mut inputs: Vec<RunInput<'_, B>>,
        lift: Lift<B>,
    ) -> FloatTensor<B> {
        use Role::{Gradient, Input, Weight};
        let casts = self.settings.recipe.casts();
        let dtype = run.store().expect("the plan says what is stored").into();
        let bias = match inputs.len() {
            3 => Bias::Row(inputs.remove(2).tensor()),
            _ => Bias::None,
        };
        let [first, second] = <[_; 2]>::try_from(inputs).expect("a product has two factors");
        let [left, right] = [&first, &second].map(|input| input.shape());
        let (product, size) = product::of(run.op(), run.inputs()).expect("fp8 takes products only");
        // Whether both factors are batches of matrices.
        let batch =
            run.op() == Op::float_matmul && !product::is_matrix(&right) && !run.sums_batch();
        let (output, shape) = match product {
            Product::Output => {
                let [input, weight] = casts.output;
                let descent = descent(&second);
                let layer = self.layer(run, size, &second.device(), &descent);
                second.kept.with(|WasWeight(was)| *was = true);
                first.kept.with(|InputOf(layers, alive)| {
                    if let Some(layer) = &layer {
                        layer.lock().in_forward(alive);
                    }
                    // Forgets layers of this size whose weights are gone.
                    layers.retain(|(of, weight)| *of != size || weight.upgrade().is_some());
                    let layer = (size, descent.downgrade());
                    if !layers.contains(&layer) {
                        layers.push(layer);
                    }
                });
                let input = self.cast(first, Input, input, &layer, false, lift);
                let weight = self.cast(second, Weight, weight, &layer, false, lift);
                let output = input.matmul_fast(weight, bias, dtype);
                (output, with_last(left, size[1]))
            }
            Product::InputGradient => {
                let (weight, gradient) = match run.op() {
                    Op::linear_x_backward => (first, second),
                    _ => (second.untransposed().expect(TRANSPOSED), first),
                };
                let shape = with_last(gradient.shape(), size[0]);
                let [left, right] = casts.input_gradient;
                let descent = weight.kept.descent();
                let layer = self.layer(run, size, &weight.device(), &descent);
                gradient.kept.with(|GradientOf(layer)| {
                    *layer = Some((size, descent.downgrade()));
                });
                self.in_backward(&layer, lift);
                let gradient = self.cast(gradient, Gradient, left, &layer, false, lift);
                let weight = self.cast(weight, Weight, right, &layer, false, lift);
                self.learn(&layer, lift);
                (gradient.matmul(weight.transpose(), bias, dtype), shape)
            }
            Product::WeightGradient => {
                let (input, shape) = match run.op() {
                    Op::linear_weight_backward => (first, Shape::new(size)),
                    _ if run.sums_batch() => {
                        (first.untransposed().expect(TRANSPOSED), Shape::new(size))
                    }
                    _ => (
                        first.untransposed().expect(TRANSPOSED),
                        with_last(left, size[1]),
                    ),
                };
                let [left, right] = casts.weight_gradient;
                let device = input.device();
                let told = second.kept.with(|GradientOf(layer)| layer.take());
                let told = told.filter(|(of, _)| *of == size);
                let (weights, is_new): (Vec<_>, _) = input.kept.with(|InputOf(layers, _)| {
                    // If `told` is one of these layers, its other product has learned already. It may be another one, because a
                    // gradient may belong to two layers whose outputs are added.
                    let known = told.as_ref().is_some_and(|layer| layers.contains(layer));
                    let of_size = layers.iter().filter(|(of, _)| *of == size && !known);
                    let weights = of_size.filter_map(|(_, weight)| weight.upgrade());
                    (weights.collect(), layers.is_empty())
                });
                if let Some(weight) = told.and_then(|(_, it)| it.upgrade()) {
                    let layer = self.layer(run, size, &device, &weight);
                    needs_input(&layer, !is_new);
                    if is_new {
                        self.cast_again(&input, left, &layer);
                    }
                }
                let layers = weights.iter();
                let layers = layers.filter_map(|weight| self.layer(run, size, &device, weight));
                let layers: Vec<_> = layers.collect();
                needs_input(&layers, true);
                self.in_backward(&layers, lift);
                // If there are several layers, the gradient does not tell which one it belongs to, and is cast by its own amax.
                let layer = layers.first().filter(|_| layers.len() == 1).cloned();
                let input = self.cast(input, Input, left, &layer, batch, lift);
                let gradient = self.cast(second, Gradient, right, &layer, batch, lift);
                self.learn(&layers, lift);
                (input.transpose().matmul(gradient, bias, dtype), shape)
            }
        };
        B::float_reshape(output, shape)
    }

    /// The histories of the layer whose weight has this descent. `None` without delayed scaling.
    fn layer<B: Backend + Fp8Ops>(
        &self,
        run: &Run<'_>,
        size: [usize; 2],
        device: &Device<B>,
        weight: &Descent,
    ) -> Option<Layer<B>> {
        let Fp8Recipe::Delayed(recipe) = &self.settings.recipe else {
            return None;
        };
        let first = || {
            let names = run.scopes::<Name>();
            let names = names.into_iter().map(|name| name.0.clone()).collect();
            self.registry
                .lock()
                .enter(LayerName { names, size }, recipe, device)
        };
        weight.with(|Known(histories)| Some(histories.get_or_insert_with(first).clone()))
    }

    /// Called when one of the products of these layers' backward is about to run.
    fn in_backward<'a, B: Backend + Fp8Ops>(
        &self,
        layers: impl IntoIterator<Item = &'a Layer<B>>,
        lift: Lift<B>,
    ) {
        let Fp8Recipe::Delayed(recipe) = &self.settings.recipe else {
            return;
        };
        for layer in layers {
            if self.shares() && layer.lock().begins_backward() {
                self.round(lift).before_backward(layer, self);
            }
            layer.lock().in_backward(recipe);
        }
    }

    /// Adds the amaxes that wait in the layers to their histories. Called in backward, which shows that there is a step:
    /// evaluation has no backward.
    fn learn<'a, B: Backend + Fp8Ops>(
        &self,
        layers: impl IntoIterator<Item = &'a Layer<B>>,
        lift: Lift<B>,
    ) {
        let Fp8Recipe::Delayed(recipe) = &self.settings.recipe else {
            return;
        };
        for layer in layers {
            let amaxes = layer.lock().waiting();
            match self.shares() {
                true => self.round(lift).add(layer, amaxes, self),
                false => layer.lock().learn(amaxes, recipe),
            }
        }
    }

    /// The tensor in fp8, from an earlier cast if there is one: as a matrix, or in its own shape if the product is one of a
    /// `batch`. With delayed scaling, the scale comes from the histories of the `layer`, if that is known.
    fn cast<B: Backend + Fp8Ops>(
        &self,
        input: RunInput<'_, B>,
        role: Role,
        granularity: Granularity,
        layer: &Option<Layer<B>>,
        batch: bool,
        lift: Lift<B>,
    ) -> Operand<B> {
        let recipe = &self.settings.recipe;
        let format = format_of(recipe.format(), role);
        let cast = self.fp8_cast(granularity, format);
        if batch && granularity != Granularity::Tensor {
            return Operand::cast(input.tensor(), cast);
        }
        let shape = input.shape();
        let operand = input.kept.with(|casts: &mut Casts<B>| {
            let place = match casts.iter().position(|made| made.cast == cast) {
                Some(place) => place,
                None => {
                    let matrix = as_matrix::<B>(input.tensor());
                    let alive = Arc::new(());
                    let (operand, scaled) = match (recipe, layer) {
                        (Fp8Recipe::Delayed(recipe), Some(layer)) => {
                            if self.shares() && role != Role::Gradient {
                                self.round(lift).end(self);
                            }
                            let (operand, scaled) = layer.lock().cast(matrix, recipe, role, &alive);
                            (operand, Some(scaled))
                        }
                        _ => (Operand::cast(matrix, cast), None),
                    };
                    casts.push(Made {
                        cast,
                        operand,
                        scaled,
                        _alive: alive,
                    });
                    casts.len() - 1
                }
            };
            let made = &casts[place];
            if let (Role::Input, Some(layer)) = (role, layer) {
                layer.lock().input = made.scaled.clone();
            }
            made.operand.clone()
        });
        match batch {
            true => operand.reshape(shape),
            false => operand,
        }
    }

    /// With delayed scaling: casts a layer's input, which gradient checkpointing has computed again, by the scale that it was
    /// cast by in forward.
    fn cast_again<B: Backend + Fp8Ops>(
        &self,
        input: &RunInput<'_, B>,
        granularity: Granularity,
        layer: &Option<Layer<B>>,
    ) {
        let (Fp8Recipe::Delayed(recipe), Some(layer)) = (&self.settings.recipe, layer) else {
            return;
        };
        input.kept.with(|casts: &mut Casts<B>| {
            if !casts.is_empty() {
                return;
            }
            let matrix = as_matrix::<B>(input.tensor());
            let operand = layer.lock().cast_input_again(matrix, recipe);
            let format = format_of(recipe.format, Role::Input);
            casts.extend(operand.map(|operand| Made {
                cast: self.fp8_cast(granularity, format),
                operand,
                scaled: None,
                _alive: Arc::default(),
            }));
        });
    }

    fn fp8_cast(&self, granularity: Granularity, format: Fp8Format) -> Fp8Cast {
        let power_of_two = self.settings.recipe.power_of_two();
        Fp8Cast::new(granularity, format).with_power_of_two(power_of_two)
    }
}

/// The [`Descent`] of a weight, which lasts over all steps. A parameter that is used both as it is and transposed counts as the
/// weights of two layers.
fn descent<B: Backend>(weight: &RunInput<'_, B>) -> Descent {
    weight.kept.descent_or(|| match &weight.transposed {
        Some(parameter) => parameter.descent().with(|Turned(turned)| turned.clone()),
        None => Descent::default(),
    })
}

/// The [`Descent`] of a parameter's transposition, which is kept in the parameter's own.
#[derive(Default)]
struct Turned(Descent);

/// Called when the gradient of these layers' weights is about to be computed: from the inputs of forward, or from others, which
/// gradient checkpointing has computed again.
fn needs_input<'a, B: Backend + Fp8Ops>(
    layers: impl IntoIterator<Item = &'a Layer<B>>,
    needs: bool,
) {
    for layer in layers {
        layer.lock().needs_input = needs;
    }
}

/// The tensor as a matrix, whose rows are those of all leading dimensions.
fn as_matrix<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let columns = shape[shape.num_dims() - 1];
    match shape.num_dims() {
        2 => tensor,
        _ => B::float_reshape(
            tensor,
            Shape::new([shape.num_elements() / columns, columns]),
        ),
    }
}

fn with_last(mut shape: Shape, last: usize) -> Shape {
    let rank = shape.num_dims();
    shape[rank - 1] = last;
    shape
}
