//! The kernels as they run on NVIDIA's GPUs, with tensor-core instructions, executed by [`ptx_machine`].

mod case;
mod casts;
mod elements;
mod products;
mod random;
mod scaling;
mod side;
