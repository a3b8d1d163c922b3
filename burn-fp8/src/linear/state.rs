//! Delayed scaling's state of a layer, as a module.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::Dispatch;
use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Param, ParamId,
};
use burn::tensor::{Bool, DType, Device, FloatDType, Tensor};

use super::{GradAmaxSlot, ScalingState};
use crate::{
    Fp8Format, Fp8Ops, functions,
    recipe::{AmaxReducer, DelayedScaling},
};

/// Histories and scales of input, weight and gradient; nothing until delayed scaling first asks for them.
///
/// A step goes: `update` takes the amaxes of the step before into the histories, the layer runs with the `scales` that
/// result, `stage` keeps the amaxes of input and weight, and backward leaves that of the gradient in the slot. A clone
/// is a copy: layers never share state by accident, as they would with Burn's `RunningState`.
#[derive(Debug, Default)]
pub(super) struct Fp8State {
    buffers: Arc<Mutex<Option<Buffers>>>,
    gradient_amax: GradAmaxSlot,
}

#[derive(Clone, Debug)]
struct Buffers {
    input: TensorScaling,
    weight: TensorScaling,
    gradient: TensorScaling,
    /// Steps since the scales last changed; it stays 0 with an interval of 1.
    steps: Buffer,
}

#[derive(Clone, Debug)]
struct TensorScaling {
    format: Fp8Format,
    history: Buffer,
    scale: Buffer,
    amax: Buffer,
}

/// A tensor of the record, never tracked.
#[derive(Clone, Debug)]
struct Buffer {
    id: ParamId,
    value: Tensor<1>,
}

impl Fp8State {
    /// With scales of 1 and empty histories.
    pub(super) fn new(recipe: &DelayedScaling, device: &Device) -> Self {
        let state = Self::default();
        state.with(recipe, device, |_| ());
        state
    }

    /// The slot that backward fills.
    pub(super) fn gradient_amax(&self) -> GradAmaxSlot {
        self.gradient_amax.clone()
    }

    /// The scales of input, weight and gradient.
    pub(super) fn scales(&self, recipe: &DelayedScaling, device: &Device) -> [Tensor<1>; 3] {
        self.with(recipe, device, |buffers| {
            buffers.tensors().map(|tensor| tensor.scale.value.clone())
        })
    }

    /// Keep the amaxes of input and weight for the next update, that of a weight only if it was cast.
    pub(super) fn stage(
        &self,
        recipe: &DelayedScaling,
        device: &Device,
        input: Tensor<1>,
        weight: Option<Tensor<1>>,
    ) {
        self.with(recipe, device, |buffers| {
            buffers.input.amax.value = input;
            if let Some(weight) = weight {
                buffers.weight.amax.value = weight;
            }
        });
    }

    /// Take the amaxes of the last step into the histories, and compute the scales.
    pub(super) fn update(
        &self,
        recipe: &DelayedScaling,
        device: &Device,
        reducer: Option<&dyn AmaxReducer>,
    ) {
        self.with(recipe, device, |buffers| {
            self.collect(buffers);
            if let Some(reducer) = reducer {
                buffers.reduce(reducer);
            }
            let due = buffers.count(recipe.interval);
            for tensor in buffers.tensors() {
                tensor.update(recipe, due.as_ref());
            }
        });
    }

    /// The state on the host.
    pub(super) fn snapshot(&self) -> Option<[ScalingState; 3]> {
        let mut guard = self.lock();
        let buffers = guard.as_mut()?;
        self.collect(buffers);
        Some(buffers.tensors().map(|tensor| {
            let values = |buffer: &Buffer| {
                buffer
                    .value
                    .to_data()
                    .try_to_vec::<f32>()
                    .expect("scaling state is f32")
            };
            ScalingState {
                history: values(&tensor.history),
                scale: values(&tensor.scale)[0],
                amax: values(&tensor.amax)[0],
            }
        }))
    }

    /// Use the buffers, as the recipe wants them.
    fn with<R>(
        &self,
        recipe: &DelayedScaling,
        device: &Device,
        run: impl FnOnce(&mut Buffers) -> R,
    ) -> R {
        let mut guard = self.lock();
        let buffers = guard.get_or_insert_with(|| Buffers::new(recipe, device));
        buffers.conform(recipe);
        run(buffers)
    }

    /// Move the gradient's amax out of the slot.
    fn collect(&self, buffers: &mut Buffers) {
        if self.gradient_amax.is_set() {
            let like = buffers.gradient.scale.value.clone().into_dispatch();
            let amax = Dispatch::fp8_gradient_amax(like, self.gradient_amax.clone(), true);
            buffers.gradient.amax.value = Tensor::from_dispatch(amax);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Buffers>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Change every buffer.
    fn map_buffers(self, mut map: impl FnMut(&[&'static str], &mut Buffer)) -> Self {
        if let Some(buffers) = self.lock().as_mut() {
            self.collect(buffers);
            for (name, tensor) in NAMES.into_iter().zip(buffers.tensors()) {
                map(&[name, "history"], &mut tensor.history);
                map(&[name, "scale"], &mut tensor.scale);
                map(&[name, AMAX], &mut tensor.amax);
            }
            map(&["steps"], &mut buffers.steps);
        }
        self
    }
}

/// The maximum over the ranks.
pub(super) fn reduce(reducer: &dyn AmaxReducer, amaxes: Tensor<1>) -> Tensor<1> {
    reducer
        .max(amaxes)
        .unwrap_or_else(|error| panic!("the amaxes could not be reduced over the ranks: {error}"))
}

const NAMES: [&str; 3] = ["input", "weight", "gradient"];
pub(super) const CONTAINER: &str = "Struct:Fp8State";
pub(super) const AMAX: &str = "amax";

impl Buffers {
    fn new(recipe: &DelayedScaling, device: &Device) -> Self {
        let [input, weight, gradient] = formats(recipe).map(|format| TensorScaling {
            format,
            history: Buffer::new(zeros(recipe.amax_history_len, device)),
            scale: Buffer::new(Tensor::ones([1], (device, DType::F32))),
            amax: Buffer::new(zeros(1, device)),
        });
        Self {
            input,
            weight,
            gradient,
            steps: Buffer::new(zeros(1, device)),
        }
    }

    fn tensors(&mut self) -> [&mut TensorScaling; 3] {
        [&mut self.input, &mut self.weight, &mut self.gradient]
    }

    /// Follow a recipe with another history length or other formats.
    fn conform(&mut self, recipe: &DelayedScaling) {
        for (tensor, format) in self.tensors().into_iter().zip(formats(recipe)) {
            tensor.conform(recipe.amax_history_len, format);
        }
    }

    /// The amaxes become the largest of all ranks'.
    fn reduce(&mut self, reducer: &dyn AmaxReducer) {
        let amaxes = self.tensors().map(|tensor| tensor.amax.value.clone());
        let reduced = reduce(reducer, Tensor::cat(amaxes.to_vec(), 0));
        for (index, tensor) in self.tensors().into_iter().enumerate() {
            tensor.amax.value = reduced.clone().slice(index..index + 1);
        }
    }

    /// Count a step in which the layer ran; returns whether the scales may change in it, `None` for always.
    fn count(&mut self, interval: usize) -> Option<Tensor<1, Bool>> {
        if interval == 1 {
            return None;
        }
        let steps = self.steps.value.clone();
        let due = steps.clone().equal_elem(0.0);
        let next = (steps.clone() + 1.0).remainder_scalar(interval as f32);
        let ran = self.input.amax.value.clone().not_equal_elem(0.0);
        self.steps.value = steps.mask_where(ran, next);
        Some(due)
    }
}

impl TensorScaling {
    /// Take the amax into the history, and change the scale if that is due.
    fn update(&mut self, recipe: &DelayedScaling, due: Option<&Tensor<1, Bool>>) {
        let scale = self.scale.value.clone();
        let zero = self.amax.value.zeros_like();
        let amax = core::mem::replace(&mut self.amax.value, zero);
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

    fn param(&self) -> Param<Tensor<1>> {
        Param::initialized(self.id, self.value.clone())
    }
}

impl Clone for Fp8State {
    fn clone(&self) -> Self {
        Self {
            buffers: Arc::new(Mutex::new(self.lock().clone())),
            gradient_amax: self.gradient_amax.deep_clone(),
        }
    }
}

impl Module for Fp8State {
    fn collect_devices(&self, mut devices: Devices) -> Devices {
        if let Some(buffers) = self.lock().as_ref() {
            let device = buffers.input.scale.value.device();
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        devices
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn to_device(self, device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        self.map_buffers(|_, buffer| {
            buffer.value = buffer.value.clone().to_device(&device);
        })
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        // The same walk as `map`, over a copy, so that a visitor may do what it likes.
        self.clone().map_buffers(|path, buffer| {
            path.iter()
                .for_each(|name| visitor.enter_module(name, CONTAINER));
            visitor.visit_float(&buffer.param());
            path.iter()
                .rev()
                .for_each(|name| visitor.exit_module(name, CONTAINER));
        });
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.map_buffers(|path, buffer| {
            path.iter()
                .for_each(|name| mapper.enter_module(name, CONTAINER));
            let (id, value, _) = mapper.map_float(buffer.param()).consume();
            // Buffers are f32 and untracked, whatever a mapper does with parameters.
            *buffer = Buffer {
                id,
                value: value.without_autodiff().cast(FloatDType::F32),
            };
            path.iter()
                .rev()
                .for_each(|name| mapper.exit_module(name, CONTAINER));
        })
    }
}

impl ModuleDisplayDefault for Fp8State {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&"Fp8State".to_string()).optional()
    }
}

impl ModuleDisplay for Fp8State {}
