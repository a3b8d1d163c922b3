//! The tensors of delayed scaling's state.

use burn::module::ParamId;
use burn::tensor::{Bool, DType, Device, GradientCheckpointingStrategy, Tensor};

use super::buffer::Buffer;
use crate::{
    Fp8Format, functions,
    recipe::{AmaxReducer, DelayedScaling},
};

#[derive(Clone, Debug)]
pub(super) struct Buffers {
    pub(super) input: TensorScaling,
    pub(super) weight: TensorScaling,
    pub(super) gradient: TensorScaling,
    /// The number of steps since the scales last changed, modulo the interval. An interval of 1 does not touch it.
    pub(super) steps: Buffer,
    /// The autodiff strategy of the layer's device; `None` without autodiff.
    pub(super) autodiff: Option<GradientCheckpointingStrategy>,
    /// The scales by a recipe, and whether its next update is done. Only kept as long as nothing else changes.
    scales_by: Option<((DelayedScaling, bool), [Tensor<1>; 3])>,
}

#[derive(Clone, Debug)]
pub(super) struct TensorScaling {
    format: Fp8Format,
    pub(super) history: Buffer,
    pub(super) scale: Buffer,
    /// The id that records know the amax by.
    amax: ParamId,
    /// The amax that the next update takes in. `None` counts as an amax of 0, which changes nothing.
    waiting: Option<Tensor<1>>,
}

/// The maximum over the ranks.
pub(super) fn reduce(reducer: &dyn AmaxReducer, amaxes: Tensor<1>) -> Tensor<1> {
    reducer
        .max(amaxes)
        .unwrap_or_else(|error| panic!("the amaxes could not be reduced over the ranks: {error}"))
}

impl Buffers {
    pub(super) fn new(recipe: &DelayedScaling, device: &Device) -> Self {
        let autodiff = device.gradient_checkpointing_strategy();
        let device = &device.clone().without_autodiff();
        let [input, weight, gradient] = formats(recipe).map(|format| TensorScaling {
            format,
            history: Buffer::new(zeros(recipe.amax_history_len, device)),
            scale: Buffer::new(Tensor::ones([1], (device, DType::F32))),
            amax: ParamId::new(),
            waiting: None,
        });
        Self {
            input,
            weight,
            gradient,
            steps: Buffer::new(zeros(1, device)),
            autodiff,
            scales_by: None,
        }
    }

    pub(super) fn tensors(&mut self) -> [&mut TensorScaling; 3] {
        [&mut self.input, &mut self.weight, &mut self.gradient]
    }

    /// Adapts to a recipe with another history length or other formats.
    pub(super) fn conform(&mut self, recipe: &DelayedScaling) {
        let mut changed = false;
        for (tensor, format) in self.tensors().into_iter().zip(formats(recipe)) {
            changed |= tensor.conform(recipe.amax_history_len, format);
        }
        if changed {
            self.forget_scales();
        }
    }

    /// Replaces the waiting amaxes by their maximum over all ranks.
    pub(super) fn reduce(&mut self, reducer: &dyn AmaxReducer) {
        let amaxes = self.tensors().map(|tensor| tensor.amax().value);
        let reduced = reduce(reducer, Tensor::cat(amaxes.to_vec(), 0));
        for (index, tensor) in self.tensors().into_iter().enumerate() {
            tensor.wait(reduced.clone().slice(index..index + 1));
        }
    }

    /// Takes the waiting amaxes into the histories, and changes the scales if that is due.
    pub(super) fn update(&mut self, recipe: &DelayedScaling) {
        self.forget_scales();
        let due = self.count(recipe.interval);
        for tensor in self.tensors() {
            tensor.update(recipe, due.as_ref());
        }
    }

    /// The scales of input, weight and gradient.
    pub(super) fn scales(&mut self) -> [Tensor<1>; 3] {
        self.tensors().map(|tensor| tensor.scale.value.clone())
    }

    /// The scales by a recipe, before its next [`update`](Self::update) or after. They are computed once for all passes up to the
    /// next change.
    pub(super) fn scales_by(&mut self, recipe: &DelayedScaling, updated: bool) -> [Tensor<1>; 3] {
        let by = (*recipe, updated);
        if let Some((known, scales)) = &self.scales_by
            && *known == by
        {
            return scales.clone();
        }
        let mut next = self.clone();
        next.conform(recipe);
        if updated {
            next.update(recipe);
        }
        let scales = next.scales();
        self.scales_by = Some((by, scales.clone()));
        scales
    }

    /// Must be called whenever a buffer or a waiting amax changes.
    pub(super) fn forget_scales(&mut self) {
        self.scales_by = None;
    }

    /// Counts a step if the layer ran in it. Returns whether the scales may change in this step; `None` if they may in every
    /// step.
    fn count(&mut self, interval: usize) -> Option<Tensor<1, Bool>> {
        if interval == 1 {
            return None;
        }
        let steps = self.steps.value.clone();
        // Less than 1 instead of equal to 0, because an average of models has averaged its step counts.
        let due = steps.clone().lower_elem(1.0);
        // No remainder, which some GPUs find by a division that is not exact.
        let next = steps.clone() + 1.0;
        let last = next.clone().greater_equal_elem(interval as f32 - 0.5);
        let next = next.mask_fill(last, 0.0);
        let ran = self.input.amax().value.not_equal_elem(0.0);
        self.steps.value = steps.mask_where(ran, next);
        Some(due)
    }
}

impl TensorScaling {
    /// The amax that the next update takes in.
    pub(super) fn amax(&self) -> Buffer {
        let waiting = self.waiting.clone();
        Buffer {
            id: self.amax,
            value: waiting.unwrap_or_else(|| zeros(1, &self.scale.value.device())),
        }
    }

    /// Makes an amax the one that the next update takes in.
    pub(super) fn wait(&mut self, amax: Tensor<1>) {
        self.waiting = Some(amax);
    }

    /// Makes the larger of `amax` and the waiting amax the one that the next update takes in.
    pub(super) fn wait_for_largest(&mut self, amax: Tensor<1>) {
        let largest = match self.waiting.take() {
            Some(waiting) => functions::amax(Tensor::cat(vec![waiting, amax], 0)),
            None => amax,
        };
        self.wait(largest);
    }

    /// Stores a changed [`amax`](Self::amax).
    pub(super) fn put_amax(&mut self, Buffer { id, value }: Buffer) {
        self.amax = id;
        self.wait(value);
    }

    /// Takes the waiting amax into the history, and changes the scale if that is due.
    fn update(&mut self, recipe: &DelayedScaling, due: Option<&Tensor<1, Bool>>) {
        let Some(amax) = self.waiting.take() else {
            return;
        };
        let scale = self.scale.value.clone();
        let (history, new) = functions::update_scale(
            self.history.value.clone(),
            scale.clone(),
            amax,
            recipe.update(self.format),
        );
        self.history.value = history;
        self.scale.value = match due {
            Some(due) => scale.mask_where(due.clone(), new),
            None => new,
        };
    }

    /// The unit in which a scale is recorded. A record holds the scale that the tensor would have in e4m3, and so fits a recipe
    /// with other formats. Units are powers of two, so scales are restored bit for bit.
    pub(super) fn scale_unit(&self) -> f32 {
        self.format.max() / Fp8Format::E4M3.max()
    }

    /// Adapts to another history length, keeping the newest amaxes, and to another format, keeping the place of values in the
    /// format's range. Returns whether anything changed.
    fn conform(&mut self, length: usize, format: Fp8Format) -> bool {
        let history = &mut self.history.value;
        let old = history.dims()[0];
        let changed = length != old || format != self.format;
        if length > old {
            let older = zeros(length - old, &history.device());
            *history = Tensor::cat(vec![older, history.clone()], 0);
        }
        if length < old {
            let mut parts = vec![zeros(1, &history.device())];
            if length > 1 {
                parts.push(history.clone().slice(old - length + 1..old));
            }
            *history = Tensor::cat(parts, 0);
        }
        if format != self.format {
            let scale = self.scale.value.clone() * (format.max() / self.format.max());
            self.scale.value = scale.clamp_max(f32::MAX);
            self.format = format;
        }
        changed
    }
}

/// The formats of input, weight and gradient.
fn formats(recipe: &DelayedScaling) -> [Fp8Format; 3] {
    let forward = recipe.format.forward();
    [forward, forward, recipe.format.gradient()]
}

fn zeros(length: usize, device: &Device) -> Tensor<1> {
    Tensor::zeros([length], (device, DType::F32))
}
