//! Delayed scaling of layers.

use super::{
    linear::{Role, format_of},
    state::TensorState,
};
use burn::{
    backend::{
        Backend, TensorMetadata,
        tensor::{Device, FloatTensor},
    },
    tensor::{FloatDType, Shape, Slice, TensorData},
};
use burn_backend::ExecutionError;
use burn_fp8::{Fp8Format, Fp8Ops, Operand, recipe::DelayedScaling};
use std::sync::{Arc, Mutex, Weak};

/// The amaxes of a layer's earlier casts, by what the tensor is to the layer; kept with the layer's weight, over all steps.
pub(super) struct Histories<B: Backend>(Vec<(Role, History<B>)>);

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
    /// How often amaxes were taken in.
    steps: usize,
    /// An amax that waits for those of the other ranks.
    staged: Option<FloatTensor<B>>,
    /// The scale of the last cast, and what goes when that does.
    last: Option<(FloatTensor<B>, Weak<()>)>,
    /// The scale of a cast that was there when the record was taken, and whose amax is taken in already.
    again: Option<FloatTensor<B>>,
}

impl<B: Backend + Fp8Ops> Histories<B> {
    /// Those of a record, or none yet.
    pub(super) fn new(states: &[TensorState], recipe: &DelayedScaling, device: &Device<B>) -> Self {
        let history =
            |state: &TensorState| (state.role, History::from_state(state, recipe, device));
        Self(states.iter().map(history).collect())
    }

    /// On the host.
    pub(super) fn states(&self) -> Result<Vec<TensorState>, ExecutionError> {
        let state = |(role, history): &(Role, History<B>)| history.state(*role);
        self.0.iter().map(state).collect()
    }

    /// Cast by the scale that the history gives, and take the tensor's amax into it, where it is `shared` not before
    /// [`share`](Self::share). The first time the scale is that of the tensor's own amax. The cast is kept as long as `alive` is.
    pub(super) fn cast(
        &mut self,
        tensor: FloatTensor<B>,
        recipe: &DelayedScaling,
        role: Role,
        shared: bool,
        alive: &Arc<()>,
    ) -> Operand<B> {
        let format = format_of(recipe.format, role);
        let place = match self.0.iter().position(|(of, _)| *of == role) {
            Some(place) => place,
            None => {
                self.0.push((role, History::new(&tensor, format, recipe)));
                self.0.len() - 1
            }
        };
        let history = &mut self.0[place].1;
        let again = history.again.take();
        let scale = again.as_ref().unwrap_or(&history.scale).clone();
        let (operand, amax) = Operand::cast_with(tensor, scale.clone(), format);
        history.last = Some((scale, Arc::downgrade(alive)));
        match (again, shared) {
            (Some(_), _) => {}
            (None, true) => history.staged = Some(amax),
            (None, false) => history.take(amax, format, recipe),
        }
        operand
    }

    /// Take the largest amaxes of all ranks in, which `max` makes of this one's, if any wait.
    pub(super) fn share(
        &mut self,
        recipe: &DelayedScaling,
        max: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
    ) {
        let waiting = |(_, history): &(Role, History<B>)| history.staged.clone();
        let own: Vec<_> = self.0.iter().filter_map(waiting).collect();
        if own.is_empty() {
            return;
        }
        let all = max(B::float_cat(own, 0));
        let mut taken = 0;
        for (role, history) in &mut self.0 {
            if history.staged.take().is_some() {
                let amax = B::float_slice(all.clone(), &[Slice::from(taken..taken + 1)]);
                history.take(amax, format_of(recipe.format, *role), recipe);
                taken += 1;
            }
        }
    }
}

impl<B: Backend + Fp8Ops> History<B> {
    fn new(tensor: &FloatTensor<B>, format: Fp8Format, recipe: &DelayedScaling) -> Self {
        let length = Shape::new([recipe.amax_history_len]);
        let amax = B::fp8_amax(tensor.clone());
        let zeros = B::float_zeros(length, &tensor.device(), FloatDType::F32);
        let one = B::float_ones(Shape::new([1]), &tensor.device(), FloatDType::F32);
        // By the recipe's own rule, margin and all; the history stays empty.
        let (_, scale) = B::fp8_update_scale(zeros.clone(), one, amax, recipe.update(format));
        Self {
            amaxes: zeros,
            scale,
            steps: 0,
            staged: None,
            last: None,
            again: None,
        }
    }

    fn take(&mut self, amax: FloatTensor<B>, format: Fp8Format, recipe: &DelayedScaling) {
        let (amaxes, scale) = B::fp8_update_scale(
            self.amaxes.clone(),
            self.scale.clone(),
            amax,
            recipe.update(format),
        );
        self.amaxes = amaxes;
        if self.steps.is_multiple_of(recipe.interval) {
            self.scale = scale;
        }
        self.steps += 1;
    }

    fn from_state(state: &TensorState, recipe: &DelayedScaling, device: &Device<B>) -> Self {
        let tensor = |values: Vec<f32>| {
            let shape = [values.len()];
            B::float_from_data(TensorData::new(values, shape), device)
        };
        Self {
            amaxes: tensor(state.amaxes(recipe.amax_history_len)),
            scale: tensor(vec![state.scale()]),
            steps: state.steps,
            staged: state.staged().map(|amax| tensor(vec![amax])),
            last: None,
            again: state.cast_with().map(|scale| tensor(vec![scale])),
        }
    }

    fn state(&self, role: Role) -> Result<TensorState, ExecutionError> {
        let values = |tensor: &FloatTensor<B>| -> Result<Vec<f32>, ExecutionError> {
            let data = burn_backend::try_read_sync(B::float_into_data(tensor.clone()));
            let waits = || ExecutionError::generic("this platform cannot wait for a tensor");
            Ok(data.ok_or_else(waits)??.iter().collect())
        };
        let value = |tensor: &FloatTensor<B>| values(tensor).map(|values| values[0]);
        // A weight outlives the process, and so does what was made of it; other tensors do not.
        let cast_with = match (&self.last, &self.again) {
            (Some((scale, alive)), _) if alive.strong_count() > 0 => Some(scale),
            (_, again) => again.as_ref(),
        };
        let cast_with = cast_with.filter(|_| role == Role::Weight).map(value);
        let staged = self.staged.as_ref().map(value);
        Ok(TensorState::new(
            role,
            &values(&self.amaxes)?,
            value(&self.scale)?,
            self.steps,
            staged.transpose()?,
            cast_with.transpose()?,
        ))
    }
}
