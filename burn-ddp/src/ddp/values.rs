//! The numbers of a gradient on the host, in the type in which they travel.

use burn::tensor::{DType, Shape, TensorData};
use half::{bf16, f16};

use crate::{DdpError, ProcessGroup, ReduceOp};

/// The numbers of a gradient or of a bucket of gradients.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Values {
    F64(Vec<f64>),
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

/// Runs the same code for each type of values.
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
    /// Takes the numbers of a float tensor.
    ///
    /// # Errors
    ///
    /// [`DdpError::InvalidArgument`] when the data are not floats of 16, 32 or 64 bits; [`DdpError::Device`] when they are
    /// read from their device only now (as CubeCL's are), and cannot be.
    pub fn from_data(data: TensorData) -> Result<Self, DdpError> {
        Ok(match data.dtype() {
            DType::F64 => Self::F64(data.try_into_vec()?),
            DType::F32 => Self::F32(data.try_into_vec()?),
            DType::F16 => Self::F16(data.try_into_vec()?),
            DType::BF16 => Self::BF16(data.try_into_vec()?),
            dtype => {
                let unsupported = format!("a gradient of type {dtype:?}");
                return Err(DdpError::InvalidArgument(unsupported));
            }
        })
    }

    /// Converts to tensor data with this shape and type.
    ///
    /// # Panics
    ///
    /// Panics if `shape` has a different number of elements.
    pub fn into_data(self, shape: Shape, dtype: DType) -> TensorData {
        each!(self, it => TensorData::new(it, shape)).convert_dtype(dtype)
    }

    /// `len` zeros of this type.
    ///
    /// # Errors
    ///
    /// [`DdpError::InvalidArgument`] for types that are not floats of 16, 32 or 64 bits.
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

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F64(_) => DType::F64,
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
        }
    }

    /// Converts the numbers to another type, rounded to nearest.
    ///
    /// # Errors
    ///
    /// [`DdpError::InvalidArgument`] for types that are not floats of 16, 32 or 64 bits.
    pub fn cast(self, dtype: DType) -> Result<Self, DdpError> {
        match (self, dtype) {
            (values, dtype) if values.dtype() == dtype => Ok(values),
            (Self::F32(it), DType::F16) => Ok(Self::F16(convert(&it, f16::from_f32))),
            (Self::F32(it), DType::BF16) => Ok(Self::BF16(convert(&it, bf16::from_f32))),
            (Self::F16(it), DType::F32) => Ok(Self::F32(convert(&it, f16::to_f32))),
            (Self::BF16(it), DType::F32) => Ok(Self::F32(convert(&it, bf16::to_f32))),
            (values, dtype) => {
                let len = values.len();
                Self::from_data(values.into_data([len].into(), dtype))
            }
        }
    }

    /// Combines the values over the ranks, as [`ProcessGroup::all_reduce`] does.
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn all_reduce(&mut self, group: &ProcessGroup, op: ReduceOp) -> Result<(), DdpError> {
        each!(self, it => group.all_reduce(it, op))
    }

    /// Multiplies the values by a factor.
    pub fn scale(&mut self, factor: f64) {
        match self {
            Self::F64(it) => it.iter_mut().for_each(|value| *value *= factor),
            Self::F32(it) => it.iter_mut().for_each(|value| *value *= factor as f32),
            Self::F16(it) => it
                .iter_mut()
                .for_each(|value| *value = f16::from_f64(value.to_f64() * factor)),
            Self::BF16(it) => it
                .iter_mut()
                .for_each(|value| *value = bf16::from_f64(value.to_f64() * factor)),
        }
    }

    /// Copies `other`, which has the same type, to the elements from `at` on.
    pub(super) fn put(&mut self, at: usize, other: &Self) {
        match (self, other) {
            (Self::F64(into), Self::F64(from)) => into[at..][..from.len()].copy_from_slice(from),
            (Self::F32(into), Self::F32(from)) => into[at..][..from.len()].copy_from_slice(from),
            (Self::F16(into), Self::F16(from)) => into[at..][..from.len()].copy_from_slice(from),
            (Self::BF16(into), Self::BF16(from)) => into[at..][..from.len()].copy_from_slice(from),
            (into, from) => unreachable!(
                "gradients of type {:?} are never put in buckets of {:?}",
                from.dtype(),
                into.dtype()
            ),
        }
    }

    /// A part of the elements.
    pub(super) fn slice(&self, at: usize, len: usize) -> Self {
        match self {
            Self::F64(it) => Self::F64(it[at..][..len].to_vec()),
            Self::F32(it) => Self::F32(it[at..][..len].to_vec()),
            Self::F16(it) => Self::F16(it[at..][..len].to_vec()),
            Self::BF16(it) => Self::BF16(it[at..][..len].to_vec()),
        }
    }
}

fn convert<T: Copy, U>(from: &[T], round: impl Fn(T) -> U) -> Vec<U> {
    from.iter().map(|value| round(*value)).collect()
}
