//! [`Scaling`]: the delayed scaling of a layer, as Transformer Engine defines it.

use burn_fp8::recipe::{AmaxCompute, DelayedScaling, RecipeFormat};
use burn_fp8::{Fp8Format, ScalingState};

/// The delayed scaling of a layer.
#[derive(Clone, Debug)]
pub(super) struct Scaling {
    length: usize,
    /// Of input, weight and gradient.
    pub(super) tensors: [TensorScaling; 3],
    /// Since scales last changed.
    steps: usize,
}

#[derive(Clone, Debug)]
pub(super) struct TensorScaling {
    format: Fp8Format,
    /// The amaxes of the history, from the oldest to the newest.
    seen: Vec<f32>,
    pub(super) scale: f32,
    pub(super) waiting: Option<f32>,
}

fn formats(recipe: &DelayedScaling) -> [Fp8Format; 3] {
    let format = recipe.format;
    [format.forward(), format.forward(), format.gradient()]
}

impl Scaling {
    pub(super) fn new(recipe: &DelayedScaling) -> Self {
        let tensor = |format| TensorScaling {
            format,
            seen: vec![],
            scale: 1.0,
            waiting: None,
        };
        Self {
            length: recipe.amax_history_len,
            tensors: formats(recipe).map(tensor),
            steps: 0,
        }
    }

    /// A recipe of this length, for these formats.
    pub(super) fn recipe(&self) -> DelayedScaling {
        let format = match self.tensors[2].format {
            Fp8Format::E4M3 => RecipeFormat::E4M3,
            Fp8Format::E5M2 => RecipeFormat::Hybrid,
        };
        let recipe = DelayedScaling::new().with_amax_history_len(self.length);
        recipe.with_format(format)
    }

    /// Adapts to a recipe: of the history the newest amaxes stay, and a scale maps its amax to the end of another format.
    pub(super) fn conform(&mut self, recipe: &DelayedScaling) {
        self.length = recipe.amax_history_len;
        for (tensor, format) in self.tensors.iter_mut().zip(formats(recipe)) {
            tensor.shorten(self.length);
            let unit = format.max() / tensor.format.max();
            tensor.scale = (tensor.scale * unit).min(f32::MAX);
            tensor.format = format;
        }
    }

    /// The amaxes that wait; 0 where none does.
    pub(super) fn waiting(&self) -> Vec<f32> {
        let waiting = self.tensors.iter().map(|tensor| tensor.waiting);
        waiting.map(Option::unwrap_or_default).collect()
    }

    pub(super) fn wait(&mut self, amaxes: &[f32]) {
        for (tensor, amax) in self.tensors.iter_mut().zip(amaxes) {
            tensor.waiting = Some(*amax);
        }
    }

    /// Takes in the waiting amaxes.
    pub(super) fn update(&mut self, recipe: &DelayedScaling) {
        let DelayedScaling { interval, .. } = *recipe;
        let due = interval == 1 || self.steps == 0;
        if interval > 1 && self.waiting()[0] != 0.0 {
            self.steps = (self.steps + 1) % interval;
        }
        for tensor in &mut self.tensors {
            tensor.update(recipe, due);
            tensor.shorten(self.length);
        }
    }

    pub(super) fn state(&self) -> [ScalingState; 3] {
        let state = |tensor: &TensorScaling| {
            let mut history = vec![0.0; self.length - tensor.seen.len()];
            history.extend(&tensor.seen);
            ScalingState {
                history,
                scale: tensor.scale,
                amax: tensor.waiting.unwrap_or_default(),
            }
        };
        self.tensors.each_ref().map(state)
    }
}

impl TensorScaling {
    /// Forgets the oldest amaxes: one slot of the history is free.
    fn shorten(&mut self, length: usize) {
        let old = self.seen.len().saturating_sub(length - 1);
        self.seen.drain(..old);
    }

    fn update(&mut self, recipe: &DelayedScaling, due: bool) {
        let amax = self.waiting.take().unwrap_or_default();
        if amax == 0.0 {
            return;
        }
        self.seen.push(amax);
        let window = match recipe.amax_compute {
            AmaxCompute::Max => &self.seen[..],
            AmaxCompute::MostRecent => &[amax],
        };
        let largest = window.iter().copied().filter(|amax| !amax.is_nan());
        let largest = largest.fold(0f32, f32::max);
        if due && largest.is_finite() && largest > 0.0 {
            let top = self.format.max() * 2f32.powi(-recipe.margin);
            self.scale = (top / largest).min(f32::MAX);
        }
    }
}
