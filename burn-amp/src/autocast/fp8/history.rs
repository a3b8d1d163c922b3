//! Delayed scaling: the amax histories of layers.

use super::{
    linear::{Role, format_of},
    round::Next,
    state::{Bits, CastState, TensorState},
};
use burn::{
    backend::{
        Backend, TensorMetadata, get_or_init_device_settings,
        tensor::{BoolTensor, Device, FloatTensor},
    },
    tensor::TensorData,
};
use burn_backend::ExecutionError;
use burn_fp8::{Fp8Format, Fp8Ops, Operand, recipe::DelayedScaling};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// The amax histories of a layer, by the role of a tensor in the layer. They are kept with the layer's weight over all steps.
pub(super) struct Histories<B: Backend> {
    of: Vec<(Role, History<B>)>,
    /// How the layer's last input was scaled. The scale may come from another layer's history, if that layer cast the input.
    pub(super) input: Option<Scaled<B>>,
    /// Of the forwards since the layer's last backward: what dies with their inputs.
    ran: Vec<Weak<()>>,
    /// Whether backward has needed the input of a forward. A forward whose input is gone is an evaluation then.
    pub(super) needs_input: bool,
    /// Whether the backward that runs goes without the inputs of forward: the weight is not trained, or gradient checkpointing
    /// computes them again.
    without_inputs: bool,
    /// What comes after the layer in backward, as far as known.
    pub(super) next: Next,
}

/// Amaxes of a layer's tensors.
pub(super) type Amaxes<B> = Vec<(Role, FloatTensor<B>)>;

/// Where the scale of a cast came from.
#[derive(Debug, Clone)]
pub(super) enum Scaled<B: Backend> {
    /// The tensor's own amax, before the first step.
    ByItself,
    /// A history, which gave this scale.
    By(FloatTensor<B>),
}

/// The histories of a layer, as they are kept with its weight. `None` until the layer has run.
#[derive(Default)]
pub(super) struct Known<B: Backend>(pub(super) Option<Arc<Mutex<Histories<B>>>>);

#[derive(Clone)]
struct History<B: Backend> {
    amaxes: FloatTensor<B>,
    scale: FloatTensor<B>,
    /// Steps since the scale last changed. Stays 0 with an interval of 1.
    steps: FloatTensor<B>,
    /// Whether the history has the amax of any step.
    learned: bool,
    /// The amaxes of casts that wait for a backward, each with a weak reference that dies with the cast.
    waiting: Vec<(FloatTensor<B>, Weak<()>)>,
    /// The largest amax of the gradients in a backward that may not be over: a layer that ran several times in a step has several
    /// gradients. The next backward adds it to the history.
    pending: Option<FloatTensor<B>>,
    /// The casts of the weight that may be alive. There may be several, because clones of a model, such as the best one so far or
    /// an average of its weights, have their histories in common.
    casts: Vec<Cast<B>>,
    /// The casts of the weight that were alive when the record was taken.
    loaded: Vec<CastState>,
}

/// A cast of a weight.
#[derive(Debug, Clone)]
struct Cast<B: Backend> {
    scale: FloatTensor<B>,
    amax: FloatTensor<B>,
    /// Dies with the cast.
    alive: Weak<()>,
}

impl<B: Backend + Fp8Ops> Histories<B> {
    /// The histories in a record. Without a record, `states` is empty, and there are none yet.
    pub(super) fn new(states: &[TensorState], recipe: &DelayedScaling, device: &Device<B>) -> Self {
        let history =
            |state: &TensorState| (state.role, History::from_state(state, recipe, device));
        Self {
            of: states.iter().map(history).collect(),
            input: None,
            ran: Vec::new(),
            needs_input: false,
            without_inputs: false,
            next: Next::default(),
        }
    }

    /// Copies the histories to the host. To be called between two steps: pending amaxes of gradients are added to the copy.
    pub(super) fn states(
        &self,
        recipe: &DelayedScaling,
    ) -> Result<Vec<TensorState>, ExecutionError> {
        let state = |(role, history): &(Role, History<B>)| {
            let mut history = history.clone();
            history.end_backward(*role, recipe);
            history.state(*role)
        };
        self.of.iter().map(state).collect()
    }

    /// Called when the layer runs forward, with an input that is there for as long as `alive`.
    pub(super) fn in_forward(&mut self, alive: &Arc<()>) {
        self.ran.retain(is_alive);
        self.ran.push(Arc::downgrade(alive));
    }

    /// Whether the layer has run forward since its last product of backward.
    pub(super) fn begins_backward(&self) -> bool {
        let alive = self.ran.iter().any(is_alive);
        alive || !self.ran.is_empty() && !self.needs_input
    }

    /// Called when one of the layer's products of backward is about to run. If it is the first since forward, the previous
    /// backward is over, and the amaxes of its gradients are added to the history.
    pub(super) fn in_backward(&mut self, recipe: &DelayedScaling) {
        let begins = self.begins_backward();
        let ran = std::mem::take(&mut self.ran);
        if !begins {
            return;
        }
        self.without_inputs = !ran.iter().any(is_alive);
        for (role, history) in &mut self.of {
            history.end_backward(*role, recipe);
        }
    }

    /// Casts by the scale that the history gives. The tensor's amax then waits for a [step](Self::learn). Before the first step,
    /// the scale comes from the tensor's own amax. The caller keeps the cast for as long as `alive`.
    pub(super) fn cast(
        &mut self,
        tensor: FloatTensor<B>,
        recipe: &DelayedScaling,
        role: Role,
        alive: &Arc<()>,
    ) -> (Operand<B>, Scaled<B>) {
        let format = format_of(recipe.format, role);
        let place = match self.of.iter().position(|(of, _)| *of == role) {
            Some(place) => place,
            None => {
                let history = History::new(role, recipe, &tensor.device());
                self.of.push((role, history));
                self.of.len() - 1
            }
        };
        let history = &mut self.of[place].1;
        let again = history.scale_of_loaded(&tensor);
        let is_new = again.is_none();
        let by_itself = is_new && !history.learned;
        let scale = again.unwrap_or_else(|| history.scale_of(&tensor, format, recipe));
        let (operand, amax) = Operand::<B>::cast_with(tensor, scale.clone(), format);
        if role == Role::Weight {
            history.keep_cast(scale.clone(), amax.clone(), alive);
        }
        if is_new {
            history.wait(amax, alive);
        }
        let scaled = match by_itself {
            true => Scaled::ByItself,
            false => Scaled::By(scale),
        };
        (operand, scaled)
    }

    /// Casts an input of the layer in the same way as the layer's last input, without counting its amax again. `None` if the
    /// layer has cast no input.
    pub(super) fn cast_input_again(
        &self,
        tensor: FloatTensor<B>,
        recipe: &DelayedScaling,
    ) -> Option<Operand<B>> {
        let format = format_of(recipe.format, Role::Input);
        let scale = match self.input.clone()? {
            Scaled::By(scale) => scale,
            Scaled::ByItself => {
                let nothing = History::<B>::new(Role::Input, recipe, &tensor.device());
                nothing.scale_of(&tensor, format, recipe)
            }
        };
        Some(Operand::cast_with(tensor, scale, format).0)
    }

    /// Takes the amaxes that wait, now that there is a step.
    pub(super) fn waiting(&mut self) -> Amaxes<B> {
        let without_inputs = self.without_inputs;
        let waiting = self.of.iter_mut().filter_map(|(role, history)| {
            // What waits of a weight may be from before it was loaded.
            let amax = history.waiting(without_inputs || *role != Role::Input)?;
            history.waiting.clear();
            Some((*role, amax))
        });
        waiting.collect()
    }

    /// Adds what [`waiting`](Self::waiting) took to the histories, or the largest of all ranks instead.
    pub(super) fn learn(&mut self, amaxes: Amaxes<B>, recipe: &DelayedScaling) {
        for (role, amax) in amaxes {
            let mut histories = self.of.iter_mut();
            let (_, history) = histories
                .find(|(of, _)| *of == role)
                .expect("the amax waited in a history");
            match role {
                Role::Input | Role::Weight => history.learn(amax, role, recipe),
                Role::Gradient => {
                    let known = history.pending.take();
                    history.pending = largest::<B>(known.into_iter().chain([amax]).collect());
                }
            }
        }
    }
}

fn is_alive(weak: &Weak<()>) -> bool {
    weak.strong_count() > 0
}

/// The largest of several amaxes; NaN if one of them is NaN.
fn largest<B: Backend + Fp8Ops>(mut amaxes: Vec<FloatTensor<B>>) -> Option<FloatTensor<B>> {
    match amaxes.len() {
        0 | 1 => amaxes.pop(),
        _ => Some(B::fp8_amax(B::float_cat(amaxes, 0))),
    }
}

impl<B: Backend + Fp8Ops> History<B> {
    fn new(role: Role, recipe: &DelayedScaling, device: &Device<B>) -> Self {
        let state = TensorState::new(role, recipe.amax_history_len);
        Self::from_state(&state, recipe, device)
    }

    /// The scale to cast a tensor with. Before the first step, it comes from the tensor's own amax, by the same rule of the
    /// recipe, including its margin.
    fn scale_of(
        &self,
        tensor: &FloatTensor<B>,
        format: Fp8Format,
        recipe: &DelayedScaling,
    ) -> FloatTensor<B> {
        match self.learned {
            true => self.scale.clone(),
            false => self.with(B::fp8_amax(tensor.clone()), format, recipe).1,
        }
    }

    /// The scale of a weight that was cast when the record was taken, and whose amax the record has already. It is recognized by its
    /// amax. Asked once: the first cast after loading is that of the weight that was saved.
    fn scale_of_loaded(&mut self, tensor: &FloatTensor<B>) -> Option<FloatTensor<B>> {
        let loaded = std::mem::take(&mut self.loaded);
        if loaded.is_empty() {
            return None;
        }
        let amax = value::<B>(&B::fp8_amax(tensor.clone())).ok()?;
        let cast = loaded.iter().find(|cast| cast.amax == amax)?;
        Some(one_dim::<B>(&[cast.scale.0], &tensor.device()))
    }

    /// Keeps how a weight was cast, and forgets casts that are gone.
    fn keep_cast(&mut self, scale: FloatTensor<B>, amax: FloatTensor<B>, alive: &Arc<()>) {
        self.casts.retain(|cast| is_alive(&cast.alive));
        self.casts.push(Cast {
            scale,
            amax,
            alive: Arc::downgrade(alive),
        });
    }

    /// The amaxes and the scale after adding one more amax.
    fn with(
        &self,
        amax: FloatTensor<B>,
        format: Fp8Format,
        recipe: &DelayedScaling,
    ) -> (FloatTensor<B>, FloatTensor<B>) {
        let (amaxes, scale) = (self.amaxes.clone(), self.scale.clone());
        B::fp8_update_scale(amaxes, scale, amax, recipe.update(format))
    }

    /// Keeps the amax of a cast for the next step. Forgets the amaxes of casts that are gone: there was no backward for them.
    fn wait(&mut self, amax: FloatTensor<B>, alive: &Arc<()>) {
        self.waiting.retain(|(_, alive)| is_alive(alive));
        self.waiting.push((amax, Arc::downgrade(alive)));
    }

    /// The largest waiting amax of casts that are alive. If none is, the last one of those that are `gone`, if these count too.
    fn waiting(&self, gone: bool) -> Option<FloatTensor<B>> {
        let there = self.waiting.iter().filter(|(_, alive)| is_alive(alive));
        let mut amaxes: Vec<_> = there.map(|(amax, _)| amax.clone()).collect();
        if amaxes.is_empty() && gone {
            amaxes.extend(self.waiting.last().map(|(amax, _)| amax.clone()));
        }
        largest::<B>(amaxes)
    }

    /// Adds the pending amax, if there is one, to the history.
    fn end_backward(&mut self, role: Role, recipe: &DelayedScaling) {
        if let Some(amax) = self.pending.take() {
            self.learn(amax, role, recipe);
        }
    }

    fn learn(&mut self, amax: FloatTensor<B>, role: Role, recipe: &DelayedScaling) {
        let format = format_of(recipe.format, role);
        let (amaxes, scale) = self.with(amax.clone(), format, recipe);
        self.amaxes = amaxes;
        self.scale = match self.count(amax, recipe.interval) {
            Some(due) => B::float_mask_where(self.scale.clone(), due, scale),
            None => scale,
        };
        self.learned = true;
    }

    /// Counts a step whose amax is not 0. Returns whether the scale may change in it; `None` if it always may.
    fn count(&mut self, amax: FloatTensor<B>, interval: usize) -> Option<BoolTensor<B>> {
        if interval == 1 {
            return None;
        }
        let dtype = get_or_init_device_settings::<B>(&amax.device()).bool_dtype;
        let steps = self.steps.clone();
        let due = B::float_lower_elem(steps.clone(), 1f32.into(), dtype);
        // No remainder, which some GPUs find by a division that is not exact.
        let next = B::float_add_scalar(steps.clone(), 1f32.into());
        let last = interval as f32 - 0.5;
        let last = B::float_greater_equal_elem(next.clone(), last.into(), dtype);
        let next = B::float_mask_fill(next, last, 0f32.into());
        let nothing = B::float_equal_elem(amax, 0f32.into(), dtype);
        self.steps = B::float_mask_where(next, nothing, steps);
        Some(due)
    }

    fn from_state(state: &TensorState, recipe: &DelayedScaling, device: &Device<B>) -> Self {
        let tensor = |values: &[f32]| one_dim::<B>(values, device);
        let waiting = state.waiting.map(|amax| (tensor(&[amax.0]), Weak::new()));
        Self {
            amaxes: tensor(&state.amaxes(recipe.amax_history_len)),
            scale: tensor(&[state.scale.0]),
            steps: tensor(&[state.steps.0]),
            learned: state.learned,
            waiting: waiting.into_iter().collect(),
            pending: None,
            casts: Vec::new(),
            loaded: state.casts.clone(),
        }
    }

    fn state(&self, role: Role) -> Result<TensorState, ExecutionError> {
        // A weight is saved and loaded, so its cast has to be the same afterwards. Other tensors do not outlive the process.
        let alive = self.casts.iter().filter(|cast| is_alive(&cast.alive));
        let alive = alive.map(|cast| {
            Ok(CastState {
                scale: value::<B>(&cast.scale)?,
                amax: value::<B>(&cast.amax)?,
            })
        });
        let casts = alive.chain(self.loaded.iter().copied().map(Ok));
        let waiting = self.waiting(true);
        Ok(TensorState {
            role,
            amaxes: values::<B>(&self.amaxes)?,
            scale: value::<B>(&self.scale)?,
            steps: value::<B>(&self.steps)?,
            learned: self.learned,
            waiting: waiting.as_ref().map(value::<B>).transpose()?,
            casts: casts.collect::<Result<_, ExecutionError>>()?,
        })
    }
}

fn one_dim<B: Backend>(values: &[f32], device: &Device<B>) -> FloatTensor<B> {
    B::float_from_data(TensorData::new(values.to_vec(), [values.len()]), device)
}

/// Copies a tensor to the host, which waits for it.
fn values<B: Backend>(tensor: &FloatTensor<B>) -> Result<Vec<Bits>, ExecutionError> {
    let data = burn_backend::try_read_sync(B::float_into_data(tensor.clone()));
    let waits = || ExecutionError::generic("this platform cannot wait for a tensor");
    Ok(data.ok_or_else(waits)??.iter().map(Bits).collect())
}

/// The same for a tensor of one element.
fn value<B: Backend>(tensor: &FloatTensor<B>) -> Result<Bits, ExecutionError> {
    values::<B>(tensor).map(|values| values[0])
}
