//! NCCL: moves tensors from GPU to GPU.
//!
//! The group's own transport remains the control plane. Before anything moves, all ranks check over it
//! that they make the same call, so that NCCL is never entered by some ranks alone. While NCCL
//! works, the transport reports at once when a rank dies. The code that touches CUDA is behind two traits, one for a device's
//! stream and one for tensors. Everything else runs in tests too, over a model of NCCL in host memory.

mod drive;
mod faults;
mod ffi;
mod found;
mod link;
mod plan;
mod search;
mod wire;

#[cfg(feature = "nccl")]
mod cube;
#[cfg(feature = "nccl")]
mod gpu;
#[cfg(test)]
pub(crate) mod model;

#[cfg(feature = "nccl")]
pub(crate) use self::{
    cube::{
        boxed_primitive, cuda_ordinal, primitive_from_cube, primitive_to_cube, tensor_from_cube,
        tensor_to_cube, view_device, view_tensor,
    },
    ffi::Source,
    gpu::{offer, open},
};
pub(crate) use self::{
    ffi::{Resident, run},
    link::Link,
    plan::Errand,
    wire::on_wire,
};
