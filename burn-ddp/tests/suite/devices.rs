//! The plain devices that the tests run on.

#[path = "../../../burn-layer/tests/suite/cube.rs"]
mod cube;

pub(crate) use cube::{cube_devices, wgpu};
