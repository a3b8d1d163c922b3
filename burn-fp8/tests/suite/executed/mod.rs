//! The kernels as they run on NVIDIA's GPUs, with tensor-core instructions, executed by [`crate::ptx`].

mod casts;
mod products;
mod scaling;
mod side;
