//! A gradient's numbers on the host, in the type in which they travel.

use burn::tensor::{DType, Shape, TensorData};
use half::{bf16, f16};

use crate::{DdpError, Pending, ProcessGroup, ReduceOp};

/// The numbers of a gradient, or of a bucket of them.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Values {
    F64(Vec<f64>),
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

/// Runs the same code on whichever type the values have.
macro_rules! each {
    ($values:expr, $it:ident => $body:expr) => {
        match $values {
            Values::F64($it) => $body,
            Values::F32($it) => $body,
            Values::F16($it) => $body,
            Values::BF16($it) => $body,
        }
    };
}

impl Values {
    /// The numbers of a float tensor.
    ///
    /// # Errors
    ///
    /// [`DdpError::InvalidArgument`] when it holds no floats of 16, 32 or 64 bits.
    pub fn from_data(data: TensorData) -> Result<Self, DdpError> {
        let dtype = data.dtype();
        let unsupported = || DdpError::InvalidArgument(format!("a gradient of type {dtype:?}"));
        match dtype {
            DType::F64 => data.try_into_vec().map(Self::F64),
            DType::F32 => data.try_into_vec().map(Self::F32),
            DType::F16 => data.try_into_vec().map(Self::F16),
            DType::BF16 => data.try_into_vec().map(Self::BF16),
            _ => return Err(unsupported()),
        }
        .map_err(|_| unsupported())
    }

    /// Tensor data of a shape and type.
    ///
    /// # Panics
    ///
    /// Panics if the shape has another number of elements.
    pub fn into_data(self, shape: Shape, dtype: DType) -> TensorData {
        each!(self, it => TensorData::new(it, shape)).convert_dtype(dtype)
    }

    /// Zeros of a type.
    ///
    /// # Errors
    ///
    /// [`DdpError::InvalidArgument`] for types that are no floats of 16, 32 or 64 bits.
    pub fn zeros(len: usize, dtype: DType) -> Result<Self, DdpError> {
        Self::from_data(TensorData::full_dtype([len], 0.0, dtype))
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        each!(self, it => it.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements' type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F64(_) => DType::F64,
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
        }
    }

    /// Copies `other` to the elements from `at` on, converting where the types differ.
    pub(super) fn put(&mut self, at: usize, other: &Self) {
        match (self, other) {
            (Self::F64(into), Self::F64(from)) => into[at..][..from.len()].copy_from_slice(from),
            (Self::F32(into), Self::F32(from)) => into[at..][..from.len()].copy_from_slice(from),
            (Self::F16(into), Self::F16(from)) => into[at..][..from.len()].copy_from_slice(from),
            (Self::BF16(into), Self::BF16(from)) => into[at..][..from.len()].copy_from_slice(from),
            (Self::F16(into), Self::F32(from)) => convert(&mut into[at..], from, f16::from_f32),
            (Self::BF16(into), Self::F32(from)) => {
                convert(&mut into[at..], from, bf16::from_f32);
            }
            (into, from) => unreachable!(
                "gradients of type {:?} are never put in buckets of {:?}",
                from.dtype(),
                into.dtype()
            ),
        }
    }

    /// One element.
    pub(super) fn set(&mut self, at: usize, value: f32) {
        match self {
            Self::F64(it) => it[at] = value.into(),
            Self::F32(it) => it[at] = value,
            Self::F16(it) => it[at] = f16::from_f32(value),
            Self::BF16(it) => it[at] = bf16::from_f32(value),
        }
    }

    /// Whether an element is above zero.
    pub(super) fn is_positive(&self, at: usize) -> bool {
        match self {
            Self::F64(it) => it[at] > 0.0,
            Self::F32(it) => it[at] > 0.0,
            Self::F16(it) => it[at] > f16::ZERO,
            Self::BF16(it) => it[at] > bf16::ZERO,
        }
    }

    /// Some of the elements.
    pub(super) fn slice(&self, at: usize, len: usize) -> Self {
        match self {
            Self::F64(it) => Self::F64(it[at..][..len].to_vec()),
            Self::F32(it) => Self::F32(it[at..][..len].to_vec()),
            Self::F16(it) => Self::F16(it[at..][..len].to_vec()),
            Self::BF16(it) => Self::BF16(it[at..][..len].to_vec()),
        }
    }

    /// Averages them over the ranks, on a thread of the group.
    pub(super) fn average(self, group: &ProcessGroup) -> PendingValues {
        self.average_and(group, || ())
    }

    /// The same; `then` runs on that thread when the averages are there.
    pub(super) fn average_and(
        self,
        group: &ProcessGroup,
        then: impl FnOnce() + Send + 'static,
    ) -> PendingValues {
        match self {
            Self::F64(it) => PendingValues::F64(group.all_reduce_and(it, ReduceOp::Mean, then)),
            Self::F32(it) => PendingValues::F32(group.all_reduce_and(it, ReduceOp::Mean, then)),
            Self::F16(it) => PendingValues::F16(group.all_reduce_and(it, ReduceOp::Mean, then)),
            Self::BF16(it) => PendingValues::BF16(group.all_reduce_and(it, ReduceOp::Mean, then)),
        }
    }
}

fn convert<T>(into: &mut [T], from: &[f32], round: impl Fn(f32) -> T) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = round(*from);
    }
}

/// Values on their way.
pub(super) enum PendingValues {
    F64(Pending<Vec<f64>>),
    F32(Pending<Vec<f32>>),
    F16(Pending<Vec<f16>>),
    BF16(Pending<Vec<bf16>>),
}

impl PendingValues {
    pub(super) fn wait(self) -> Result<Values, DdpError> {
        match self {
            Self::F64(it) => it.wait().map(Values::F64),
            Self::F32(it) => it.wait().map(Values::F32),
            Self::F16(it) => it.wait().map(Values::F16),
            Self::BF16(it) => it.wait().map(Values::BF16),
        }
    }
}
