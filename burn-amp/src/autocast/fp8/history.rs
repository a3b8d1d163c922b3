//! Delayed scaling of layers.

use super::{
    linear::{Role, format_of},
    state::{Bits, TensorState},
};
use burn::{
    backend::{
        Backend, TensorMetadata, get_or_init_device_settings,
        tensor::{BoolTensor, Device, FloatTensor},
    },
    tensor::{Slice, TensorData},
};
use burn_backend::ExecutionError;
use burn_fp8::{Fp8Format, Fp8Ops, Operand, recipe::DelayedScaling};
use std::sync::{Arc, Mutex, Weak};

/// The amaxes of a layer's earlier casts, by what the tensor is to the layer; kept with the layer's weight, over all steps.
pub(super) struct Histories<B: Backend> {
    of: Vec<(Role, History<B>)>,
    /// How the layer's last input was scaled, by whichever layer's history.
    pub(super) input: Option<Scaled<B>>,
    /// Whether the layer ran forward since its last backward.
    pub(super) ran: bool,
}

/// What the scale of a cast came of.
#[derive(Debug)]
pub(super) enum Scaled<B: Backend> {
    /// The tensor's own amax, before the first step.
    ByItself,
    /// A history.
    By(FloatTensor<B>),
}

impl<B: Backend> Clone for Scaled<B> {
    fn clone(&self) -> Self {
        match self {
            Self::ByItself => Self::ByItself,
            Self::By(scale) => Self::By(scale.clone()),
        }
    }
}

/// The histories of a layer, once it ran: what is kept with its weight.
pub(super) struct Known<B: Backend>(pub(super) Option<Arc<Mutex<Histories<B>>>>);

impl<B: Backend> Default for Known<B> {
    fn default() -> Self {
        Self(None)
    }
}

struct History<B: Backend> {
    amaxes: FloatTensor<B>,
    scale: FloatTensor<B>,
    /// Steps since the scale last changed; it stays 0 with an interval of 1.
    steps: FloatTensor<B>,
    /// Whether a step's amax was taken in.
    learned: bool,
    /// The amaxes of casts that wait for a backward, and what goes when those do.
    waiting: Vec<(FloatTensor<B>, Weak<()>)>,
    /// The largest amax of a backward that may go on: a layer that ran several times in a step has several gradients. The next
    /// backward takes it in.
    pending: Option<FloatTensor<B>>,
    /// The scale of the last cast, and what goes when that does.
    last: Option<(FloatTensor<B>, Weak<()>)>,
    /// The scale of a cast that was there when the record was taken, which has its amax already.
    again: Option<FloatTensor<B>>,
}

impl<B: Backend + Fp8Ops> Histories<B> {
    /// Those of a record, or none yet.
    pub(super) fn new(states: &[TensorState], recipe: &DelayedScaling, device: &Device<B>) -> Self {
        let history =
            |state: &TensorState| (state.role, History::from_state(state, recipe, device));
        Self {
            of: states.iter().map(history).collect(),
            input: None,
            ran: false,
        }
    }

    /// On the host, between two steps.
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

    /// One of the layer's products of backward is about to run. If it is the first since forward, a step is over for the gradients
    /// of the last.
    pub(super) fn in_backward(&mut self, recipe: &DelayedScaling) {
        if !std::mem::take(&mut self.ran) {
            return;
        }
        for (role, history) in &mut self.of {
            history.end_backward(*role, recipe);
        }
    }

    /// Cast by the scale that the history gives; the tensor's amax waits for a [step](Self::learn). Before the first one the scale
    /// is that of the tensor's own amax. The cast is kept as long as `alive` is.
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
        let again = history.again.take();
        let is_new = again.is_none();
        let by_itself = is_new && !history.learned;
        let scale = again.unwrap_or_else(|| history.scale_of(&tensor, format, recipe));
        let (operand, amax) = Operand::cast_with(tensor, scale.clone(), format);
        history.last = Some((scale.clone(), Arc::downgrade(alive)));
        if is_new {
            history.wait(amax, alive);
        }
        let scaled = match by_itself {
            true => Scaled::ByItself,
            false => Scaled::By(scale),
        };
        (operand, scaled)
    }

    /// Cast an input of the layer as it was before, if it was: its amax was taken in then.
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

    /// Take in what waits, now that there is a step: the largest of all ranks, where `max` makes that of this one's.
    pub(super) fn learn(
        &mut self,
        recipe: &DelayedScaling,
        max: Option<impl FnOnce(FloatTensor<B>) -> FloatTensor<B>>,
    ) {
        let waiting = self.of.iter_mut().filter_map(|(role, history)| {
            let amax = history.waiting()?;
            history.waiting.clear();
            Some((*role, history, amax))
        });
        let mut waiting: Vec<_> = waiting.collect();
        if let (Some(max), false) = (max, waiting.is_empty()) {
            let own = waiting.iter().map(|(.., amax)| amax.clone()).collect();
            let all = max(B::float_cat(own, 0));
            for (place, (.., amax)) in waiting.iter_mut().enumerate() {
                *amax = B::float_slice(all.clone(), &[Slice::from(place..place + 1)]);
            }
        }
        for (role, history, amax) in waiting {
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

/// The largest of amaxes, which is their amax: NaN, if one is.
fn largest<B: Backend + Fp8Ops>(mut amaxes: Vec<FloatTensor<B>>) -> Option<FloatTensor<B>> {
    match amaxes.len() {
        0 | 1 => amaxes.pop(),
        _ => Some(B::fp8_amax(B::float_cat(amaxes, 0))),
    }
}

impl<B: Backend> Clone for History<B> {
    fn clone(&self) -> Self {
        Self {
            amaxes: self.amaxes.clone(),
            scale: self.scale.clone(),
            steps: self.steps.clone(),
            learned: self.learned,
            waiting: self.waiting.clone(),
            pending: self.pending.clone(),
            last: self.last.clone(),
            again: self.again.clone(),
        }
    }
}

impl<B: Backend + Fp8Ops> History<B> {
    fn new(role: Role, recipe: &DelayedScaling, device: &Device<B>) -> Self {
        let state = TensorState::new(role, recipe.amax_history_len);
        Self::from_state(&state, recipe, device)
    }

    /// The scale of a tensor: before the first step by its own amax, by the recipe's own rule, margin and all.
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

    /// The history and the scale with one more amax.
    fn with(
        &self,
        amax: FloatTensor<B>,
        format: Fp8Format,
        recipe: &DelayedScaling,
    ) -> (FloatTensor<B>, FloatTensor<B>) {
        let (amaxes, scale) = (self.amaxes.clone(), self.scale.clone());
        B::fp8_update_scale(amaxes, scale, amax, recipe.update(format))
    }

    /// Keep the amax of a cast for the next step. Those of casts that are gone had none.
    fn wait(&mut self, amax: FloatTensor<B>, alive: &Arc<()>) {
        self.waiting.retain(|(_, alive)| alive.strong_count() > 0);
        self.waiting.push((amax, Arc::downgrade(alive)));
    }

    /// The largest amax that waits, of casts that are there. Where none is, as of the input of a weight that is not trained, the last.
    fn waiting(&self) -> Option<FloatTensor<B>> {
        let there = self.waiting.iter();
        let there = there.filter(|(_, alive)| alive.strong_count() > 0);
        let mut amaxes: Vec<_> = there.map(|(amax, _)| amax.clone()).collect();
        if amaxes.is_empty() {
            amaxes.extend(self.waiting.last().map(|(amax, _)| amax.clone()));
        }
        largest::<B>(amaxes)
    }

    /// Take in what is pending, if anything.
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

    /// Count a step whose amax is not 0, and tell whether the scale may change in it: `None` for always.
    fn count(&mut self, amax: FloatTensor<B>, interval: usize) -> Option<BoolTensor<B>> {
        if interval == 1 {
            return None;
        }
        let dtype = get_or_init_device_settings::<B>(&amax.device()).bool_dtype;
        let steps = self.steps.clone();
        let due = B::float_lower_elem(steps.clone(), 1f32.into(), dtype);
        let next = B::float_add_scalar(steps.clone(), 1f32.into());
        let next = B::float_remainder_scalar(next, (interval as f32).into());
        let nothing = B::float_equal_elem(amax, 0f32.into(), dtype);
        self.steps = B::float_mask_where(next, nothing, steps);
        Some(due)
    }

    fn from_state(state: &TensorState, recipe: &DelayedScaling, device: &Device<B>) -> Self {
        let tensor = |values: Vec<f32>| {
            let shape = [values.len()];
            B::float_from_data(TensorData::new(values, shape), device)
        };
        let waiting = state
            .waiting
            .map(|amax| (tensor(vec![amax.0]), Weak::new()));
        Self {
            amaxes: tensor(state.amaxes(recipe.amax_history_len)),
            scale: tensor(vec![state.scale.0]),
            steps: tensor(vec![state.steps.0]),
            learned: state.learned,
            waiting: waiting.into_iter().collect(),
            pending: None,
            last: None,
            again: state.cast_with.map(|scale| tensor(vec![scale.0])),
        }
    }

    fn state(&self, role: Role) -> Result<TensorState, ExecutionError> {
        let values = |tensor: &FloatTensor<B>| -> Result<Vec<Bits>, ExecutionError> {
            let data = burn_backend::try_read_sync(B::float_into_data(tensor.clone()));
            let waits = || ExecutionError::generic("this platform cannot wait for a tensor");
            Ok(data.ok_or_else(waits)??.iter().map(Bits).collect())
        };
        let value = |tensor: &FloatTensor<B>| values(tensor).map(|values| values[0]);
        // A weight outlives the process, and so does what was made of it; other tensors do not.
        let cast_with = match (&self.last, &self.again) {
            (Some((scale, alive)), _) if alive.strong_count() > 0 => Some(scale),
            (_, again) => again.as_ref(),
        };
        let cast_with = cast_with.filter(|_| role == Role::Weight).map(value);
        let waiting = self.waiting();
        Ok(TensorState {
            role,
            amaxes: values(&self.amaxes)?,
            scale: value(&self.scale)?,
            steps: value(&self.steps)?,
            learned: self.learned,
            waiting: waiting.as_ref().map(value).transpose()?,
            cast_with: cast_with.transpose()?,
        })
    }
}
