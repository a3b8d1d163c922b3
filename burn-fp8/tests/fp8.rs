//! Every test of the crate in one binary.

mod suite {
    mod backends;
    mod casts;
    mod device;
    mod fixtures;
    mod linear;
    mod matmul;
    mod operand;
    #[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]
    mod precision;
    mod properties;
    mod recipe;
    #[cfg(feature = "remote")]
    mod remote;
    #[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]
    mod routines;
    mod scope;
    mod scope_recipe;
    #[cfg(feature = "cpu")]
    mod sources;
    mod tensor;
    mod tensor_errors;
    mod training;
    mod transformer;
}
