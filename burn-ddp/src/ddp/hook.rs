//! How a bucket of gradients is averaged over the ranks: plainly, compressed, or as a program likes.

use std::fmt::Debug;

use burn::tensor::DType;

use super::Values;
use crate::{DdpError, ProcessGroup, ReduceOp};

/// A bucket of gradients that is to be averaged.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientBucket {
    /// Its number in this step. The buckets of a step come in the order of their numbers, on all
    /// ranks alike. Which gradients are in it is the same on all ranks too, and in all steps that use
    /// the same parameters.
    pub index: usize,
    /// The gradients, one after the other.
    pub values: Values,
    /// The number of elements of each of them.
    pub lens: Vec<usize>,
}

/// Averages buckets of gradients over the ranks: PyTorch's communication hooks, for compression and
/// whatever else should happen to gradients on their way. Give one to
/// [`DdpConfig::hook`](super::DdpConfig::hook).
///
/// It runs on a thread of its own, one bucket after the other, while others are being filled. All ranks
/// must make the same calls on `group`, which nobody else uses. With an [`Overlap`](super::Overlap), several backward passes
/// of a step belong inside [`no_sync`](super::Ddp::no_sync): where one has been averaged before others came, a hook
/// that is not [`plain`](Self::plain) ends the job instead of averaging it twice. State that it keeps from step to step
/// (what a compression left out, for instance) goes in a `Mutex`.
///
/// ```
/// use burn_ddp::{CommHook, DdpConfig, DdpError, GradientBucket, ProcessGroup, ReduceOp, Values};
///
/// /// The sum of the gradients, for a program that divides its losses by the whole batch itself.
/// #[derive(Debug)]
/// struct Sum;
///
/// impl CommHook for Sum {
///     fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
///         let mut values = bucket.values;
///         values.all_reduce(group, ReduceOp::Sum)?;
///         Ok(values)
///     }
/// }
///
/// let config = DdpConfig::new().hook(Sum);
/// # let _ = config;
/// ```
pub trait CommHook: Debug + Send + Sync + 'static {
    /// The averages: as many numbers, of the same type, and the same on all ranks.
    ///
    /// # Errors
    ///
    /// Any error ends the job on all ranks, as does a panic, or a result of another length or type.
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError>;

    /// The type in which gradients of type `dtype` travel, if this hook is no more than an average taken
    /// in that type. Then [`Backend::Nccl`](crate::Backend::Nccl) does the same on the device, and
    /// [`average`](Self::average) is not called. Default: `None`, which brings every bucket to the host.
    fn plain(&self, dtype: DType) -> Option<DType> {
        let _ = dtype;
        None
    }
}

/// The hook that is used when none is chosen: an all-reduce in the gradients' own type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Average;

impl CommHook for Average {
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
        let mut values = bucket.values;
        values.all_reduce(group, ReduceOp::Mean)?;
        Ok(values)
    }

    fn plain(&self, dtype: DType) -> Option<DType> {
        Some(dtype)
    }
}

/// A 16-bit type in which `f32` gradients travel. They are summed in `f32` and rounded once more.
/// Gradients of other types are averaged as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Half precision: 11 bits of precision, values up to 65,504.
    F16,
    /// Brain floats: 8 bits of precision, the range of `f32`.
    BF16,
}

impl Compression {
    fn carried(self, dtype: DType) -> DType {
        match (dtype, self) {
            (DType::F32, Self::F16) => DType::F16,
            (DType::F32, Self::BF16) => DType::BF16,
            _ => dtype,
        }
    }
}

impl CommHook for Compression {
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
        let dtype = bucket.values.dtype();
        let mut values = bucket.values.cast(self.carried(dtype))?;
        values.all_reduce(group, ReduceOp::Mean)?;
        values.cast(dtype)
    }

    fn plain(&self, dtype: DType) -> Option<DType> {
        Some(self.carried(dtype))
    }
}
