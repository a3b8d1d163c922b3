//! The tensors of delayed scaling's state.

use burn::module::{Param, ParamId};
use burn::tensor::{Bool, DType, Device, Tensor};

use crate::{
    Fp8Format, functions,
    recipe::{AmaxReducer, DelayedScaling},
};

#[derive(Clone, Debug)]
pub(super) struct Buffers {
    pub(super) input: TensorScaling,
    pub(super) weight: TensorScaling,
    pub(super) gradient: TensorScaling,
    /// Steps since the scales last changed; it stays 0 with an interval of 1.
    pub(super) steps: Buffer,
}

#[derive(Clone, Debug)]
pub(super) struct TensorScaling {
    format: Fp8Format,
    pub(super) history: Buffer,
    pub(super) scale: Buffer,
    /// By what a record knows the amax.
    amax: ParamId,
    /// What the next update takes in; nothing is an amax of 0, which changes nothing.
    waiting: Option<Tensor<1>>,
}

/// A tensor of the record, never tracked.
#[derive(Clone, Debug)]
pub(super) struct Buffer {
    pub(super) id: ParamId,
    pub(super) value: Tensor<1>,
}

/// The maximum over the ranks.
pub(super) fn reduce(reducer: &dyn AmaxReducer, amaxes: Tensor<1>) -> Tensor<1> {
    reducer
        .max(amaxes)
        .unwrap_or_else(|error| panic!("the amaxes could not be reduced over the ranks: {error}"))
}

impl Buffers {
    pub(super) fn new(recipe: &DelayedScaling, device: &Device) -> Self {
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
        }
    }

    pub(super) fn tensors(&mut self) -> [&mut TensorScaling; 3] {
        [&mut self.input, &mut self.weight, &mut self.gradient]
    }

    /// Follow a recipe with another history length or other formats.
    pub(super) fn conform(&mut self, recipe: &DelayedScaling) {
        for (tensor, format) in self.tensors().into_iter().zip(formats(recipe)) {
            tensor.conform(recipe.amax_history_len, format);
        }
    }

    /// The amaxes become the largest of all ranks'.
    pub(super) fn reduce(&mut self, reducer: &dyn AmaxReducer) {
        let amaxes = self.tensors().map(|tensor| tensor.amax().value);
        let reduced = reduce(reducer, Tensor::cat(amaxes.to_vec(), 0));
        for (index, tensor) in self.tensors().into_iter().enumerate() {
            tensor.wait(reduced.clone().slice(index..index + 1));
        }
    }

    /// Count a step in which the layer ran; returns whether the scales may change in it, `None` for always.
    pub(super) fn count(&mut self, interval: usize) -> Option<Tensor<1, Bool>> {
        if interval == 1 {
            return None;
        }
        let steps = self.steps.value.clone();
        // Less than 1, as a model's average has averaged steps.
        let due = steps.clone().lower_elem(1.0);
        let next = (steps.clone() + 1.0).remainder_scalar(interval as f32);
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

    /// Have the next update take in an amax.
    pub(super) fn wait(&mut self, amax: Tensor<1>) {
        self.waiting = Some(amax);
    }

    /// Put what was made of [`amax`](Self::amax) in its place.
    pub(super) fn put_amax(&mut self, Buffer { id, value }: Buffer) {
        self.amax = id;
        self.wait(value);
    }

    /// Take the amax into the history, and change the scale if that is due.
    pub(super) fn update(&mut self, recipe: &DelayedScaling, due: Option<&Tensor<1, Bool>>) {
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

    /// What a scale is recorded in: a record says what it would be in e4m3, and so fits a recipe of other formats. The
    /// units are powers of two, so that scales come back bit for bit.
    pub(super) fn scale_unit(&self) -> f32 {
        self.format.max() / Fp8Format::E4M3.max()
    }

    /// The newest amaxes stay in a history of another length, and values stay where they were in the range of
    /// another format.
    fn conform(&mut self, length: usize, format: Fp8Format) {
        let history = &mut self.history.value;
        let old = history.dims()[0];
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

impl Buffer {
    fn new(value: Tensor<1>) -> Self {
        Self {
            id: ParamId::new(),
            value,
        }
    }

    /// As a parameter whose record is in units of `unit`.
    pub(super) fn param(&self, unit: f32) -> Param<Tensor<1>> {
        let param = Param::initialized(self.id, self.value.clone());
        match unit == 1.0 {
            true => param,
            false => param
                .save_mapper(move |value| value / unit)
                .load_mapper(move |value| (value * unit).clamp_max(f32::MAX)),
        }
    }
}
