//! [`NanGuard`]: finds the op that made the first NaN.

use burn::tensor::{DType, Device, Shape};
use burn_layer::{FloatView, Layer, LayerError, Layers, Made, Op, scoped};
use core::fmt;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

/// Checks the result of every op, forward and backward, and remembers the first op that made a NaN from inputs without one, or an
/// infinity from finite inputs, either in computing or in the casts around it (an input of 1e5 does not fit fp16). Each op then
/// waits for the device, so use it to search for a fault, not to train.
///
/// Infinities that the program itself put there (as data, or to mask attention) are not reported. A NaN in the data is reported,
/// and so is a NaN that such infinities lead to, for example in a row that is masked entirely. Memory that the program requested
/// without a value ([`Tensor::empty`](burn::tensor::Tensor::empty)) may hold anything, and is not checked.
///
/// Custom ops and collectives are not checked. An op that takes a NaN from one of them is not reported either, because its inputs
/// contain one.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_amp::{Autocast, NanGuard, Op, named};
///
/// let guard = NanGuard::new();
/// let device = Autocast::bf16().nan_guard(&guard).device(Device::flex())?;
/// let x = Tensor::<1>::from_floats([1.0, -1.0], &device);
/// let y = named("encoder", || x.clone().abs().log() / x.clone().add_scalar(1.0).sqrt());
/// named("decoder", || y.exp() * x.log()).into_data();
///
/// let first = guard.first().unwrap();
/// assert_eq!((first.op, first.path.join(".")), (Op::float_div, "encoder".to_string()));
/// println!("{first}");
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct NanGuard {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    paused: AtomicBool,
    ops: AtomicU64,
    first: Mutex<Option<NonFinite>>,
}

impl NanGuard {
    /// A guard that is switched on.
    pub fn new() -> Self {
        Self::default()
    }

    /// A device that computes like `device`, but is checked by the guard.
    ///
    /// # Errors
    ///
    /// When the device cannot carry a layer.
    pub fn device(&self, device: Device) -> Result<Device, LayerError> {
        Layers::on(device).layer(self.clone()).serve()
    }

    /// The first op that made a NaN or an infinity. Ops run later than they are called, so ask after
    /// [`Device::sync`](burn::tensor::Device::sync) or a readback.
    pub fn first(&self) -> Option<NonFinite> {
        self.shared.first().clone()
    }

    /// Forgets the op that was found and looks for the next.
    pub fn reset(&self) {
        *self.shared.first() = None;
    }

    /// Stops checking until [`resume`](Self::resume). Meanwhile the guard costs nothing.
    pub fn pause(&self) {
        self.shared.paused.store(true, Relaxed);
    }

    /// Checks again after [`pause`](Self::pause).
    pub fn resume(&self) {
        self.shared.paused.store(false, Relaxed);
    }
}

impl Shared {
    fn first(&self) -> MutexGuard<'_, Option<NonFinite>> {
        self.first.lock()
    }
}

/// Names the ops that `body` starts, for a [`NanGuard`] and for the filter and the delayed scaling of `Autocast::fp8`. In
/// backward, products, convolutions and other ops keep the name of their forward, [as in regions](crate::full_precision). Names
/// nest: a name inside another makes a path.
///
/// A name is never freed, nor is a little memory for each thread that uses it and each name around it. So name blocks, not steps
/// or batches.
pub fn named<R>(name: &str, body: impl FnOnce() -> R) -> R {
    static NAMES: LazyLock<Mutex<HashMap<String, Arc<Name>>>> = LazyLock::new(Mutex::default);
    let name = {
        let mut names = NAMES.lock();
        let new = || Arc::new(Name(name.into()));
        names.entry(name.into()).or_insert_with(new).clone()
    };
    scoped(&name, body)
}

pub(super) struct Name(pub(super) String);

/// A NaN or an infinity, and the op that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NonFinite {
    /// The op.
    pub op: Op,
    /// Whether the op made a NaN; otherwise it made infinities only.
    pub nan: bool,
    /// Whether the op's inputs were finite; otherwise it made a NaN of infinities.
    pub of_finite: bool,
    /// The dtype that the op ran in.
    pub dtype: DType,
    /// The dtype that the op's result is stored in.
    pub stored: DType,
    /// The shape of the op's result.
    pub shape: Shape,
    /// The shapes of the op's float inputs.
    pub inputs: Vec<Shape>,
    /// The [names](named) around the op, outermost first.
    pub path: Vec<String>,
    /// How many ops the guard had checked, including this one.
    pub ops: u64,
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.nan { "a NaN" } else { "an infinity" };
        let Self { op, dtype, ops, .. } = self;
        write!(f, "{op} in {dtype:?}")?;
        if self.stored != self.dtype {
            write!(f, ", stored in {:?},", self.stored)?;
        }
        let inputs = match self.of_finite {
            true => "finite inputs",
            false => "infinities",
        };
        write!(f, " made {what} of {inputs}")?;
        if !self.path.is_empty() {
            write!(f, " in {}", self.path.join("."))?;
        }
        let inputs: Vec<_> = self.inputs.iter().map(Shape::to_string).collect();
        let inputs = inputs.join(", ");
        write!(f, " ({inputs} to {}; op {ops})", self.shape)
    }
}

/// Whether infinities in the result of `op` are ones that the program put there.
fn places(op: Op) -> bool {
    matches!(
        op,
        Op::float_from_data
            | Op::float_full
            | Op::float_mask_fill
            | Op::float_pad
            | Op::float_random
    )
}

fn is_finite(tensor: FloatView<'_>) -> bool {
    // If the device fails to compute, the program is told when it reads from the device.
    tensor.is_finite().unwrap_or(true)
}

fn has_nan(tensor: FloatView<'_>) -> bool {
    let data = tensor.read();
    data.is_ok_and(|data| data.iter::<f64>().any(f64::is_nan))
}

impl Layer for NanGuard {
    fn watches(&self) -> bool {
        !self.shared.paused.load(Relaxed) && self.shared.first().is_none()
    }

    fn made(&self, made: &Made<'_>) {
        let ops = self.shared.ops.fetch_add(1, Relaxed) + 1;
        if made.op == Op::float_empty || is_finite(made.output) {
            return;
        }
        let nan = has_nan(made.output);
        let of_finite = made.inputs.iter().copied().all(is_finite);
        let excused = match nan {
            true => !of_finite && made.inputs.iter().copied().any(has_nan),
            false => !of_finite || places(made.op),
        };
        if excused {
            return;
        }
        let names = made.scopes::<Name>().into_iter();
        let found = NonFinite {
            op: made.op,
            nan,
            of_finite,
            dtype: made.dtype,
            stored: made.output.dtype(),
            shape: made.output.shape(),
            inputs: made.inputs.iter().map(FloatView::shape).collect(),
            path: names.map(|name| name.0.clone()).collect(),
            ops,
        };
        log::error!("{found}");
        self.shared.first().get_or_insert(found);
    }
}
