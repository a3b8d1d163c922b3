//! [`Model`]: what an [`Fp8Linear`](burn_fp8::Fp8Linear) computes by its recipe, in f64.

use std::sync::Arc;

use burn_fp8::recipe::{DelayedScaling, Fp8Recipe};
use burn_fp8::{Fp8Cast, Granularity, Microbatch, ScalingState};

use super::group::Group;
use super::reference::{self, Matrix, Sum};
use super::scaling::Scaling;

/// A matrix of floats on the host.
#[derive(Clone, Debug)]
pub(super) struct Floats {
    pub(super) shape: [usize; 2],
    pub(super) values: Vec<f32>,
}

impl Floats {
    fn exact(&self) -> Matrix {
        Matrix {
            shape: self.shape.to_vec(),
            numbers: self.values.iter().copied().map(f64::from).collect(),
        }
    }

    fn amax(&self) -> f32 {
        reference::amax(self.values.iter().copied())
    }

    fn cast(&self, cast: Fp8Cast, given: Option<f32>) -> Matrix {
        Matrix::of(&reference::cast(cast, given, &self.shape, &self.values))
    }

    /// The sum of each column.
    fn sums(&self) -> Vec<Sum> {
        let [rows, columns] = self.shape;
        let column =
            |column| (0..rows).map(move |row| f64::from(self.values[row * columns + column]));
        (0..columns).map(|it| Sum::of(column(it))).collect()
    }
}

/// What a pass keeps for backward.
#[derive(Clone, Debug)]
pub(super) enum Kept {
    /// It ran in high precision.
    Plain { input: Floats },
    Fp8 {
        recipe: Fp8Recipe,
        input: Matrix,
        weight: Matrix,
        gradient_scale: Option<f32>,
    },
}

/// How a pass runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Mode {
    Train(Microbatch),
    Evaluate,
    Off,
    Calibrate,
}

/// A layer, whose recipe may change from pass to pass.
#[derive(Clone, Debug)]
pub(super) struct Model {
    /// `None` until delayed scaling first needs it.
    scaling: Option<Scaling>,
    /// The weights in fp8 that later micro-batches use, by their recipes.
    kept: Vec<(Fp8Recipe, Matrix)>,
    /// Which the layer shares its amaxes with.
    group: Option<Arc<Group>>,
}

/// A cast of input, weight or gradient.
fn cast_of(recipe: &Fp8Recipe, granularity: Granularity, tensor: usize) -> Fp8Cast {
    let format = recipe.format();
    let format = [format.forward(), format.forward(), format.gradient()][tensor];
    Fp8Cast::new(granularity, format).with_power_of_two(recipe.power_of_two())
}

impl Model {
    pub(super) fn new(recipe: &Fp8Recipe, group: Option<Arc<Group>>) -> Self {
        let mut model = Self {
            scaling: None,
            kept: vec![],
            group,
        };
        model.follow(recipe);
        model
    }

    pub(super) fn state(&self) -> Option<[ScalingState; 3]> {
        self.scaling.as_ref().map(Scaling::state)
    }

    /// A recipe for the history that a record has: of its length, and for its formats.
    pub(super) fn recorded(&self) -> Option<DelayedScaling> {
        self.scaling.as_ref().map(Scaling::recipe)
    }

    /// Forgets the cast weight.
    pub(super) fn forget(&mut self) {
        self.kept.clear();
    }

    /// Adapts to a recipe.
    pub(super) fn follow(&mut self, recipe: &Fp8Recipe) {
        if let Fp8Recipe::Delayed(recipe) = recipe {
            self.scaling(recipe);
        }
    }

    fn scaling(&mut self, recipe: &DelayedScaling) -> &mut Scaling {
        let scaling = self.scaling.get_or_insert_with(|| Scaling::new(recipe));
        scaling.conform(recipe);
        scaling
    }

    /// Replaces the waiting amaxes by what `share` makes of them.
    pub(super) fn share(&mut self, share: impl FnOnce(Vec<f32>) -> Vec<f32>) {
        self.forget();
        if let Some(scaling) = &mut self.scaling {
            scaling.wait(&share(scaling.waiting()));
        }
    }

    /// The largest amaxes of the group.
    fn reduced(&self, amaxes: Vec<f32>) -> Vec<f32> {
        let group = self.group.as_ref();
        group.map_or(amaxes.clone(), |group| {
            group.max(amaxes).expect("a rank has left")
        })
    }

    /// Takes in the waiting amaxes, those of all ranks.
    fn update(&mut self, recipe: &DelayedScaling) {
        let own = self.scaling(recipe).waiting();
        let all = self.reduced(own);
        let scaling = self.scaling(recipe);
        scaling.wait(&all);
        scaling.update(recipe);
    }

    /// The scales of input, weight and gradient that a pass has been given.
    fn scales(&mut self, recipe: &Fp8Recipe, mode: Mode, input: f32) -> [Option<f32>; 3] {
        let trains = matches!(mode, Mode::Train(_));
        match recipe {
            Fp8Recipe::Delayed(recipe) => {
                let mut next = self.clone();
                match mode {
                    Mode::Train(_) => self.update(recipe),
                    // The others are not asked.
                    _ if self.group.is_some() => {}
                    _ => next.update(recipe),
                }
                let scaling = match trains {
                    true => self.scaling(recipe),
                    false => next.scaling(recipe),
                };
                scaling.tensors.each_ref().map(|it| Some(it.scale))
            }
            Fp8Recipe::Current(recipe) if trains && self.group.is_some() => {
                let all = self.reduced(vec![input])[0];
                let format = recipe.format.forward();
                let scale = reference::scale(format, all, recipe.power_of_two);
                [Some(scale), None, None]
            }
            _ => [None; 3],
        }
    }

    /// The output, and what backward needs.
    pub(super) fn forward(
        &mut self,
        recipe: &Fp8Recipe,
        mode: Mode,
        input: &Floats,
        weight: &Floats,
        bias: Option<&[f64]>,
    ) -> (Vec<Sum>, Kept) {
        if !matches!(mode, Mode::Train(Microbatch::Later) | Mode::Evaluate) {
            self.forget();
        }
        let filled = !weight.values.is_empty();
        if let (Mode::Calibrate, true, Fp8Recipe::Delayed(recipe)) = (mode, filled, recipe) {
            self.update(recipe);
            let scaling = self.scaling(recipe);
            scaling.tensors[0].waiting = Some(input.amax());
            scaling.tensors[1].waiting = Some(weight.amax());
            self.update(&recipe.with_interval(1));
        }
        let in_fp8 = filled && matches!(mode, Mode::Train(_) | Mode::Evaluate);
        let scales = match in_fp8 {
            true => self.scales(recipe, mode, input.amax()),
            false => [None; 3],
        };
        if !in_fp8 || input.shape[0] == 0 {
            let kept = Kept::Plain {
                input: input.clone(),
            };
            return (input.exact().times(&weight.exact(), bias).1, kept);
        }
        let [input_scale, weight_scale, gradient_scale] = scales;
        let casts = recipe.casts();
        let cast_weight = |granularity| weight.cast(cast_of(recipe, granularity, 1), weight_scale);
        let cast_input = |granularity| input.cast(cast_of(recipe, granularity, 0), input_scale);
        let delayed = matches!(recipe, Fp8Recipe::Delayed(_));
        // The weight of delayed scaling is kept with its scale. The others have the same scale if they are cast again.
        let kept = self.kept.iter().find(|(of, _)| of == recipe);
        let kept = kept.filter(|_| mode == Mode::Train(Microbatch::Later));
        let kept = kept.map(|(_, kept)| kept.clone());
        let fresh = kept.is_none();
        let output_weight = kept.unwrap_or_else(|| cast_weight(casts.output[1]));
        let gradient_weight = match delayed {
            true => output_weight.clone(),
            false => cast_weight(casts.input_gradient[1]),
        };
        if let (Mode::Train(microbatch), Fp8Recipe::Delayed(delayed)) = (mode, recipe) {
            let scaling = self.scaling(delayed);
            scaling.tensors[0].waiting = Some(input.amax());
            if fresh {
                scaling.tensors[1].waiting = Some(weight.amax());
            }
            if fresh && microbatch != Microbatch::Only {
                self.kept.push((*recipe, output_weight.clone()));
            }
        }
        let output = cast_input(casts.output[0]).times(&output_weight, bias);
        let kept = Kept::Fp8 {
            recipe: *recipe,
            input: cast_input(casts.weight_gradient[0]),
            weight: gradient_weight,
            gradient_scale,
        };
        (output.1, kept)
    }

    /// The gradients of input, weight and bias. Unless input or weight has one, backward does not reach the product.
    pub(super) fn backward(
        &mut self,
        kept: &Kept,
        weight: &Floats,
        gradient: &Floats,
        reaches: bool,
    ) -> [Vec<Sum>; 3] {
        let [input_gradient, weight_gradient] = match kept {
            Kept::Plain { input } => {
                let gradient = gradient.exact();
                [
                    gradient.times(&weight.exact().transposed(), None).1,
                    input.exact().transposed().times(&gradient, None).1,
                ]
            }
            Kept::Fp8 {
                recipe,
                input,
                weight,
                gradient_scale,
            } => {
                if let (Fp8Recipe::Delayed(_), true, Some(scaling)) =
                    (recipe, reaches, &mut self.scaling)
                {
                    let waiting = &mut scaling.tensors[2].waiting;
                    let amaxes = [waiting.unwrap_or_default(), gradient.amax()];
                    *waiting = Some(reference::amax(amaxes));
                }
                let casts = recipe.casts();
                let cast =
                    |granularity| gradient.cast(cast_of(recipe, granularity, 2), *gradient_scale);
                let for_input = cast(casts.input_gradient[0]);
                let for_weight = cast(casts.weight_gradient[1]);
                [
                    for_input.times(&weight.transposed(), None).1,
                    input.transposed().times(&for_weight, None).1,
                ]
            }
        };
        [input_gradient, weight_gradient, gradient.sums()]
    }
}
