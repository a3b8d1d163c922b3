//! How a bucket of gradients is averaged over the ranks: plainly, compressed, or by the program's own code.

use std::fmt::Debug;

use burn::tensor::{DType, Shape};

use super::{Values, parameters::Signature};
use crate::{DdpError, ProcessGroup, ReduceOp};

/// A bucket of gradients to be averaged.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientBucket {
    /// Its number in this step. The buckets of a step come in this order on all ranks. A bucket contains the
    /// same gradients on all ranks, and in all steps that use the same parameters.
    pub index: usize,
    /// The gradients, concatenated.
    pub values: Values,
    /// The shape of each gradient.
    pub shapes: Vec<Shape>,
}

/// Averages buckets of gradients over the ranks: PyTorch's communication hooks, for compression or anything
/// else that should happen to gradients on their way. Pass it to [`DdpConfig::hook`](super::DdpConfig::hook).
///
/// A hook runs on its own thread, one bucket after the other, while further buckets are being filled. All ranks
/// must make the same calls on `group`, which is used for nothing else. With an [`Overlap`](super::Overlap),
/// run all backward passes of a step inside [`no_sync`](super::Ddp::no_sync) if there are several: a hook that
/// is not [`plain`](Self::plain) would otherwise average some gradients twice, and ends the job instead. Keep
/// state that lasts from step to step (such as the error of a compression) in a `Mutex`. As in PyTorch, a hook runs in a group
/// of one rank too, unless it is plain.
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
    /// Averages a bucket. The result must have the length and type of the bucket's values, and be the same on all ranks.
    ///
    /// # Errors
    ///
    /// Any error ends the job on all ranks. So does a panic, or a result of another length or type.
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError>;

    /// The type in which gradients of type `dtype` travel, if this hook computes nothing but an average in that
    /// type. With [`Backend::Nccl`](crate::Backend::Nccl), NCCL then computes it on the device, without calling
    /// [`average`](Self::average), if it can for the types of all trained parameters. Default: `None`, so that all buckets go
    /// through the host.
    fn plain(&self, dtype: DType) -> Option<DType> {
        let _ = dtype;
        None
    }
}

/// Whether NCCL can replace a hook for all of these gradients, so that they stay on the device. Otherwise all go through the host:
/// the two kinds of buckets would begin their calls on different threads, on each rank in an order of its own.
pub(super) fn is_plain(hook: &dyn CommHook, trained: &[Signature]) -> bool {
    trained.iter().all(|it| hook.plain(it.dtype).is_some())
}

/// The default hook: an all-reduce in the gradients' own type.
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

/// A 16-bit type in which `f32` gradients travel. Through the host, they are summed in `f32` and rounded once
/// more; NCCL sums them in the 16-bit type. Gradients of other types are averaged in their own type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Half precision: 11 bits of precision, values up to 65,504.
    F16,
    /// Brain float: 8 bits of precision, the range of `f32`.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// NCCL can replace it for f32 alone.
    #[derive(Debug)]
    struct Partly;

    impl CommHook for Partly {
        fn average(&self, _: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
            Ok(bucket.values)
        }

        fn plain(&self, dtype: DType) -> Option<DType> {
            (dtype == DType::F32).then_some(dtype)
        }
    }

    #[test]
    fn a_hook_that_is_plain_for_some_gradients_gets_all_of_them() {
        let trained = |dtypes: &[DType]| -> Vec<Signature> {
            let signature = |&dtype| Signature {
                path: "weight".into(),
                shape: [2, 3].into(),
                dtype,
                trained: true,
            };
            dtypes.iter().map(signature).collect()
        };
        for (dtypes, expected) in [
            (&[DType::F32, DType::F32][..], true),
            (&[DType::F32, DType::BF16], false),
            (&[], true),
        ] {
            assert_eq!(is_plain(&Partly, &trained(dtypes)), expected);
            assert!(is_plain(&Average, &trained(dtypes)));
            assert!(is_plain(&Compression::BF16, &trained(dtypes)));
        }
    }
}
