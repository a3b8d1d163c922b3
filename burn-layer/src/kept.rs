//! [`Kept`]: what layers keep with tensors.

use crate::rows::Rows;
use core::any::Any;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// Values that layers keep with a tensor, for the next op that needs them. All clones of the tensor share them, and so do its
/// reshapes that keep the last dimension; the values are dropped with the last of these. With this, a layer computes
/// something from the rows of a parameter once per step.
#[derive(Clone, Copy, Debug)]
pub struct Kept<'a>(&'a Rows);

impl<'a> Kept<'a> {
    pub(crate) fn of(rows: &'a Rows) -> Self {
        Self(rows)
    }

    /// Calls `body` with the kept value of type `T`, which is `T::default()` at first.
    pub fn with<T: Any + Default + Send, R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        lend(&self.0.kept, body)
    }

    /// The values that are kept for longer than the tensor lives: see [`Descent`].
    pub fn descent(&self) -> Descent {
        self.descent_or(Descent::default)
    }

    /// Like [`descent`](Self::descent), but if there is none yet, it becomes the one that `init` returns, such as that of a
    /// tensor which this one is another form of.
    pub fn descent_or(&self, init: impl FnOnce() -> Descent) -> Descent {
        self.0.descent.get_or_init(init).clone()
    }
}

/// Values that layers keep with a tensor and with every tensor that an optimizer makes of it, so they belong to a parameter over
/// all its steps. They are passed on to sums and differences in which the tensor is the first term, to multiples by a scalar,
/// and to results of a clamp or of `mask_where`, if these have the tensor's shape.
#[derive(Clone, Debug, Default)]
pub struct Descent(Arc<KeptValues>);

impl Descent {
    /// Calls `body` with the kept value of type `T`, which is `T::default()` at first.
    pub fn with<T: Any + Default + Send, R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        lend(&self.0, body)
    }

    /// A weak reference, which does not keep the values alive.
    pub fn downgrade(&self) -> WeakDescent {
        WeakDescent(Arc::downgrade(&self.0))
    }
}

/// A weak reference to a [`Descent`]. Two are equal if they refer to the same one.
#[derive(Clone, Debug, Default)]
pub struct WeakDescent(Weak<KeptValues>);

impl WeakDescent {
    /// The descent, if it is still alive.
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

/// Calls `body` with the kept value of type `T`, if there is one.
pub(crate) fn look<T: Any, R>(kept: &KeptValues, body: impl FnOnce(&T) -> R) -> Option<R> {
    let values = kept.lock();
    values
        .iter()
        .find_map(|value| value.downcast_ref())
        .map(body)
}

fn lend<T: Any + Default + Send, R>(kept: &KeptValues, body: impl FnOnce(&mut T) -> R) -> R {
    let mut values = kept.lock();
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
