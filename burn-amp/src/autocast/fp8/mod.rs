//! Runs the linear layers of any model in fp8.
//!
//! The autocast layer runs the products of linear layers itself, with burn-fp8's kernels for the backend underneath. The cast of
//! a tensor is kept with the tensor, for the other products that need it.

mod filter;
mod history;
mod linear;
mod product;
mod ranks;
mod round;
mod settings;
mod state;

pub use filter::Fp8Filter;
pub use state::Fp8State;

use super::nan_guard::Name;
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
use burn::backend::Cube;
#[cfg(feature = "flex")]
use burn::backend::Flex;
use burn::{
    backend::Backend,
    tensor::{DType, Tensor},
};
use burn_fp8::{
    Fp8Error, Fp8Ops,
    recipe::{AmaxReducer, Fp8Recipe},
};
use burn_layer::{Inputs, Layers, Op, Ran, Run};
use parking_lot::Mutex;
use product::Product;
use ranks::{Lift, Reducer};
use round::Rounds;
use state::Registry;
use std::sync::{Arc, OnceLock};

/// The [`Lift`] between the tensors of one of Burn's own backends and Burn's [`Tensor`].
#[cfg(any(
    feature = "flex",
    feature = "cpu",
    feature = "cuda",
    feature = "rocm",
    feature = "wgpu"
))]
macro_rules! lift {
    ($backend:ty) => {
        Lift {
            up: Tensor::from_primitive::<$backend>,
            down: |tensor| tensor.try_into_primitive::<$backend>().ok(),
        }
    };
}

/// Which layers run in fp8, and how.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Fp8Settings {
    recipe: Fp8Recipe,
    pub(super) filter: Fp8Filter,
    reducer: Option<Reducer>,
}

impl Fp8Settings {
    pub(super) fn new(recipe: Fp8Recipe) -> Result<Self, Fp8Error> {
        recipe.validate()?;
        Ok(Self {
            recipe,
            filter: Fp8Filter::new(),
            reducer: None,
        })
    }

    pub(super) fn share(&mut self, reducer: Arc<dyn AmaxReducer>) {
        self.reducer = Some(Reducer(reducer));
    }
}

/// Fp8 on one device.
#[derive(Debug)]
pub(super) struct Fp8 {
    settings: Fp8Settings,
    registry: Mutex<Registry>,
    rounds: Rounds,
    /// If sharing the amaxes of the ranks has failed: the reason. They are not shared any more then.
    failure: OnceLock<String>,
}

impl From<Fp8Settings> for Fp8 {
    fn from(settings: Fp8Settings) -> Self {
        Self {
            settings,
            registry: Mutex::default(),
            rounds: Rounds::default(),
            failure: OnceLock::new(),
        }
    }
}

impl Fp8 {
    /// Whether an op runs in fp8.
    pub(super) fn takes(&self, op: Op, inputs: &Inputs) -> bool {
        let Some((product, size)) = product::of(op, inputs) else {
            return false;
        };
        if product == Product::WeightGradient
            && self.settings.recipe.high_precision_weight_gradient()
        {
            return false;
        }
        let names = inputs.scopes::<Name>();
        let names = names.iter().map(|name| name.0.as_str());
        inputs.widest != DType::F64 && self.settings.filter.takes(size, names)
    }

    /// Runs an op that [`takes`](Self::takes) has accepted. `None` if no backend with fp8 is underneath.
    pub(super) fn run(&self, run: &Run<'_>) -> Option<Ran> {
        #[cfg(feature = "flex")]
        if let Some(ran) = self.run_on::<Flex>(run, lift!(Flex)) {
            return Some(ran);
        }
        #[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
        if let Some(ran) = self.run_on::<Cube>(run, lift!(Cube)) {
            return Some(ran);
        }
        None
    }

    fn run_on<B: Backend + Fp8Ops>(&self, run: &Run<'_>, lift: Lift<B>) -> Option<Ran> {
        run.on::<B>(|inputs| self.compute(run, inputs, lift))
    }
}

/// Lets a layered device run burn-fp8's own modules and tensors, with its kernels for the backend underneath. Autocast devices
/// have this already; call it once for a stack of layers of your own.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_amp::{Autocast, Layers, with_fp8_ops};
/// use burn_fp8::{Fp8Format, Fp8Tensor};
///
/// let plain = Device::flex();
/// let layers = Layers::on(plain.clone()).layer(Autocast::bf16().layer(&plain)?);
/// let device = with_fp8_ops(layers).serve()?;
/// let x = Tensor::<2>::from_floats([[1.0, -2.0]], &device);
/// let codes = Fp8Tensor::quantize(x, Fp8Format::E4M3).into_data().codes;
/// assert_eq!(codes, [224.0, -448.0].map(|x| Fp8Format::E4M3.encode(x)));
/// # Ok::<(), burn_amp::LayerError>(())
/// ```
pub fn with_fp8_ops(layers: Layers) -> Layers {
    #[cfg(feature = "flex")]
    let layers = layers.custom_ops::<Flex>(burn_fp8::custom_ops::<Flex>());
    #[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
    let layers = layers.custom_ops::<Cube>(burn_fp8::custom_ops::<Cube>());
    layers
}
