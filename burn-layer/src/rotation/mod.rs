//! The kernel of rotary position encodings, on CubeCL's devices: it reads pairs of neighbours, and writes them turned.

mod fused;
mod kernel;

use burn_backend::{Backend, tensor::FloatTensor};
use burn_cubecl::{Cube, CubeBackend, CubeDevice, tensor::CubeTensor};
use core::any::Any;

use crate::{
    ops::{Rotations, Turn},
    rowwise::most,
};

/// How pairs are turned, if the device is one of CubeCL's.
pub(crate) fn rotations_on<B: Backend>(device: &B::Device) -> Option<Rotations<B>> {
    let device = (device as &dyn Any).downcast_ref::<CubeDevice>()?;
    let rotations = Rotations::<Cube> {
        most: most(device),
        turn: Cube::turn,
    };
    (&rotations as &dyn Any).downcast_ref().copied()
}

/// A backend with this kernel.
trait Rotates: Backend {
    fn turn(turn: Turn<Self>) -> FloatTensor<Self>;
}

impl Rotates for CubeBackend {
    fn turn(turn: Turn<Self>) -> CubeTensor {
        kernel::turn(turn)
    }
}
