//! NCCL: tensors go from GPU to GPU.
//!
//! The group's own transport remains the control plane. Before anything moves, all ranks show each other
//! on it that they make the same call, so that NCCL is never entered by some ranks alone; and while NCCL
//! works, it tells at once when a rank dies. The pure parts (where the library may be, what calls make up
//! a collective, time limits) know nothing of devices and are tested without one.

mod drive;
mod ffi;
mod found;
mod plan;
mod search;
mod wire;

#[cfg(feature = "nccl")]
mod cube;
#[cfg(feature = "nccl")]
mod link;

#[cfg(feature = "nccl")]
pub(crate) use self::{
    cube::{
        boxed_primitive, cuda_ordinal, primitive_from_cube, primitive_to_cube, tensor_from_cube,
        tensor_to_cube, view_device, view_tensor,
    },
    ffi::{Source, run},
    link::{Link, offer},
    plan::Errand,
    wire::on_wire,
};
