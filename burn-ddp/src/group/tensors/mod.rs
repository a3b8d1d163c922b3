//! Collective calls over tensors on any device.

#[cfg(any(test, feature = "nccl"))]
mod device;
mod host;
mod message;
mod primitive;
mod shapes;

use std::sync::atomic::Ordering;

use burn::tensor::{
    DType, Shape, Tensor,
    kind::{Autodiff, Numeric},
};

#[cfg(feature = "nccl")]
use super::plane::Plane;
use super::{Pending, ProcessGroup, order::Place, plane::Location};
#[cfg(feature = "nccl")]
use crate::nccl::{Link, Source, on_wire, tensor_from_cube, tensor_to_cube};
use crate::{CallKind, DdpError, Element, ElementType, Flaw, ReduceOp};

/// What a collective call does with the ranks' tensors. Parts are counted along the first dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorOp {
    /// Combines them, element by element; all ranks get the result.
    AllReduce(ReduceOp),
    /// Combines them, element by element; `root` gets the result, the others get back their own tensors.
    Reduce {
        /// How elements are combined.
        op: ReduceOp,
        /// The rank that gets the result.
        root: usize,
    },
    /// All ranks get the tensor of `root`.
    Broadcast {
        /// The rank whose tensor it is.
        root: usize,
    },
    /// All ranks get all tensors, concatenated. These may differ in the first dimension.
    AllGather,
    /// Combines them, element by element; rank `i` gets part `i` of the result.
    ReduceScatter(ReduceOp),
    /// Part `i` goes to rank `i`, which concatenates the parts that it gets.
    AllToAll,
}

impl TensorOp {
    fn kind(self) -> CallKind {
        match self {
            Self::AllReduce(_) => CallKind::AllReduce,
            Self::Reduce { .. } => CallKind::Reduce,
            Self::Broadcast { .. } => CallKind::Broadcast,
            Self::AllGather => CallKind::AllGather,
            Self::ReduceScatter(_) => CallKind::ReduceScatter,
            Self::AllToAll => CallKind::AllToAll,
        }
    }

    fn reduction(self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op) | Self::Reduce { op, .. } | Self::ReduceScatter(op) => Some(op),
            Self::Broadcast { .. } | Self::AllGather | Self::AllToAll => None,
        }
    }

    fn root(self) -> usize {
        match self {
            Self::Reduce { root, .. } | Self::Broadcast { root } => root,
            _ => 0,
        }
    }

    /// The number of elements, on which all ranks must agree: of the tensors, or, for an all-gather, of one row of each.
    fn len(self, shapes: &[Shape]) -> usize {
        match self {
            Self::AllGather => shapes.iter().map(row).sum(),
            _ => shapes.iter().map(Shape::num_elements).sum(),
        }
    }

    /// The shape of the result. `rows` are the first dimensions of the ranks' tensors.
    fn result(self, own: &Shape, rows: impl Iterator<Item = usize>, ranks: usize) -> Shape {
        let mut shape = own.clone();
        match self {
            Self::AllGather => shape[0] = rows.sum(),
            Self::ReduceScatter(_) => shape[0] /= ranks,
            _ => {}
        }
        shape
    }
}

/// Runs code with `$t` as the type of a tensor's elements, or returns an error if no call supports it.
macro_rules! with_type {
    ($dtype:expr, $t:ident => $body:expr) => {{
        macro_rules! typed {
            ($type:ty) => {{
                type $t = $type;
                $body
            }};
        }
        match $dtype {
            burn::tensor::DType::F64 => typed!(f64),
            burn::tensor::DType::F32 => typed!(f32),
            burn::tensor::DType::F16 => typed!(half::f16),
            burn::tensor::DType::BF16 => typed!(half::bf16),
            burn::tensor::DType::I64 => typed!(i64),
            burn::tensor::DType::I32 => typed!(i32),
            burn::tensor::DType::I16 => typed!(i16),
            burn::tensor::DType::I8 => typed!(i8),
            burn::tensor::DType::U64 => typed!(u64),
            burn::tensor::DType::U32 => typed!(u32),
            burn::tensor::DType::U16 => typed!(u16),
            burn::tensor::DType::U8 => typed!(u8),
            other => Err(DdpError::InvalidArgument(format!(
                "a tensor of type {other:?}; expected integers or floats"
            ))),
        }
    }};
}

use with_type;

fn element_type(dtype: DType) -> Result<ElementType, DdpError> {
    with_type!(dtype, T => Ok(T::TYPE))
}

/// The type of the tensors of one call, which must have one type and be on one device.
fn type_of_all<const D: usize, K: Numeric>(
    tensors: &[Tensor<D, K>],
) -> Result<ElementType, (Flaw, DdpError)> {
    let (dtype, device) = (tensors[0].dtype(), tensors[0].device());
    for tensor in tensors {
        if tensor.device() != device {
            let error = DdpError::InvalidArgument(format!(
                "tensors on {device:?} and {:?} in one call; expected one device",
                tensor.device()
            ));
            return Err((Flaw::SeveralDevices, error));
        }
        if tensor.dtype() != dtype {
            let error = DdpError::InvalidArgument(format!(
                "tensors of type {dtype:?} and {:?} in one call; expected one type",
                tensor.dtype()
            ));
            return Err((Flaw::SeveralTypes, error));
        }
    }
    element_type(dtype).map_err(|error| (Flaw::TypeUnsupported, error))
}

/// The inputs of a call, prepared for the way in which they travel.
enum Prepared<const D: usize, K: Numeric> {
    Host(Vec<Tensor<D, K>>),
    #[cfg(feature = "nccl")]
    Nccl {
        link: std::sync::Arc<Link>,
        sources: Vec<Source>,
        dtype: ElementType,
    },
}

impl ProcessGroup {
    /// Makes a collective call over a tensor, by NCCL or through the host (see
    /// [`Backend`](crate::Backend)). The result is on the same device, without autodiff history.
    ///
    /// NCCL differs from the host in three ways: `f16` and `bf16` are summed in their own type and rounded along
    /// the way, a NaN may lose a minimum or maximum, and device errors appear as [`DdpError::NcclFailed`].
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_ddp::{LocalGroup, ReduceOp, TensorOp};
    ///
    /// std::thread::scope(|scope| {
    ///     for group in LocalGroup::new(2) {
    ///         scope.spawn(move || {
    ///             let tensor = Tensor::<1>::full([2], group.rank() as f32, &Device::flex());
    ///             let mean = group
    ///                 .collective(TensorOp::AllReduce(ReduceOp::Mean), tensor)
    ///                 .unwrap();
    ///             assert_eq!(mean.into_data().try_to_vec::<f32>().unwrap(), [0.5, 0.5]);
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    ///
    /// A fault of the group: [`DdpError::Diverged`] if a rank's tensor has another shape (except in the first
    /// dimension of an all-gather), or if another rank cannot make the call. [`DdpError::InvalidArgument`] for
    /// a root that is not a rank, the mean of integers, a type that is neither integers nor floats of 16, 32 or
    /// 64 bits, a first dimension that is not a multiple of the world size if the call divides it into parts,
    /// or an all-gather of rows without elements. Those of [`tensor_backend`](Self::tensor_backend).
    pub fn collective<const D: usize, K: Numeric + Autodiff + 'static>(
        &self,
        op: TensorOp,
        tensor: Tensor<D, K>,
    ) -> Result<Tensor<D, K>, DdpError> {
        let mut results = self.collective_many(op, vec![tensor])?;
        Ok(results.pop().expect("a result for each tensor"))
    }

    /// The same on a thread of the group; returns at once (except for the first time, when the ranks agree on
    /// how tensors travel). Calls are made in the order in which they were submitted.
    ///
    /// # Errors
    ///
    /// Those of [`collective`](Self::collective); [`Pending::wait`] returns the faults.
    pub fn collective_async<const D: usize, K: Numeric + Autodiff + 'static>(
        &self,
        op: TensorOp,
        tensor: Tensor<D, K>,
    ) -> Result<Pending<Tensor<D, K>>, DdpError> {
        self.collective_then(op, tensor, || ())
    }

    /// The same; `then` runs when the result is there.
    pub(crate) fn collective_then<const D: usize, K: Numeric + Autodiff + 'static>(
        &self,
        op: TensorOp,
        tensor: Tensor<D, K>,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<Pending<Tensor<D, K>>, DdpError> {
        let prepared = self.prepare(op, vec![tensor])?;
        let group = self.for_a_call();
        let _submitting = self.submitting();
        let place = self.inner.order.take();
        Ok(self.submit_to(&self.inner.worker, move || {
            let mut results = group.complete(op, prepared, Some(place))?;
            then();
            Ok(results.pop().expect("a result for each tensor"))
        }))
    }

    /// The same over several tensors of one type and on one device, as one call: the ranks compare all shapes at once, and
    /// NCCL gets the tensors as one group, which is faster than separate calls. All ranks pass the same number of tensors.
    ///
    /// # Errors
    ///
    /// Those of [`collective`](Self::collective), and [`DdpError::InvalidArgument`] when the tensors differ in
    /// type or device. If only some ranks make this mistake or pass no tensors, the others get a
    /// [`DdpError::Diverged`] that says so.
    pub fn collective_many<const D: usize, K: Numeric + Autodiff + 'static>(
        &self,
        op: TensorOp,
        tensors: Vec<Tensor<D, K>>,
    ) -> Result<Vec<Tensor<D, K>>, DdpError> {
        if tensors.is_empty() {
            let nothing = self.meet_over(op.kind(), Flaw::NoTensors);
            return nothing.map(|()| Vec::new());
        }
        let prepared = self.prepare(op, tensors)?;
        self.complete(op, prepared, None)
    }

    fn prepare<const D: usize, K: Numeric + Autodiff + 'static>(
        &self,
        op: TensorOp,
        tensors: Vec<Tensor<D, K>>,
    ) -> Result<Prepared<D, K>, DdpError> {
        let dtype =
            type_of_all(&tensors).map_err(|(flaw, error)| self.refuse(op.kind(), flaw, error))?;
        let shapes: Vec<Shape> = tensors.iter().map(|tensor| tensor.shape()).collect();
        if let Err(error) = self.check_tensors(op, dtype, &shapes) {
            return Err(self.refuse_shapes(op, dtype, &shapes, error));
        }
        let plane = self.plane(&Location::of_device(&tensors[0].device()))?;
        #[cfg(feature = "nccl")]
        if let Plane::Nccl(link) = &plane
            && on_wire(dtype, op.reduction().is_some()).is_some()
        {
            let sources: Option<Vec<_>> = tensors.iter().cloned().map(tensor_to_cube).collect();
            let sources = sources.expect("a tensor on a CUDA device is CubeCL's");
            let (rank, ranks) = (self.rank(), self.world_size());
            let sources = Source::all(sources, |shape| op.room(shape, rank, ranks));
            return Ok(Prepared::Nccl {
                link: link.clone(),
                sources: sources.map_err(|error| self.give_up(error))?,
                dtype,
            });
        }
        let _ = (plane, dtype);
        Ok(Prepared::Host(tensors))
    }

    /// Makes the call, at a place in the queue that was taken before, or at the next one once the elements have been read.
    fn complete<const D: usize, K: Numeric>(
        &self,
        op: TensorOp,
        prepared: Prepared<D, K>,
        place: Option<Place>,
    ) -> Result<Vec<Tensor<D, K>>, DdpError> {
        match prepared {
            Prepared::Host(tensors) => self.through_host(place, op, tensors),
            #[cfg(feature = "nccl")]
            Prepared::Nccl {
                link,
                sources,
                dtype,
            } => {
                let place = place.unwrap_or_else(|| self.inner.order.take());
                let results = self.by_nccl(place, op, &link, sources, dtype)?.into_iter();
                Ok(results
                    .map(|it| tensor_from_cube(it.into_tensor()))
                    .collect())
            }
        }
    }

    fn count(&self, op: TensorOp, bytes: u64) {
        if matches!(op, TensorOp::AllReduce(_)) {
            let counters = &self.inner.counters;
            counters.bytes_reduced.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}

/// The number of elements for each index of the first dimension.
fn row(shape: &Shape) -> usize {
    shape.iter().skip(1).product()
}
