//! Scopes, which change what the fp8 layers of a model do for a while.

use core::cell::Cell;

use crate::{Fp8Error, recipe::Fp8Recipe};

/// Which pass of a step a forward pass is, if the gradients of several passes are accumulated before the weights change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Microbatch {
    /// The only pass: every pass casts the weights.
    #[default]
    Only,
    /// The first pass: the weights are cast, and the codes are kept.
    First,
    /// A later pass: the weights are not cast again, and their amax histories stay as they are. This holds as long as recipe and
    /// parameter are the same, and no optimizer step, record, move to another device or pass of another kind (with fp8 or without)
    /// came in between. A value that was put into
    /// the same parameter by hand (`Param::map`) goes unnoticed: make that pass the first.
    Later,
}

/// What fp8 layers do while they run inside [`run`](Self::run), on the same thread.
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
    pub(crate) enabled: bool,
    pub(crate) calibrating: bool,
    pub(crate) microbatch: Microbatch,
    recipe: Option<Fp8Recipe>,
}

thread_local! {
    static CURRENT: Cell<Fp8Scope> = const { Cell::new(Fp8Scope::OUTERMOST) };
}

impl Fp8Scope {
    const OUTERMOST: Self = Self {
        enabled: true,
        calibrating: false,
        microbatch: Microbatch::Only,
        recipe: None,
    };

    /// The current scope of this thread. Outside of any scope, fp8 is on, every pass is [`Microbatch::Only`], and every layer
    /// uses the recipe that it was made with.
    pub fn current() -> Self {
        CURRENT.get()
    }

    /// Sets whether layers run in fp8. Otherwise they run in high precision, as Burn's own layers do.
    #[must_use]
    pub fn with_enabled(self, enabled: bool) -> Self {
        Self { enabled, ..self }
    }

    /// Sets whether layers that run in high precision still gather amaxes and set their scales from them.
    #[must_use]
    pub fn with_calibration(self, calibrating: bool) -> Self {
        Self {
            calibrating,
            ..self
        }
    }

    /// Sets which pass of a step the passes are.
    #[must_use]
    pub fn with_microbatch(self, microbatch: Microbatch) -> Self {
        Self { microbatch, ..self }
    }

    /// Sets the recipe of all layers, whatever they were made with. With `None`, each layer uses its own again.
    ///
    /// As in Transformer Engine, a layer that trains with [`DelayedScaling`](crate::recipe::DelayedScaling) for the first time
    /// starts with a scale of 1 and an empty history. From then on the history is part of the layer and its record. (To load such
    /// a record, give the layer that recipe.) If the length changes, the newest amaxes stay. Under other recipes the history is
    /// kept, and continued afterwards. A pass that does not train leaves it as it is, whatever the recipe of the scope is.
    ///
    /// # Errors
    /// See [`Fp8Recipe::validate`].
    ///
    /// ```
    /// use burn_fp8::{Fp8Error, Fp8Scope, recipe::{CurrentScaling, RecipeFormat}};
    ///
    /// let scope = Fp8Scope::current();
    /// assert_eq!(scope.with_recipe(CurrentScaling::new())?.recipe(), Some(CurrentScaling::new().into()));
    /// let refused = scope.with_recipe(CurrentScaling::new().with_format(RecipeFormat::E5M2));
    /// assert!(matches!(refused, Err(Fp8Error::ForwardFormat { .. })));
    /// # Ok::<(), Fp8Error>(())
    /// ```
    pub fn with_recipe(self, recipe: impl Into<Option<Fp8Recipe>>) -> Result<Self, Fp8Error> {
        let recipe = recipe.into();
        if let Some(recipe) = recipe {
            recipe.validate()?;
        }
        Ok(Self { recipe, ..self })
    }

    /// The recipe of all layers; `None` if each uses its own.
    pub fn recipe(self) -> Option<Fp8Recipe> {
        self.recipe
    }

    /// Runs `scope` in this scope. The previous scope is restored afterwards, even after a panic.
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
}

/// Runs `scope` with fp8 on or off, and with a recipe for all layers; with `None`, each layer uses the recipe that it was made
/// with (see [`Fp8Scope::with_recipe`]). Scopes nest; the innermost decides.
///
/// This is Transformer Engine's `autocast(enabled, recipe)`.
///
/// # Panics
/// If [`Fp8Recipe::validate`] refuses the recipe.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp8::{Fp8LinearConfig, fp8_autocast, recipe::CurrentScaling};
///
/// let device = Device::flex();
/// let layer = Fp8LinearConfig::new(4, 2).init(&device); // delayed scaling
/// let x = Tensor::<2>::ones([3, 4], &device);
/// let current = fp8_autocast(true, CurrentScaling::new(), || layer.forward(x.clone()));
/// let delayed = fp8_autocast(true, None, || layer.forward(x.clone()));
/// assert_ne!(current.into_data(), delayed.into_data());
///
/// let exact = fp8_autocast(false, None, || layer.forward(x.clone()));
/// let plain = layer.into_linear().forward(x);
/// assert_eq!(exact.into_data(), plain.into_data());
/// ```
pub fn fp8_autocast<R>(
    enabled: bool,
    recipe: impl Into<Option<Fp8Recipe>>,
    scope: impl FnOnce() -> R,
) -> R {
    Fp8Scope::current()
        .with_enabled(enabled)
        .with_recipe(recipe)
        .unwrap_or_else(|error| panic!("fp8_autocast: {error}"))
        .run(scope)
}

/// Runs `scope` in high precision while the layers with delayed scaling gather the amaxes of inputs and weights. Afterwards, a
/// model that was trained without fp8 has good scales.
///
/// Calibrate the model that you will use: `valid()` returns a copy, and scales that are set in the copy do not reach the
/// original.
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
