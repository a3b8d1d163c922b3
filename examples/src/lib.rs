//! Code that the examples of this workspace share: images in the CIFAR-10 binary layout, the CIFAR ResNet, a transformer, a
//! learning-rate schedule, metrics with a plot, and a progress bar.
//!
//! The programs themselves are next to this folder: `cargo run --release --example cifar_resnet_ddp -- --help`.

/// The samples of the workspace's README, as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

pub mod batch;
pub mod device;
pub mod digits;
pub mod images;
pub mod metrics;
pub mod parameters;
pub mod plot;
pub mod progress;
pub mod resnet;
pub mod schedule;
pub mod text;
pub mod transformer;
