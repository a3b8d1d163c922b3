//! Has the ranks share the amaxes of a whole backward in one call, as Transformer Engine does.
//!
//! The next forward needs the shared amaxes. But by then a rank may evaluate or save while the others wait for it, so the call has to
//! come in backward, which all ranks run: with the layer that is the last one there. Which one this is, earlier steps have shown.

use super::{
    Fp8,
    history::{Amaxes, Histories},
    linear::Layer,
    ranks::Lift,
};
use burn::{
    backend::{Backend, tensor::FloatTensor},
    tensor::Slice,
};
use burn_fp8::{Fp8Ops, recipe::Fp8Recipe};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use std::{
    any::Any,
    fmt,
    sync::{Arc, Weak},
};

/// What comes after a layer in backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Next {
    /// This was not seen yet.
    #[default]
    Unknown,
    /// Another layer, whenever this one ran.
    Another,
    /// Nothing, at least once. What comes after this layer in other backwards has a call of its own.
    Nothing,
}

/// A layer, whose model may be gone.
type WeakLayer<B> = Weak<Mutex<Histories<B>>>;

/// The amaxes that the layers of a backward have learned since the ranks' last call.
pub(super) struct Round<B: Backend> {
    lift: Lift<B>,
    due: Vec<(WeakLayer<B>, Amaxes<B>)>,
    /// The last layer of the backward so far.
    last: Option<WeakLayer<B>>,
}

impl<B: Backend + Fp8Ops> Round<B> {
    /// Takes the amaxes that a layer has learned, and shares all that wait unless another layer comes.
    pub(super) fn add(&mut self, layer: &Layer<B>, amaxes: Amaxes<B>, fp8: &Fp8) {
        if amaxes.is_empty() {
            return;
        }
        let weak = Arc::downgrade(layer);
        let last = self.last.replace(weak.clone());
        let before = last.and_then(|last| last.upgrade());
        if let Some(before) = before.filter(|it| !Arc::ptr_eq(it, layer)) {
            let next = &mut before.lock().next;
            if *next == Next::Unknown {
                *next = Next::Another;
            }
        }
        self.due.push((weak, amaxes));
        if layer.lock().next != Next::Another {
            self.share(fp8);
        }
    }

    /// Called when the backward of `layer` begins, which adds what it has pending of the one before to its history.
    pub(super) fn before_backward(&mut self, layer: &Layer<B>, fp8: &Fp8) {
        let is = |due: &Weak<_>| due.as_ptr() == Arc::as_ptr(layer);
        if self.due.iter().any(|(due, _)| is(due)) {
            self.end(fp8);
        }
    }

    /// Called when a forward needs its scales, so that the backward before is over.
    pub(super) fn end(&mut self, fp8: &Fp8) {
        if let Some(last) = self.last.take().and_then(|last| last.upgrade()) {
            last.lock().next = Next::Nothing;
        }
        self.share(fp8);
    }

    fn share(&mut self, fp8: &Fp8) {
        let due = std::mem::take(&mut self.due);
        let own = due.iter().flat_map(|(_, amaxes)| amaxes);
        let own: Vec<_> = own.map(|(_, amax)| amax.clone()).collect();
        let Fp8Recipe::Delayed(recipe) = &fp8.settings.recipe else {
            return;
        };
        if own.is_empty() {
            return;
        }
        let all = fp8.largest_of_ranks(B::float_cat(own, 0), self.lift);
        let mut places = 0..;
        for (layer, amaxes) in due {
            let amax = |place| B::float_slice(all.clone(), &[Slice::from(place..place + 1)]);
            let amaxes = amaxes.into_iter().zip(&mut places);
            let amaxes = amaxes.map(|((role, _), place)| (role, amax(place)));
            let amaxes = amaxes.collect();
            if let Some(layer) = layer.upgrade() {
                layer.lock().learn(amaxes, recipe);
            }
        }
    }
}

/// A round of any backend.
trait AnyRound: Any + Send {
    fn share(&mut self, fp8: &Fp8);
}

impl<B: Backend + Fp8Ops> AnyRound for Round<B> {
    fn share(&mut self, fp8: &Fp8) {
        Round::share(self, fp8);
    }
}

/// The rounds of a device, one for each backend.
#[derive(Default)]
pub(super) struct Rounds(Mutex<Vec<Box<dyn AnyRound>>>);

impl Rounds {
    /// Shares what waits.
    pub(super) fn share(&self, fp8: &Fp8) {
        self.0.lock().iter_mut().for_each(|round| round.share(fp8));
    }
}

impl fmt::Debug for Rounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rounds")
    }
}

impl Fp8 {
    /// Whether ranks share amaxes.
    pub(super) fn shares(&self) -> bool {
        self.settings.reducer.is_some()
    }

    pub(super) fn round<B: Backend + Fp8Ops>(
        &self,
        lift: Lift<B>,
    ) -> MappedMutexGuard<'_, Round<B>> {
        MutexGuard::map(self.rounds.0.lock(), |rounds| {
            let mut known = rounds.iter().map(|round| &**round as &dyn Any);
            let place = known.position(|round| round.is::<Round<B>>());
            let place = place.unwrap_or_else(|| {
                rounds.push(Box::new(Round {
                    lift,
                    due: Vec::new(),
                    last: None,
                }));
                rounds.len() - 1
            });
            let round: &mut dyn Any = &mut *rounds[place];
            round.downcast_mut().expect("the place is of its type")
        })
    }

    /// The largest amaxes of all ranks; this rank's own if they cannot be shared.
    fn largest_of_ranks<B: Backend>(&self, own: FloatTensor<B>, lift: Lift<B>) -> FloatTensor<B> {
        let reducer = self.settings.reducer.as_ref();
        let Some(reducer) = reducer.filter(|_| self.failure.get().is_none()) else {
            return own;
        };
        reducer.max(own.clone(), lift).unwrap_or_else(|error| {
            log::error!("Autocast::fp8: amaxes are not shared any more: {error}");
            let _ = self.failure.set(error);
            own
        })
    }
}
