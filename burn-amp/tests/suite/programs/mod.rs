//! Random programs: what they see on an autocast device is what they see on the plain one.
//!
//! A [program](program::Program) is data, which proptest makes and shrinks: some tensors, steps, and how it trains. A
//! [machine](machine::Machine) runs it on any device and notes what it [sees](machine::Seen). [`ops`] has the ops that programs are
//! made of, as tables. Each test runs the same programs each time: `PROPTEST_CASES` is how many, `PROPTEST_RNG_SEED` picks others.

mod check;
mod exact;
mod machine;
mod ops;
mod picks;
mod precision;
mod program;
mod properties;
mod train;
mod value;
