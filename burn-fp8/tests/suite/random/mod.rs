//! Random casts, products and layers beside a brute-force version in f64, which [`reference`] has.
//!
//! Each test runs the same cases each time: `PROPTEST_CASES` is how many, `PROPTEST_RNG_SEED` picks others.

pub(super) mod casts;
mod check;
mod group;
mod layers;
mod model;
mod products;
pub(super) mod reference;
mod refusals;
mod runner;
mod scaling;
mod steps;
pub(super) mod tensors;

use burn::tensor::FloatDType;
use burn_fp8::{Fp8Format, Granularity};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestCaseError;

pub(super) use check::check;

pub(super) type Outcome = Result<(), TestCaseError>;

pub(super) fn formats() -> impl Strategy<Value = Fp8Format> {
    select(Fp8Format::ALL.to_vec())
}

pub(super) fn dtypes() -> impl Strategy<Value = FloatDType> {
    select(vec![FloatDType::F32, FloatDType::BF16, FloatDType::F16])
}

/// Granularities that matrices can have.
pub(super) fn granularities() -> impl Strategy<Value = Granularity> {
    let side = || select(vec![1usize, 2, 3, 5, 8, 16, 32, 128, 1000]);
    prop_oneof![
        Just(Granularity::Tensor),
        Just(Granularity::Row),
        Just(Granularity::Column),
        (side(), side()).prop_map(|(rows, columns)| Granularity::Block { rows, columns }),
    ]
}

/// A dimension of a matrix: none, one, odd, and about as long as what kernels read at once.
fn side() -> impl Strategy<Value = usize> {
    let near = vec![15usize, 16, 17, 31, 32, 33, 127, 128, 129];
    prop_oneof![1 => Just(0usize), 2 => Just(1), 6 => 2usize..12, 4 => select(near)]
}

/// Flex behind a websocket, with its own kernels or with Burn's standard ops.
#[cfg(feature = "remote")]
fn serve(portable: bool) -> (tokio::runtime::Runtime, burn::tensor::Device) {
    use burn::backend::Flex;
    crate::suite::remote::serve(match portable {
        true => burn_fp8::register_portable_fp8_ops::<Flex>,
        false => burn_fp8::register_fp8_ops::<Flex>,
    })
}
