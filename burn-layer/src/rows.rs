//! [`Rows`]: what is known of a tensor's rows, in whichever shape they are.

use crate::{Descent, kept::KeptValues, scope::Scope};
use burn_backend::DType;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// What the clones of a tensor share with its reshapes that keep the last dimension: its rows are theirs.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// How they were last used, which their backward goes by: in products of each width, and in other ops.
    used: Mutex<Vec<Used>>,
    /// What layers keep with them.
    pub(crate) kept: KeptValues,
    /// What layers keep with them and what optimizers make of them.
    pub(crate) descent: OnceLock<Descent>,
}

/// How a tensor was used in an op whose backward is ops of their own.
#[derive(Clone, Debug)]
pub(crate) struct Used {
    /// The last dimension of what came of it, where the op was a product.
    pub(crate) width: Option<usize>,
    /// The scope, if it was in one.
    pub(crate) scope: Option<Arc<Scope>>,
    /// The dtype that the first float input of the op was stored in.
    pub(crate) first: DType,
    /// Whether the op was a product of a batch of matrices, all by the same last factor.
    pub(crate) shared: bool,
}

impl Rows {
    /// How they were last used, in a product of that width or in another op.
    pub(crate) fn used(&self, width: Option<usize>) -> Option<Used> {
        let used = self.lock();
        used.iter().find(|used| used.width == width).cloned()
    }

    pub(crate) fn set_used(&self, now: &Used) {
        let mut used = self.lock();
        used.retain(|used| used.width != now.width);
        used.push(now.clone());
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Used>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
