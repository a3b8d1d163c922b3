//! Softmax and norms.

use super::{Op, table};
use crate::suite::programs::{
    machine::Machine,
    picks::Picks,
    value::{Float, each},
};
use burn::tensor::{Tensor, activation, module};

/// An operand, and a gain and an offset for each place along that dimension from its end.
fn with_affine(
    machine: &mut Machine,
    picks: &mut Picks<'_>,
    from_end: usize,
) -> (Float, [Tensor<1>; 2]) {
    let x = machine.of_rank_from(from_end, picks);
    let size = x.dims()[x.rank() - from_end];
    let slots = [0, picks.below(2)];
    (x, slots.map(|slot| machine.vector(slot, size)))
}

pub(super) const NORMS: &[Op] = table! {
    Rounded softmax: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        Some(each!(x, |x| activation::softmax(x, dim)))
    };
    Rounded softmax_last: |m, p| {
        let x = m.float(p);
        let last = x.rank() - 1;
        Some(each!(x, |x| activation::softmax(x, last)))
    };
    Rounded log_softmax: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        Some(each!(x, |x| activation::log_softmax(x, dim)))
    };
    Rounded softmin: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        Some(each!(x, |x| activation::softmin(x, dim)))
    };
    Rounded quiet_softmax: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        Some(each!(x, |x| activation::quiet_softmax(x, dim)))
    };
    Rounded layer_norm: |m, p| {
        let (x, [gain, offset]) = with_affine(m, p, 1);
        let offset = p.flag().then_some(offset);
        Some(each!(x, |x| module::layer_norm(x, gain, offset, 1e-5)))
    };
    Rounded batch_norm: |m, p| {
        let x = m.of_rank_from(2, p);
        let channels = x.dims()[1];
        let [gain, offset] = [0, 1].map(|slot| m.vector(slot, channels));
        Some(each!(x, |x| module::batch_norm_train(x, gain, offset, 1e-5).output))
    };
    Rounded batch_norm_inference: |m, p| {
        let x = m.of_rank_from(2, p);
        let channels = x.dims()[1];
        let [gain, offset, mean] = [0, 1, 0].map(|slot| m.vector(slot, channels));
        let variance = m.vector(2, channels).abs() + 0.5;
        Some(each!(x, |x| module::batch_norm(x, gain, offset, mean, variance, 1e-5)))
    };
    Rounded rms_norm: |m, p| {
        let (x, [gain, _]) = with_affine(m, p, 1);
        let last = x.rank() - 1;
        Some(each!(x, |x| {
            let size = (x.clone().square().mean_dim(last) + 1e-5).sqrt();
            (x / size) * gain.unsqueeze()
        }))
    };
    Rounded l2_normalize: |m, p| {
        let x = m.float(p);
        let last = x.rank() - 1;
        Some(each!(x, |x| {
            let norm = x.clone().powf_scalar(2.0).sum_dim(last).sqrt();
            x / norm.clamp_min(1e-6)
        }))
    };
    Exact bias: |m, p| {
        let (x, [_, offset]) = with_affine(m, p, 1);
        Some(each!(x, |x| x + offset.unsqueeze()))
    };
    Exact gain: |m, p| {
        let (x, [gain, _]) = with_affine(m, p, 1);
        Some(each!(x, |x| x * gain.unsqueeze()))
    };
    Rounded prelu: |m, p| {
        let x = m.of_rank_from(2, p);
        let channels = x.dims()[1];
        let slope = m.vector(0, channels);
        Some(each!(x, |x| activation::prelu(x, slope)))
    };
};
