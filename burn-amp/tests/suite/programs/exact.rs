//! [`Exact`]: whether 16 bits hold all that a program computes.

use super::{machine::Seen, program::Program, train};
use burn::tensor::Device;
use burn_layer::{Layer, Layers, Made};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Watches whether all results of ops are numbers that bf16 and fp16 hold, so that nothing would be rounded.
#[derive(Clone, Debug, Default)]
struct Exact(Arc<AtomicBool>);

impl Layer for Exact {
    fn watches(&self) -> bool {
        true
    }

    fn made(&self, made: &Made<'_>) {
        let Ok(data) = made.output.read() else {
            return;
        };
        // Of the first eight bits of a number in bf16, and from 2^-14 on, fp16 has all.
        let is_exact = |number: f32| {
            let size = number.abs();
            number.to_bits() << 16 == 0 && (size == 0.0 || (6.2e-5..65504.0).contains(&size))
        };
        if !data.iter::<f32>().all(is_exact) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// What the program sees in f32, if all that it computes is exact in 16 bits.
pub(super) fn exact(program: &Program) -> Option<Seen> {
    let watch = Exact::default();
    let lease = Layers::on(Device::flex()).layer(watch.clone()).lease();
    let lease = lease.expect("Flex carries layers");
    let seen = train::run(program, &lease.device());
    (!watch.0.load(Ordering::Relaxed)).then_some(seen)
}
