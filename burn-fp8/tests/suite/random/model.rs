//! [`Model`]: what an [`Fp8Linear`](burn_fp8::Fp8Linear) computes by its recipe, in f64.

use burn_fp8::recipe::{AmaxCompute, DelayedScaling, Fp8Recipe};
use burn_fp8::{Fp8Cast, Fp8Format, Granularity, Microbatch, ScalingState};

use super::reference::{self, Matrix, Sum};

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

/// The delayed scaling of a tensor.
#[derive(Clone, Debug)]
struct Scaling {
    /// All amaxes so far.
    seen: Vec<f32>,
    scale: f32,
    waiting: Option<f32>,
}

impl Scaling {
    fn update(&mut self, recipe: &DelayedScaling, format: Fp8Format, due: bool) {
        let amax = self.waiting.take().unwrap_or(0.0);
        if amax == 0.0 {
            return;
        }
        self.seen.push(amax);
        let length = match recipe.amax_compute {
            AmaxCompute::Max => recipe.amax_history_len,
            AmaxCompute::MostRecent => 1,
        };
        let window = self.seen.iter().rev().take(length);
        let largest = window.copied().filter(|amax| !amax.is_nan());
        let largest = largest.fold(0f32, f32::max);
        if due && largest.is_finite() && largest > 0.0 {
            let top = format.max() * 2f32.powi(-recipe.margin);
            self.scale = (top / largest).min(f32::MAX);
        }
    }

    fn state(&self, length: usize) -> ScalingState {
        let mut history = vec![0.0; length];
        for (slot, amax) in (1..length).rev().zip(self.seen.iter().rev()) {
            history[slot] = *amax;
        }
        ScalingState {
            history,
            scale: self.scale,
            amax: self.waiting.unwrap_or(0.0),
        }
    }
}

/// What a pass keeps for backward.
#[derive(Clone, Debug)]
pub(super) enum Kept {
    /// It ran in high precision.
    Plain { input: Floats },
    Fp8 {
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

#[derive(Clone, Debug)]
pub(super) struct Model {
    recipe: Fp8Recipe,
    /// Of input, weight and gradient.
    scaling: [Scaling; 3],
    /// Since scales last changed.
    steps: usize,
    /// The weight in fp8 that later micro-batches use.
    kept: Option<Matrix>,
}

impl Model {
    pub(super) fn new(recipe: Fp8Recipe) -> Self {
        let new = || Scaling {
            seen: vec![],
            scale: 1.0,
            waiting: None,
        };
        Self {
            recipe,
            scaling: [new(), new(), new()],
            steps: 0,
            kept: None,
        }
    }

    pub(super) fn state(&self) -> Option<[ScalingState; 3]> {
        let Fp8Recipe::Delayed(recipe) = &self.recipe else {
            return None;
        };
        let length = recipe.amax_history_len;
        Some([0, 1, 2].map(|it: usize| self.scaling[it].state(length)))
    }

    /// Forgets the cast weight.
    pub(super) fn forget(&mut self) {
        self.kept = None;
    }

    fn formats(&self) -> [Fp8Format; 3] {
        let format = self.recipe.format();
        [format.forward(), format.forward(), format.gradient()]
    }

    fn cast(&self, granularity: Granularity, tensor: usize) -> Fp8Cast {
        Fp8Cast::new(granularity, self.formats()[tensor])
            .with_power_of_two(self.recipe.power_of_two())
    }

    /// Takes in the waiting amaxes.
    fn update(&mut self, interval: usize) {
        let Fp8Recipe::Delayed(recipe) = self.recipe else {
            return;
        };
        let due = interval == 1 || self.steps == 0;
        if interval > 1 && self.scaling[0].waiting.is_some_and(|amax| amax != 0.0) {
            self.steps = (self.steps + 1) % interval;
        }
        let formats = self.formats();
        for (scaling, format) in self.scaling.iter_mut().zip(formats) {
            scaling.update(&recipe, format, due);
        }
    }

    fn interval(&self) -> usize {
        match &self.recipe {
            Fp8Recipe::Delayed(recipe) => recipe.interval,
            _ => 1,
        }
    }

    /// The output, and what backward needs.
    pub(super) fn forward(
        &mut self,
        mode: Mode,
        input: &Floats,
        weight: &Floats,
        bias: Option<&[f64]>,
    ) -> (Vec<Sum>, Kept) {
        if !matches!(mode, Mode::Train(Microbatch::Later) | Mode::Evaluate) {
            self.forget();
        }
        let filled = !weight.values.is_empty();
        let delayed = matches!(self.recipe, Fp8Recipe::Delayed(_));
        if mode == Mode::Calibrate && filled && delayed {
            self.update(self.interval());
            self.scaling[0].waiting = Some(input.amax());
            self.scaling[1].waiting = Some(weight.amax());
            self.update(1);
        }
        if filled && matches!(mode, Mode::Train(_)) {
            self.update(self.interval());
        }
        if !filled || input.shape[0] == 0 || matches!(mode, Mode::Off | Mode::Calibrate) {
            let kept = Kept::Plain {
                input: input.clone(),
            };
            return (input.exact().times(&weight.exact(), bias).1, kept);
        }
        let [input_scale, weight_scale, gradient_scale] = match mode {
            Mode::Evaluate => {
                let mut next = self.clone();
                next.update(self.interval());
                next.scales()
            }
            _ => self.scales(),
        };
        let casts = self.recipe.casts();
        let cast_weight =
            |model: &Self, granularity| weight.cast(model.cast(granularity, 1), weight_scale);
        let cast_input =
            |model: &Self, granularity| input.cast(model.cast(granularity, 0), input_scale);
        // The weight of delayed scaling is kept with its scale. The others have the same scale if they are cast again.
        let mut fresh = true;
        let output_weight = match (&self.kept, mode) {
            (Some(kept), Mode::Train(Microbatch::Later)) if delayed => {
                fresh = false;
                kept.clone()
            }
            _ => cast_weight(self, casts.output[1]),
        };
        let gradient_weight = match delayed {
            true => output_weight.clone(),
            false => cast_weight(self, casts.input_gradient[1]),
        };
        if let Mode::Train(microbatch) = mode {
            if delayed {
                self.scaling[0].waiting = Some(input.amax());
                if fresh {
                    self.scaling[1].waiting = Some(weight.amax());
                }
            }
            if microbatch != Microbatch::Only {
                self.kept = Some(output_weight.clone());
            }
        }
        let output = cast_input(self, casts.output[0]).times(&output_weight, bias);
        let kept = Kept::Fp8 {
            input: cast_input(self, casts.weight_gradient[0]),
            weight: gradient_weight,
            gradient_scale,
        };
        (output.1, kept)
    }

    /// The scales of delayed scaling.
    fn scales(&self) -> [Option<f32>; 3] {
        let delayed = matches!(self.recipe, Fp8Recipe::Delayed(_));
        [0, 1, 2].map(|it: usize| delayed.then_some(self.scaling[it].scale))
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
                input,
                weight,
                gradient_scale,
            } => {
                if gradient_scale.is_some() && reaches {
                    let waiting = &mut self.scaling[2].waiting;
                    let amax = gradient.amax();
                    *waiting = Some(reference::amax([waiting.unwrap_or(0.0), amax]));
                }
                let casts = self.recipe.casts();
                let cast = |granularity| gradient.cast(self.cast(granularity, 2), *gradient_scale);
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
