//! [`Kept`]: what layers keep with tensors.

use crate::rows::Rows;
use core::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What layers keep with a tensor, for the next op that needs it: all clones of the tensor share it, and its reshapes that
/// keep the last dimension; it goes with the last of them. So what is made of the rows of a parameter is made once a step.
#[derive(Clone, Copy, Debug)]
pub struct Kept<'a>(&'a Rows);

impl<'a> Kept<'a> {
    pub(crate) fn of(rows: &'a Rows) -> Self {
        Self(rows)
    }

    /// Lends the kept value of type `T`, at first its default.
    pub fn with<T: Any + Default + Send, R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        lend(&self.0.kept, body)
    }

    /// What is kept with the tensor for longer: see [`Descent`].
    pub fn descent(&self) -> Descent {
        self.descent_or(Descent::default)
    }

    /// The same, at first what `init` gives: that of a tensor which it is another form of.
    pub fn descent_or(&self, init: impl FnOnce() -> Descent) -> Descent {
        self.0.descent.get_or_init(init).clone()
    }
}

/// What layers keep with a tensor and with what an optimizer makes of it: the sum or difference of it and another tensor of its
/// shape, a multiple of it, what a clamp or a mask leaves of it. So it belongs to a parameter, over all steps.
#[derive(Clone, Debug, Default)]
pub struct Descent(Arc<KeptValues>);

impl Descent {
    /// Lends the kept value of type `T`, at first its default.
    pub fn with<T: Any + Default + Send, R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        lend(&self.0, body)
    }

    /// The same, without keeping it.
    pub fn downgrade(&self) -> WeakDescent {
        WeakDescent(Arc::downgrade(&self.0))
    }
}

/// A [`Descent`] while its tensor or one that was made of it lives. Two are equal if they are of the same.
#[derive(Clone, Debug, Default)]
pub struct WeakDescent(Weak<KeptValues>);

impl WeakDescent {
    /// The descent, if it is still there.
    pub fn upgrade(&self) -> Option<Descent> {
        self.0.upgrade().map(Descent)
    }
}

impl PartialEq for WeakDescent {
    fn eq(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.0, &other.0)
    }
}

/// One value of each type.
pub(crate) type KeptValues = Mutex<Vec<Box<dyn Any + Send>>>;

/// What `body` makes of the kept value of type `T`, if there is one.
pub(crate) fn look<T: Any, R>(kept: &KeptValues, body: impl FnOnce(&T) -> R) -> Option<R> {
    let values = lock(kept);
    values
        .iter()
        .find_map(|value| value.downcast_ref())
        .map(body)
}

fn lend<T: Any + Default + Send, R>(kept: &KeptValues, body: impl FnOnce(&mut T) -> R) -> R {
    let mut values = lock(kept);
    let place = match values.iter().position(|value| value.is::<T>()) {
        Some(place) => place,
        None => {
            values.push(Box::new(T::default()));
            values.len() - 1
        }
    };
    let value = values[place].downcast_mut();
    body(value.expect("the value was found by its type"))
}

fn lock(kept: &KeptValues) -> MutexGuard<'_, Vec<Box<dyn Any + Send>>> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}
