//! The kernels as NVIDIA's GPUs have them, with their tensor-core instructions, run by [`crate::ptx`].

mod casts;
mod products;
mod scaling;
mod side;
