//! Products of matrices.

use super::{Op, table};
use crate::suite::programs::{
    machine::{LARGEST, Machine},
    picks::Picks,
    value::{Float, ask, both, broadcast, each},
};
use burn::tensor::{Tensor, activation, module, ops::AttentionModuleOptions};

/// The tensor with its last two dimensions swapped.
fn turned(x: Float) -> Float {
    let last = x.rank() - 1;
    each!(x, |x| x.swap_dims(last - 1, last))
}

/// The shape of a product, if there is one.
fn product_shape(x: &[usize], y: &[usize]) -> Option<Vec<usize>> {
    let at = x.len().checked_sub(2)?;
    let mut dims = broadcast(&x[..at], y.get(..at)?)?;
    // Burn's own product on Flex reads beyond an empty batch of matrices.
    if dims.contains(&0) {
        return None;
    }
    dims.extend([x[at], y[at + 1]]);
    let fits = y.len() == x.len() && x[at + 1] == y[at];
    (fits && dims.iter().product::<usize>() <= LARGEST).then_some(dims)
}

/// The product of an operand with one of the machine's tensors, as it is or turned.
fn with_another(machine: &mut Machine, picks: &mut Picks<'_>) -> Option<Float> {
    let x = machine.of_rank_from(2, picks);
    let candidates = machine.pool.iter().rev().cloned();
    let candidates = candidates.filter(|it| it.rank() == x.rank());
    let candidates = candidates.flat_map(|it| [it.clone(), turned(it)]);
    let dims = x.dims();
    let fits = |y: &Float| product_shape(&dims, &y.dims()).is_some();
    let candidates: Vec<Float> = candidates.filter(fits).collect();
    let y = candidates.get(picks.next().checked_rem(candidates.len())?)?;
    Some(both!(x, y.clone(), |x, y| x.matmul(y)))
}

/// An operand that a matrix is multiplied with. Burn's own product on Flex reads beyond an empty batch of matrices.
fn of_matrices(machine: &mut Machine, picks: &mut Picks<'_>) -> Option<Float> {
    let x = machine.of_rank_from(2, picks);
    (!x.dims()[..x.rank() - 2].contains(&0)).then_some(x)
}

/// An operand, the size of its rows, and a size of the rows of a result.
fn with_width(machine: &mut Machine, picks: &mut Picks<'_>) -> Option<(Float, usize, usize)> {
    let x = of_matrices(machine, picks)?;
    let from = x.dims()[x.rank() - 1];
    let width = match picks.below(3) {
        0 => from,
        pick => [0, 3, 4][pick],
    };
    Some((x, from, width))
}

/// A matrix that the machine trains.
fn matrix(machine: &mut Machine, slot: usize, dims: [usize; 2]) -> Tensor<2> {
    machine.parameter(slot, &dims).into_rank(dims)
}

pub(super) const PRODUCTS: &[Op] = table! {
    Exact matmul: |m, p| with_another(m, p);
    Exact matmul_again: |m, p| with_another(m, p);
    Exact by_own_transposition: |m, p| {
        let x = m.of_rank_from(2, p);
        let y = turned(x.clone());
        let (x, y) = if p.flag() { (y, x) } else { (x, y) };
        product_shape(&x.dims(), &y.dims())?;
        Some(both!(x, y, |x, y| x.matmul(y)))
    };
    Exact by_weight: |m, p| {
        let (x, from, width) = with_width(m, p)?;
        let weight = matrix(m, p.below(2), [from, width]);
        Some(each!(x, |x| x.matmul(weight.unsqueeze())))
    };
    Exact by_turned_weight: |m, p| {
        let (x, from, width) = with_width(m, p)?;
        let weight = matrix(m, p.below(2), [width, from]).transpose();
        Some(each!(x, |x| x.matmul(weight.unsqueeze())))
    };
    Exact weight_by: |m, p| {
        let x = of_matrices(m, p)?;
        let from = x.dims()[x.rank() - 2];
        let weight = matrix(m, p.below(2), [p.below(4) + 1, from]);
        Some(each!(x, |x| weight.unsqueeze().matmul(x)))
    };
    Exact by_weights: |m, p| {
        let (x, from, width) = with_width(m, p)?;
        let mut dims = x.dims();
        dims[x.rank() - 2] = from;
        dims[x.rank() - 1] = width;
        let weights = m.parameter(p.below(2), &dims);
        Some(both!(x, weights, |x, y| x.matmul(y)))
    };
    Exact linear: |m, p| {
        let (x, from, width) = with_width(m, p)?;
        let weight = matrix(m, p.below(2), [from, width]);
        let bias = p.flag().then(|| m.vector(p.below(2), width));
        Some(each!(x, |x| module::linear(x, weight, bias)))
    };
    Exact linear_tied: |m, p| {
        let x = of_matrices(m, p)?;
        let size = x.dims()[x.rank() - 1];
        let weight = matrix(m, 0, [size, size]);
        Some(each!(x, |x| {
            let hidden = activation::relu(module::linear(x, weight.clone(), None));
            module::linear(hidden, weight.transpose(), None)
        }))
    };
    Rounded recurrence: |m, p| {
        let Float::R2(x) = m.of_rank(2, p) else {
            return None;
        };
        let width = x.dims()[1];
        let weight = matrix(m, 0, [width, width]);
        let steps = p.below(4) + 2;
        let last = (0..steps).fold(x.clone(), |hidden, _| {
            let gate = activation::sigmoid(x.clone() + hidden.clone());
            let next = (hidden.clone().matmul(weight.clone()) + x.clone()).tanh();
            next * gate.clone() + hidden * (-gate + 1)
        });
        Some(last.into())
    };
    Exact outer: |m, p| {
        let x = m.of_rank(1, p);
        let size = x.elements();
        (size * size <= LARGEST).then(|| {
            let row = x.clone().into_rank([1, size]);
            x.into_rank([size, 1]).matmul(row).into()
        })
    };
    Exact dot: |m, p| {
        let x = m.of_rank(1, p);
        Some(Float::from(ask!(x, |x| {
            let row = x.flatten::<1>(0, -1);
            row.clone().dot(row)
        })))
    };
    Rounded self_attention: |m, p| {
        let x = m.of_rank(3, p);
        let Float::R3(x) = x else {
            return None;
        };
        let [batch, tokens, width] = x.dims();
        if batch == 0 || batch * tokens * tokens > LARGEST {
            return None;
        }
        let [queries, keys, values] = [0, 1, p.below(3)]
            .map(|slot| module::linear(x.clone(), matrix(m, slot, [width, width]), None));
        let scores = queries.matmul(keys.transpose()) / (width as f64).sqrt();
        Some(activation::softmax(scores, 2).matmul(values).into())
    };
    Rounded attention: |m, p| {
        let Float::R4(x) = m.of_rank(4, p) else {
            return None;
        };
        let [batch, heads, tokens, _] = x.dims();
        if batch * heads * tokens * tokens > LARGEST {
            return None;
        }
        let options = AttentionModuleOptions {
            is_causal: p.flag(),
            ..AttentionModuleOptions::default()
        };
        let keys = x.clone() * 0.5;
        Some(module::attention(x.clone(), keys, x, None, None, options).into())
    };
};
