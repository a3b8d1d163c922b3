//! All tests of the crate, in one binary.

mod suite {
    mod backends;
    mod casts;
    mod device;
    mod empty;
    #[cfg(feature = "cpu")]
    mod executed;
    mod fixtures;
    #[cfg(feature = "cpu")]
    mod gpu;
    mod linear;
    mod matmul;
    #[cfg(feature = "cpu")]
    mod nvrtc;
    mod operand;
    #[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
    mod precision;
    mod random;
    mod recipe;
    #[cfg(feature = "remote")]
    mod remote;
    #[cfg(feature = "remote")]
    mod remote_blocks;
    #[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
    mod routines;
    mod scope;
    mod scope_recipe;
    #[cfg(feature = "cpu")]
    mod sources;
    mod tensor;
    mod tensor_errors;
    mod torchao;
    mod training;
    mod transformer;
}
