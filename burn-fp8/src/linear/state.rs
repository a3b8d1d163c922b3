//! The state of a layer's delayed scaling, as a module.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::{Device, GradientCheckpointingStrategy, Tensor};
use parking_lot::Mutex;

use super::{GradAmaxSlot, ScalingState, buffer::Buffer, buffers::Buffers};
use crate::{
    Fp8Ops,
    recipe::{AmaxReducer, DelayedScaling},
};

/// Histories and scales of input, weight and gradient. Empty until delayed scaling first uses them.
///
/// In each step, `update` takes the amaxes of the step before into the histories, the layer runs with the resulting `scales`,
/// `stage` keeps the amaxes of input and weight, and backward leaves that of the gradient in the slot. A pass that does not train
/// uses the `scales_to_evaluate`. A clone is a copy: layers never share state by accident, as they would with Burn's `RunningState`.
#[derive(Debug, Default)]
pub(super) struct Fp8State {
    buffers: Arc<Mutex<Option<Buffers>>>,
    gradient_amax: GradAmaxSlot,
}

impl Fp8State {
    /// Follows a recipe from now on. A new state starts with scales of 1 and empty histories.
    pub(super) fn follow(&self, recipe: &DelayedScaling, device: &Device) {
        self.with(recipe, device, |_| ());
    }

    /// The slot that backward fills.
    pub(super) fn gradient_amax(&self) -> GradAmaxSlot {
        self.gradient_amax.clone()
    }

    /// The scales of input, weight and gradient, for a pass that trains.
    pub(super) fn scales(&self, recipe: &DelayedScaling, device: &Device) -> [Tensor<1>; 3] {
        self.with(recipe, device, |buffers| buffers.scales())
    }

    /// The scales for a pass that does not train: those that the next update will give, or, without it, those that there are. The
    /// state stays as it is, even if the recipe is for other formats or lengths.
    pub(super) fn scales_to_evaluate(
        &self,
        recipe: &DelayedScaling,
        device: &Device,
        updated: bool,
    ) -> [Tensor<1>; 3] {
        let mut guard = self.buffers.lock();
        let Some(buffers) = guard.as_mut() else {
            return Buffers::new(recipe, device).scales();
        };
        self.collect(buffers);
        buffers.scales_by(recipe, updated)
    }

    /// Keeps the amaxes of input and weight for the next update. The weight has one only if it was cast.
    pub(super) fn stage(
        &self,
        recipe: &DelayedScaling,
        device: &Device,
        input: Tensor<1>,
        weight: Option<Tensor<1>>,
    ) {
        self.with(recipe, device, |buffers| {
            buffers.forget_scales();
            buffers.input.wait(input);
            if let Some(weight) = weight {
                buffers.weight.wait(weight);
            }
        });
    }

    /// Takes the amaxes of the last step into the histories, and computes the scales.
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
            buffers.update(recipe);
        });
    }

    /// The state on the host.
    pub(super) fn snapshot(&self) -> Option<[ScalingState; 3]> {
        let mut guard = self.buffers.lock();
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
                amax: values(&tensor.amax())[0],
            }
        }))
    }

    /// Calls `run` with the buffers, which are created if needed, and adapted to the recipe.
    fn with<R>(
        &self,
        recipe: &DelayedScaling,
        device: &Device,
        run: impl FnOnce(&mut Buffers) -> R,
    ) -> R {
        let mut guard = self.buffers.lock();
        let buffers = guard.get_or_insert_with(|| Buffers::new(recipe, device));
        buffers.autodiff = device.gradient_checkpointing_strategy();
        buffers.conform(recipe);
        run(buffers)
    }

    /// Moves the gradient's amax out of the slot. If one was moved before (because the state was read between two backward
    /// passes), the larger one stays, as in the slot.
    fn collect(&self, buffers: &mut Buffers) {
        if self.gradient_amax.is_set() {
            buffers.forget_scales();
            let like = buffers.gradient.scale.value.clone().into_dispatch();
            let amax = Dispatch::fp8_gradient_amax(like, self.gradient_amax.clone());
            buffers
                .gradient
                .wait_for_largest(Tensor::from_dispatch(amax));
        }
    }

    /// Calls `map` for every buffer, with the buffer's path and, for a scale, the unit in which it is recorded.
    fn map_buffers(self, mut map: impl FnMut(&[&'static str], &mut Buffer, Option<f32>)) -> Self {
        if let Some(buffers) = self.buffers.lock().as_mut() {
            self.collect(buffers);
            buffers.forget_scales();
            for (name, tensor) in NAMES.into_iter().zip(buffers.tensors()) {
                let unit = tensor.scale_unit();
                map(&[name, "history"], &mut tensor.history, None);
                map(&[name, "scale"], &mut tensor.scale, Some(unit));
                let mut amax = tensor.amax();
                map(&[name, AMAX], &mut amax, None);
                tensor.put_amax(amax);
            }
            map(&["steps"], &mut buffers.steps, None);
        }
        self
    }

    /// The autodiff strategy of the layer's device. The buffers themselves are never tracked.
    fn autodiff(&self) -> Option<GradientCheckpointingStrategy> {
        self.buffers.lock().as_ref()?.autodiff
    }

    fn with_autodiff(self, autodiff: Option<GradientCheckpointingStrategy>) -> Self {
        if let Some(buffers) = self.buffers.lock().as_mut() {
            buffers.autodiff = autodiff;
        }
        self
    }
}

const NAMES: [&str; 3] = ["input", "weight", "gradient"];
pub(super) const CONTAINER: &str = "Struct:Fp8State";
pub(super) const AMAX: &str = "amax";

impl Clone for Fp8State {
    fn clone(&self) -> Self {
        Self {
            buffers: Arc::new(Mutex::new(self.buffers.lock().clone())),
            gradient_amax: self.gradient_amax.deep_clone(),
        }
    }
}

impl Module for Fp8State {
    fn collect_devices(&self, mut devices: Devices) -> Devices {
        if let Some(buffers) = self.buffers.lock().as_ref() {
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
        self.map_buffers(|_, buffer, _| {
            buffer.value = buffer.value.clone().to_device(&device);
        })
    }

    fn train(self) -> Self {
        // The strategy that `Tensor::from_inner` gives parameters.
        self.with_autodiff(Some(GradientCheckpointingStrategy::Disabled))
    }

    fn valid(&self) -> Self {
        self.clone().with_autodiff(None)
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        // The same walk as in `map`, but over a copy, so that a visitor may do anything.
        self.clone().map_buffers(|path, buffer, unit| {
            path.iter()
                .for_each(|name| visitor.enter_module(name, CONTAINER));
            visitor.visit_float(&buffer.param(unit, None));
            path.iter()
                .rev()
                .for_each(|name| visitor.exit_module(name, CONTAINER));
        });
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        // A mapper may need a tensor with autodiff, for example to call `set_distributed` on all parameters.
        let autodiff = self.autodiff();
        self.map_buffers(|path, buffer, unit| {
            path.iter()
                .for_each(|name| mapper.enter_module(name, CONTAINER));
            let mapped = mapper.map_float(buffer.param(unit, autodiff));
            *buffer = buffer.mapped(mapped, unit.is_some());
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
