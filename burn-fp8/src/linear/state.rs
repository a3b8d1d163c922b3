//! Delayed scaling's state of a layer, as a module.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::Dispatch;
use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Param, ParamId,
};
use burn::tensor::{DType, Device, FloatDType, Tensor};

use super::{GradAmaxSlot, ScalingState};
use crate::{
    Fp8Format, Fp8Ops, functions,
    recipe::{AmaxReducer, DelayedScaling},
};

/// Histories and scales of input, weight and gradient.
///
/// A step goes: `update` takes the amaxes of the step before into the histories, the layer runs with the `scales` that
/// result, `stage` keeps the amaxes of input and weight, and backward leaves that of the gradient in the slot. A clone
/// is a copy: layers never share state by accident, as they would with Burn's `RunningState`.
#[derive(Debug)]
pub(super) struct Fp8State {
    buffers: Arc<Mutex<Buffers>>,
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
    pub(super) fn new(recipe: &DelayedScaling, device: &Device) -> Self {
        let scaling = |format| TensorScaling {
            format,
            history: Buffer::new(Tensor::zeros(
                [recipe.amax_history_len],
                (device, DType::F32),
            )),
            scale: Buffer::new(Tensor::ones([1], (device, DType::F32))),
            amax: Buffer::new(Tensor::zeros([1], (device, DType::F32))),
        };
        Self {
            buffers: Arc::new(Mutex::new(Buffers {
                input: scaling(recipe.format.forward()),
                weight: scaling(recipe.format.forward()),
                gradient: scaling(recipe.format.gradient()),
                steps: Buffer::new(Tensor::zeros([1], (device, DType::F32))),
            })),
            gradient_amax: GradAmaxSlot::default(),
        }
    }

    /// The slot that backward fills.
    pub(super) fn gradient_amax(&self) -> GradAmaxSlot {
        self.gradient_amax.clone()
    }

    /// The scales of input, weight and gradient.
    pub(super) fn scales(&self) -> [Tensor<1>; 3] {
        let buffers = self.lock();
        [&buffers.input, &buffers.weight, &buffers.gradient]
            .map(|tensor| tensor.scale.value.clone())
    }

    /// Keep the amaxes of input and weight for the next update, that of a weight only if it was cast.
    pub(super) fn stage(&self, input: Tensor<1>, weight: Option<Tensor<1>>) {
        let mut buffers = self.lock();
        buffers.input.amax.value = input;
        if let Some(weight) = weight {
            buffers.weight.amax.value = weight;
        }
    }

    /// Take the amaxes of the last step into the histories, and compute the scales.
    pub(super) fn update(&self, recipe: &DelayedScaling, reducer: Option<&dyn AmaxReducer>) {
        let mut guard = self.lock();
        self.collect(&mut guard);
        let buffers = &mut *guard;
        let ran = buffers.input.amax.value.clone().not_equal_elem(0.0);
        let due = (recipe.interval > 1).then(|| buffers.steps.value.clone().equal_elem(0.0));
        if due.is_some() {
            let next = (buffers.steps.value.clone() + 1.0).remainder_scalar(recipe.interval as f32);
            buffers.steps.value = buffers.steps.value.clone().mask_where(ran, next);
        }
        if let Some(reducer) = reducer {
            let amaxes = buffers.tensors().map(|tensor| tensor.amax.value.clone());
            let reduced = reduce(reducer, Tensor::cat(amaxes.to_vec(), 0));
            for (index, tensor) in buffers.tensors().into_iter().enumerate() {
                tensor.amax.value = reduced.clone().slice(index..index + 1);
            }
        }
        for tensor in buffers.tensors() {
            let scale = tensor.scale.value.clone();
            let zero = tensor.amax.value.zeros_like();
            let amax = core::mem::replace(&mut tensor.amax.value, zero);
            let (history, new) = functions::update_scale(
                tensor.history.value.clone(),
                scale.clone(),
                amax,
                recipe.update(tensor.format),
            );
            tensor.history.value = history;
            tensor.scale.value = match &due {
                Some(due) => scale.mask_where(due.clone(), new),
                None => new,
            };
        }
    }

    /// The state on the host.
    pub(super) fn snapshot(&self) -> [ScalingState; 3] {
        let mut buffers = self.lock();
        self.collect(&mut buffers);
        buffers.tensors().map(|tensor| {
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
        })
    }

    /// Move the gradient's amax out of the slot.
    fn collect(&self, buffers: &mut Buffers) {
        if self.gradient_amax.is_set() {
            let like = buffers.gradient.scale.value.clone().into_dispatch();
            let amax = Dispatch::fp8_gradient_amax(like, self.gradient_amax.clone(), true);
            buffers.gradient.amax.value = Tensor::from_dispatch(amax);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Change every buffer.
    fn map_buffers(self, mut map: impl FnMut(&[&'static str], &mut Buffer)) -> Self {
        let mut guard = self.lock();
        self.collect(&mut guard);
        let buffers = &mut *guard;
        for (name, tensor) in NAMES.into_iter().zip(buffers.tensors()) {
            map(&[name, "history"], &mut tensor.history);
            map(&[name, "scale"], &mut tensor.scale);
            map(&[name, "amax"], &mut tensor.amax);
        }
        map(&["steps"], &mut buffers.steps);
        drop(guard);
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
const CONTAINER: &str = "Struct:Fp8State";

impl Buffers {
    fn tensors(&mut self) -> [&mut TensorScaling; 3] {
        [&mut self.input, &mut self.weight, &mut self.gradient]
    }
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
        let device = self.lock().input.scale.value.device();
        if !devices.contains(&device) {
            devices.push(device);
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
