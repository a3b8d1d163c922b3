//! Regions: parts of a program that run under another policy than their device.

use super::Policy;
use burn_layer::{Inputs, Plan, scoped};
use parking_lot::Mutex;
use std::sync::{Arc, LazyLock};

/// The precision that a region asks for.
#[derive(Debug)]
pub(super) enum Region {
    /// The dtypes that the program sees.
    Full,
    /// The rules of another policy.
    Policy(Box<Policy>),
}

/// Runs the ops that `body` starts on autocast devices as if without autocast, in the precision that
/// the program sees, like `torch.autocast(enabled=False)`.
///
/// Regions nest and belong to the calling thread. The backward of matrix products, convolutions and every other op that has
/// [backward ops of its own](crate::Op::backward) runs at the precision of its forward, wherever `backward` is called, even in
/// another region. (The rest of backward consists of elementwise ops, sums and moves, which belong to the region that `backward`
/// is called in. [`scoped`](burn_layer::scoped) says how backward is recognized, and when it is not with gradient checkpointing.)
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_amp::{Autocast, full_precision};
///
/// let device = Autocast::bf16().device(Device::flex())?;
/// let x = Tensor::<2>::from_floats([[1.0009765625]], &device);
/// let square = || x.clone().matmul(x.clone()).into_scalar::<f32>();
/// assert_eq!(square(), 1.0);
/// assert_eq!(full_precision(square), 1.0009765625f32 * 1.0009765625);
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
pub fn full_precision<R>(body: impl FnOnce() -> R) -> R {
    static FULL: LazyLock<Arc<Region>> = LazyLock::new(|| Arc::new(Region::Full));
    scoped(&FULL, body)
}

/// Runs the ops that `body` starts on autocast devices under `policy`, like one `torch.autocast` inside
/// another. Otherwise it is like [`full_precision`]. A device that cannot compute in the
/// policy's low dtype keeps its own policy. With [`Policy::o0`] nothing is low, and this is [`full_precision`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_amp::{Autocast, Policy, autocast, full_precision};
///
/// let device = Autocast::bf16().device(Device::flex())?;
/// let x = Tensor::<2>::from_floats([[1.0009765625]], &device); // fp16 holds it, bf16 does not
/// let one = Tensor::<2>::ones([1, 1], &device);
/// let product = || x.clone().matmul(one.clone()).into_scalar::<f32>();
/// let fp16 = full_precision(|| autocast(&Policy::fp16(), product));
/// assert_eq!((product(), fp16), (1.0, 1.0009765625));
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
pub fn autocast<R>(policy: &Policy, body: impl FnOnce() -> R) -> R {
    scoped(&region(policy), body)
}

/// The region of a policy. Equal policies share one region.
fn region(policy: &Policy) -> Arc<Region> {
    static REGIONS: Mutex<Vec<Arc<Region>>> = Mutex::new(Vec::new());
    let mut regions = REGIONS.lock();
    let of_policy =
        |region: &&Arc<Region>| matches!(&***region, Region::Policy(p) if **p == *policy);
    if let Some(region) = regions.iter().find(of_policy) {
        return region.clone();
    }
    let region = Arc::new(Region::Policy(Box::new(policy.clone())));
    regions.push(region.clone());
    region
}

/// The plan of an op in full precision: inputs that are stored low are cast to the dtype that the program sees.
pub(super) fn full(inputs: &Inputs) -> Plan {
    Plan::compute(inputs.nominal)
}
