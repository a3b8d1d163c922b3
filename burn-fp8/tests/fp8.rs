//! Every test of the crate in one binary.

mod suite {
    mod backends;
    mod casts;
    mod device;
    mod fixtures;
    mod linear;
    mod matmul;
    mod operand;
    mod properties;
    mod recipe;
    #[cfg(feature = "remote")]
    mod remote;
    mod scope;
    mod tensor;
    mod training;
    mod transformer;
}
