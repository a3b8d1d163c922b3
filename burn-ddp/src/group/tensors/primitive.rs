//! Calls with the primitive tensors of a backend, for operations that are built from the backend's own.

use burn::backend::{
    Backend,
    tensor::{Device, FloatTensor},
};

use super::TensorOp;
#[cfg(feature = "nccl")]
use crate::group::plane::Plane;
#[cfg(feature = "nccl")]
use crate::nccl::{Source, primitive_from_cube, primitive_to_cube};
use crate::{DdpError, ProcessGroup, group::Location};

impl ProcessGroup {
    /// Whether calls leave float tensors of this device on it.
    pub(crate) fn primitives_stay<B: Backend>(&self, device: &Device<B>) -> Result<bool, DdpError> {
        self.stays(&Location::of_primitives::<B>(device))
    }

    /// Makes a call over a tensor that stays on its device.
    ///
    /// # Panics
    ///
    /// Panics if tensors of that device do not stay on it.
    pub(crate) fn collective_primitive<B: Backend>(
        &self,
        op: TensorOp,
        tensor: FloatTensor<B>,
    ) -> Result<FloatTensor<B>, DdpError> {
        #[cfg(feature = "nccl")]
        {
            use burn::backend::TensorMetadata;
            let location = Location::of_primitives::<B>(&tensor.device());
            if let Plane::Nccl(link) = self.plane(&location)? {
                let dtype = super::element_type(tensor.dtype())?;
                let tensor = primitive_to_cube(&tensor).expect("a tensor on CUDA is CubeCL's");
                let (rank, ranks) = (self.rank(), self.world_size());
                let sources = Source::all(vec![tensor], |shape| op.room(shape, rank, ranks));
                let sources = sources.map_err(|error| self.give_up(error))?;
                let place = self.inner.order.take();
                let mut results = self.by_nccl(place, op, &link, sources, dtype)?;
                let result = results.pop().expect("a result for each tensor");
                return Ok(
                    primitive_from_cube(result.into_tensor()).expect("it came from this backend")
                );
            }
        }
        unreachable!("{op:?} of a tensor {tensor:?} that does not stay on its device")
    }
}
