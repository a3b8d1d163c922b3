//! Elementwise ops on two tensors.

use super::{Op, table};
use crate::suite::programs::{
    machine::Machine,
    picks::Picks,
    value::{Float, both},
};
use burn::tensor::Tensor;

/// Two operands of which one is broadcast to the other, or not, in either order.
fn two(machine: &mut Machine, picks: &mut Picks<'_>) -> (Float, Float) {
    let x = machine.float(picks);
    let y = machine.like(&x, picks);
    match picks.flag() {
        true => (y, x),
        false => (x, y),
    }
}

/// The tensor in the shape of another.
fn expanded<const D: usize>(x: Tensor<D>, like: &Tensor<D>) -> Tensor<D> {
    x.expand(like.dims())
}

/// A table of ops on two tensors.
macro_rules! pairs {
    ($($kind:ident $name:ident: |$x:ident, $y:ident| $body:expr;)*) => {
        table! {
            $($kind $name: |m, p| {
                let (x, y) = two(m, p);
                Some(both!(x, y, |$x, $y| $body))
            };)*
            // Neither of two operands is broadcast, so that what is compared with what is known.
            Exact choose: |m, p| {
                let bound = m.number(p);
                let x = m.float(p);
                let y = m.like(&x, p);
                (x.dims() == y.dims()).then(|| both!(x, y, |x, y| {
                    let mask = y.clone().greater_scalar(bound);
                    x.mask_where(mask, y)
                }))
            };
            Exact cat: |m, p| {
                let x = m.float(p);
                let y = m.like(&x, p);
                let dim = p.below(x.rank());
                (x.dims() == y.dims()).then(|| both!(x, y, |x, y| Tensor::cat(vec![x, y], dim)))
            };
            Exact cat_three: |m, p| {
                let x = m.float(p);
                let y = m.like(&x, p);
                let dim = p.below(x.rank());
                (x.dims() == y.dims()).then(|| both!(x, y, |x, y| {
                    Tensor::cat(vec![x.clone(), y, x], dim)
                }))
            };
            Exact cross: |m, p| {
                let x = m.float(p);
                let y = m.like(&x, p);
                let dim = x.dims().iter().position(|&size| size == 3)?;
                (x.dims() == y.dims()).then(|| both!(x, y, |x, y| x.cross(y, dim)))
            };
            Exact expand: |m, p| {
                let x = m.float(p);
                let y = m.like(&x, p);
                let (dims, from) = (x.dims(), y.dims());
                let fits = dims.iter().zip(&from).all(|(to, from)| to == from || *from == 1);
                fits.then(|| both!(x, y, |x, y| expanded(y, &x)))
            };
        }
    };
}

pub(super) const PAIRS: &[Op] = pairs! {
    Exact add: |x, y| x + y;
    Exact sub: |x, y| x - y;
    Exact mul: |x, y| x * y;
    Exact mul_add: |x, y| x.clone() * y + x;
    Exact max_pair: |x, y| x.max_pair(y);
    Exact min_pair: |x, y| x.min_pair(y);
    Exact greater: |x, y| x.greater(y).float();
    Exact equal: |x, y| x.equal(y).float();
    Rounded div: |x, y| x / (y.abs() + 0.5);
    Rounded remainder: |x, y| x % (y.abs() + 0.5);
    Rounded powf: |x, y| (x.abs() + 0.5).powf(y.clamp(-2.0, 2.0));
    Rounded hypot: |x, y| (x + 0.1).hypot(y);
    Rounded atan2: |x, y| x.atan2(y.abs() + 0.5);
};
