//! Scopes: what the fp8 layers of a model do for a while.

use core::cell::Cell;

/// Which part of a step a forward pass is, where gradients of several passes are accumulated before the weights change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Microbatch {
    /// All of it: weights are cast in every pass.
    #[default]
    Only,
    /// The first: weights are cast, and the codes kept.
    First,
    /// A later one: weights are not cast again, and their amax histories stay, as long as no optimizer step, record or move to
    /// another device came in between.
    Later,
}

/// What the fp8 layers do that run inside [`run`](Self::run), on its thread.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp8::{Fp8LinearConfig, Fp8Scope, Microbatch};
///
/// let device = Device::flex().autodiff();
/// let layer = Fp8LinearConfig::new(4, 2).init(&device);
/// for microbatch in [Microbatch::First, Microbatch::Later, Microbatch::Later] {
///     let x = Tensor::<2>::ones([3, 4], &device);
///     let output = Fp8Scope::current().with_microbatch(microbatch).run(|| layer.forward(x));
///     assert_eq!(output.dims(), [3, 2]);
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Scope {
    enabled: bool,
    calibrating: bool,
    microbatch: Microbatch,
}

thread_local! {
    static CURRENT: Cell<Fp8Scope> = const { Cell::new(Fp8Scope::OUTERMOST) };
}

impl Fp8Scope {
    const OUTERMOST: Self = Self {
        enabled: true,
        calibrating: false,
        microbatch: Microbatch::Only,
    };

    /// The scope that this thread is in: outside of any, fp8 is on, and every pass is [`Microbatch::Only`].
    pub fn current() -> Self {
        CURRENT.get()
    }

    /// Whether layers run in fp8, or in high precision as Burn's own do.
    #[must_use]
    pub fn with_enabled(self, enabled: bool) -> Self {
        Self { enabled, ..self }
    }

    /// Whether layers that run in high precision gather amaxes all the same, and set their scales by them.
    #[must_use]
    pub fn with_calibration(self, calibrating: bool) -> Self {
        Self {
            calibrating,
            ..self
        }
    }

    /// Which part of a step the passes are.
    #[must_use]
    pub fn with_microbatch(self, microbatch: Microbatch) -> Self {
        Self { microbatch, ..self }
    }

    /// Run `scope` in this scope. The one before is back afterwards, even after a panic.
    pub fn run<R>(self, scope: impl FnOnce() -> R) -> R {
        struct Restore(Fp8Scope);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let _restore = Restore(CURRENT.replace(self));
        scope()
    }

    pub(crate) fn enabled(self) -> bool {
        self.enabled
    }

    pub(crate) fn calibrating(self) -> bool {
        self.calibrating
    }

    pub(crate) fn microbatch(self) -> Microbatch {
        self.microbatch
    }
}

/// Run `scope` with fp8 on or off. Scopes nest; the innermost decides.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp8::{Fp8LinearConfig, fp8_autocast};
///
/// let device = Device::flex();
/// let layer = Fp8LinearConfig::new(4, 2).init(&device);
/// let x = Tensor::<2>::ones([3, 4], &device);
/// let exact = fp8_autocast(false, || layer.forward(x.clone()));
/// let plain = layer.into_linear().forward(x);
/// assert_eq!(exact.into_data(), plain.into_data());
/// ```
pub fn fp8_autocast<R>(enabled: bool, scope: impl FnOnce() -> R) -> R {
    Fp8Scope::current().with_enabled(enabled).run(scope)
}

/// Run `scope` in high precision while the layers with delayed scaling gather the amaxes of inputs and weights: a model
/// trained without fp8 has good scales afterwards.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp8::{Fp8LinearConfig, calibrate};
///
/// let device = Device::flex();
/// let layer = Fp8LinearConfig::new(4, 2).init(&device);
/// calibrate(|| layer.forward(Tensor::<2>::ones([3, 4], &device) * 7.0));
/// let [input, _weight, _gradient] = layer.scaling_state().unwrap();
/// assert_eq!(input.scale, 448.0 / 7.0);
/// ```
pub fn calibrate<R>(scope: impl FnOnce() -> R) -> R {
    let current = Fp8Scope::current();
    current
        .with_enabled(false)
        .with_calibration(true)
        .run(scope)
}
