//! [`Fp8State`]: the histories of delayed scaling for the layers of a device, on the host.

use super::{Fp8, history::Histories, linear::Role};
use crate::AutocastDevice;
use burn::backend::{Backend, tensor::Device};
use burn_backend::ExecutionError;
use burn_fp8::{
    Fp8Ops,
    recipe::{DelayedScaling, Fp8Recipe},
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Weak};

/// The histories and scales of the layers of a device with [`Autocast::fp8`](crate::Autocast::fp8) and delayed scaling. Save it
/// with a checkpoint, because a model's record has only its weights. Any serde format will do, because floats are
/// serialized as their bits.
///
/// A device does not know the ids of parameters, so a layer is identified by its size, by the blocks that it is in
/// ([`named`](crate::named)), and, if these are the same, by the order in which the layers first ran. A program that runs its
/// layers in the same order again continues bit for bit. (Name layers of one size that may run in any order.)
///
/// ```
/// use burn::{module::Module, nn::{Linear, LinearConfig}, tensor::{Device, Tensor}};
/// use burn_amp::{Autocast, Fp8State, recipe::DelayedScaling};
///
/// let autocast = || Autocast::fp8(DelayedScaling::new()).unwrap().with_report(Device::flex());
/// let (before, after) = (autocast()?, autocast()?);
/// let step = |linear: &Linear, device: &Device| {
///     let output = linear.forward(Tensor::<2>::ones([4, 32], device));
///     output.clone().sum().backward();
///     output.into_data()
/// };
/// let device = before.device.clone().autodiff();
/// let linear = LinearConfig::new(32, 16).init(&device);
/// step(&linear, &device);
/// let record = linear.clone().into_record();
/// let state = serde_json::to_string(&before.fp8_state()?)?;
///
/// // In another process:
/// after.load_fp8_state(serde_json::from_str(&state)?);
/// let other = after.device.clone().autodiff();
/// let resumed = LinearConfig::new(32, 16).init(&other).load_record(record);
/// assert_eq!(step(&resumed, &other), step(&linear, &device));
/// assert_eq!(after.fp8_state()?, before.fp8_state()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fp8State {
    layers: Vec<LayerState>,
}

impl Fp8State {
    /// The number of layers whose histories it has.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LayerState {
    layer: LayerName,
    tensors: Vec<TensorState>,
}

/// What identifies a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LayerName {
    /// The names of the blocks that the layer is in, outermost first.
    pub(super) names: Vec<String>,
    /// The numbers of inputs and outputs.
    pub(super) size: [usize; 2],
}

/// A number that is serialized as its bits, because JSON has no NaN.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
pub(super) struct Bits(pub(super) f32);

impl From<u32> for Bits {
    fn from(bits: u32) -> Self {
        Self(f32::from_bits(bits))
    }
}

impl From<Bits> for u32 {
    fn from(bits: Bits) -> Self {
        bits.0.to_bits()
    }
}

impl PartialEq for Bits {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Bits {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TensorState {
    pub(super) role: Role,
    pub(super) amaxes: Vec<Bits>,
    pub(super) scale: Bits,
    /// Steps since the scale last changed.
    pub(super) steps: Bits,
    /// Whether the history has the amax of any step.
    pub(super) learned: bool,
    /// An amax that waits for a step.
    pub(super) waiting: Option<Bits>,
    /// The casts that are still alive: how clones of the weight are cast.
    pub(super) casts: Vec<CastState>,
}

/// A cast of a weight, and the amax by which the weight is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CastState {
    pub(super) scale: Bits,
    pub(super) amax: Bits,
}

impl TensorState {
    /// The state before the first step.
    pub(super) fn new(role: Role, length: usize) -> Self {
        Self {
            role,
            amaxes: vec![Bits(0.0); length],
            scale: Bits(1.0),
            steps: Bits(0.0),
            learned: false,
            waiting: None,
            casts: Vec::new(),
        }
    }

    /// The newest amaxes as a history of `length` slots, of which the first is free.
    pub(super) fn amaxes(&self, length: usize) -> Vec<f32> {
        let newest = self.amaxes.iter().skip(1).rev().take(length - 1);
        let mut amaxes: Vec<f32> = newest.map(|amax| amax.0).collect();
        amaxes.resize(length, 0.0);
        amaxes.reverse();
        amaxes
    }
}

/// The layers of a device.
#[derive(Debug, Default)]
pub(super) struct Registry {
    /// The layers that ran, in the order in which they first did.
    ran: Vec<(LayerName, Weak<dyn Snapshot>)>,
    /// The loaded states of layers that have not run yet.
    waiting: Vec<LayerState>,
}

/// The histories of a layer, for any backend.
trait Snapshot: Send + Sync {
    fn states(&self, recipe: &DelayedScaling) -> Result<Vec<TensorState>, ExecutionError>;
}

impl<B: Backend + Fp8Ops> Snapshot for Mutex<Histories<B>> {
    fn states(&self, recipe: &DelayedScaling) -> Result<Vec<TensorState>, ExecutionError> {
        self.lock().states(recipe)
    }
}

impl Registry {
    /// Registers a layer that runs for the first time, and returns its histories: the loaded ones, if there are any.
    pub(super) fn enter<B: Backend + Fp8Ops>(
        &mut self,
        layer: LayerName,
        recipe: &DelayedScaling,
        device: &Device<B>,
    ) -> Arc<Mutex<Histories<B>>> {
        let known = self.waiting.iter().position(|state| state.layer == layer);
        let tensors = match known {
            Some(place) => self.waiting.remove(place).tensors,
            None => Vec::new(),
        };
        let histories = Arc::new(Mutex::new(Histories::new(&tensors, recipe, device)));
        // Forgets layers whose weights, and with them their histories, are gone.
        self.ran.retain(|(_, layer)| layer.strong_count() > 0);
        let snapshot: Arc<dyn Snapshot> = histories.clone();
        self.ran.push((layer, Arc::downgrade(&snapshot)));
        histories
    }
}

impl Fp8 {
    fn state(&self) -> Result<Fp8State, ExecutionError> {
        let Fp8Recipe::Delayed(recipe) = &self.settings.recipe else {
            return Ok(Fp8State::default());
        };
        self.rounds.share(self);
        if let Some(error) = self.failure.get() {
            let reason = format!("the amaxes of the ranks could not be shared: {error}");
            return Err(ExecutionError::generic(reason));
        }
        let (ran, waiting) = {
            let registry = self.registry.lock();
            (registry.ran.clone(), registry.waiting.clone())
        };
        let ran = ran.into_iter().filter_map(|(layer, histories)| {
            let tensors = histories.upgrade()?.states(recipe);
            Some(tensors.map(|tensors| LayerState { layer, tensors }))
        });
        let layers = ran
            .chain(waiting.into_iter().map(Ok))
            .collect::<Result<_, _>>()?;
        Ok(Fp8State { layers })
    }

    fn load(&self, state: Fp8State) {
        self.registry.lock().waiting = state.layers;
    }
}

impl AutocastDevice {
    /// The histories of delayed scaling so far; none with other recipes. Waits until the device has done all its work.
    /// Call it between two steps.
    ///
    /// # Errors
    ///
    /// When the device failed, or the [reducer](crate::Autocast::amax_reducer) did.
    pub fn fp8_state(&self) -> Result<Fp8State, ExecutionError> {
        self.device.sync()?;
        self.fp8
            .as_ref()
            .map_or_else(|| Ok(Fp8State::default()), |fp8| fp8.state())
    }

    /// Loads a [state](Fp8State), in place of what was loaded before. Layers get their histories when they run for the
    /// first time, so call this before the model that belongs to the state runs. The recipe has to be the same, except
    /// that a history of another length keeps its newest amaxes. On a device without layers in fp8, nothing is loaded,
    /// and the log says so.
    pub fn load_fp8_state(&self, state: Fp8State) {
        match &self.fp8 {
            Some(fp8) => fp8.load(state),
            None => log::warn!("load_fp8_state loads nothing: no layer runs in fp8 here"),
        }
    }

    /// How many layers of the [loaded](Self::load_fp8_state) state have not run yet. Waits until the device has done all
    /// its work. After a step of the model that belongs to the state, there are none. If some are left, the model has
    /// layers of other sizes or names.
    ///
    /// # Errors
    ///
    /// When the device failed.
    pub fn fp8_layers_waiting(&self) -> Result<usize, ExecutionError> {
        self.device.sync()?;
        let waiting = |fp8: &Arc<Fp8>| fp8.registry.lock().waiting.len();
        Ok(self.fp8.as_ref().map_or(0, waiting))
    }
}
