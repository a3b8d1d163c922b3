//! Ops that move elements: shapes, slices and indices.

use super::{Op, table};
use crate::suite::programs::{
    machine::Machine,
    picks::Picks,
    value::{Float, ask, both, each},
};
use burn::tensor::{Bool, IndexingUpdateOp, Int, Tensor, module, ops::PadMode};
use core::ops::Range;

/// Shapes of that many elements, of several ranks.
fn shapes(elements: usize) -> Vec<Vec<usize>> {
    let factor = [4, 3, 2]
        .into_iter()
        .find(|it| elements.is_multiple_of(*it));
    let factor = factor.unwrap_or(1);
    let rest = elements / factor;
    let small = if rest.is_multiple_of(2) { 2 } else { 1 };
    vec![
        vec![elements],
        vec![1, elements],
        vec![elements, 1],
        vec![factor, rest],
        vec![rest, factor],
        vec![small, rest / small, factor],
        vec![rest / small, 1, small * factor],
        vec![1, rest, factor],
        vec![small, rest / small, 1, factor],
        vec![factor, small, rest / small, 1],
    ]
}

/// A part of a dimension.
fn part(size: usize, picks: &mut Picks<'_>) -> Range<usize> {
    let start = picks.below(size.max(1));
    let length = picks.below(size - start) + 1;
    start..start + length
}

pub(super) const SHAPES: &[Op] = table! {
    Exact reshape: |m, p| {
        let x = m.float(p);
        let shapes = shapes(x.elements());
        Some(x.in_shape(&shapes[p.below(shapes.len())]))
    };
    Exact flatten_rows: |m, p| {
        let x = m.float(p);
        let dims = x.dims();
        let last = *dims.last()?;
        let rows = x.elements() / last.max(1);
        Some(x.in_shape(&[rows, last]))
    };
    Exact squeeze_ones: |m, p| {
        let x = m.float(p);
        let dims: Vec<usize> = x.dims().into_iter().filter(|&size| size != 1).collect();
        (!dims.is_empty()).then(|| x.in_shape(&dims))
    };
    Exact unsqueeze: |m, p| {
        let x = m.float(p);
        let mut dims = x.dims();
        dims.insert(p.below(dims.len() + 1), 1);
        (dims.len() <= 4).then(|| x.in_shape(&dims))
    };
    Exact transpose: |m, p| Some(match m.of_rank_from(2, p) {
        Float::R1(x) => x.into(),
        Float::R2(x) => x.transpose().into(),
        Float::R3(x) => x.transpose().into(),
        Float::R4(x) => x.transpose().into(),
    });
    Exact swap_dims: |m, p| {
        let x = m.float(p);
        let [a, b] = [p.below(x.rank()), p.below(x.rank())];
        Some(each!(x, |x| x.swap_dims(a, b)))
    };
    Exact permute: |m, p| Some(match m.float(p) {
        Float::R1(x) => x.permute([0]).into(),
        Float::R2(x) => x.permute([1, 0]).into(),
        Float::R3(x) => {
            let orders = [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
            x.permute(orders[p.below(orders.len())]).into()
        }
        Float::R4(x) => {
            let orders = [[0, 2, 1, 3], [0, 1, 3, 2], [2, 3, 0, 1], [0, 2, 3, 1], [3, 0, 1, 2]];
            x.permute(orders[p.below(orders.len())]).into()
        }
    });
    Exact flip: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        Some(each!(x, |x| x.flip([dim])))
    };
    Exact repeat_dim: |m, p| {
        let x = m.float(p);
        let (dim, times) = (p.below(x.rank()), p.below(3) + 1);
        Some(each!(x, |x| x.repeat_dim(dim, times)))
    };
    Exact roll: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        Some(each!(x, |x| x.roll_dim(1, dim)))
    };
};

/// Places along a dimension, some of them several times.
fn places(machine: &Machine, size: usize, picks: &mut Picks<'_>) -> Tensor<1, Int> {
    let count = picks.below(4) + 1;
    let places: Vec<i64> = (0..count).map(|_| picks.below(size) as i64).collect();
    Tensor::from_ints(places.as_slice(), &machine.device())
}

/// An operand, one of its dimensions, and places along it.
fn indexed(machine: &mut Machine, picks: &mut Picks<'_>) -> Option<(Float, usize, Tensor<1, Int>)> {
    let x = machine.float(picks);
    let dim = picks.below(x.rank());
    let size = x.dims()[dim];
    (size > 0).then(|| {
        let places = places(machine, size, picks);
        (x, dim, places)
    })
}

pub(super) const PLACES: &[Op] = table! {
    Exact slice: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        let part = part(x.dims()[dim], p);
        Some(each!(x, |x| x.slice_dim(dim, part)))
    };
    Exact every_second: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        Some(each!(x, |x| x.slice_dim(dim, burn::tensor::s![..;2])))
    };
    Exact slice_assign: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        let part = part(x.dims()[dim], p);
        Some(each!(x, |x| {
            let mut ranges = x.dims().map(|size| 0..size);
            ranges[dim] = part;
            let value = x.clone().slice(ranges.clone()) * 2;
            x.slice_assign(ranges, value)
        }))
    };
    Exact slice_fill: |m, p| {
        let number = m.number(p);
        let x = m.float(p);
        let part = part(x.dims()[0], p);
        Some(each!(x, |x| x.slice_fill([part], number)))
    };
    Exact chunks: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        let even = x.dims()[dim].is_multiple_of(2);
        even.then(|| each!(x, |x| {
            let mut halves = x.chunk(2, dim).into_iter();
            let first = halves.next().expect("a half");
            halves.fold(first, |a, b| a - b)
        }))
    };
    Exact pad: |m, p| {
        let number = m.number(p);
        let x = m.float(p);
        let [before, after] = [p.below(3), p.below(2)];
        Some(each!(x, |x| x.pad([(before, after)], PadMode::Constant(number as f32))))
    };
    Exact pad_edge: |m, p| Some(each!(m.float(p), |x| x.pad([(1, 1)], PadMode::Edge)));
    Exact select: |m, p| {
        let (x, dim, places) = indexed(m, p)?;
        Some(each!(x, |x| x.select(dim, places)))
    };
    Exact select_assign: |m, p| {
        let (x, dim, places) = indexed(m, p)?;
        Some(each!(x, |x| {
            let values = x.clone().select(dim, places.clone());
            x.select_assign(dim, places, values, IndexingUpdateOp::Add)
        }))
    };
    Exact gather: |m, p| {
        let x = m.float(p);
        let dim = p.below(x.rank());
        Some(each!(x, |x| {
            let places = x.clone().argsort(dim);
            x.gather(dim, places)
        }))
    };
    Exact scatter: |m, p| {
        let x = m.float(p);
        let y = m.like(&x, p);
        let dim = p.below(x.rank());
        (x.dims() == y.dims()).then(|| both!(x, y, |x, y| {
            let last = x.dims()[dim] as i64 - 1;
            let places = y.clone().clamp(0.0, last as f64).int();
            x.scatter(dim, places, y, IndexingUpdateOp::Add)
        }))
    };
    Exact mask_select: |m, p| {
        let bound = m.number(p);
        let x = ask!(m.float(p), |x| {
            let mask = x.clone().greater_scalar(bound);
            x.mask_select(mask)
        });
        (x.dims()[0] > 0).then(|| x.into())
    };
    Exact upper_triangle: |m, p| Some(match m.of_rank_from(2, p) {
        Float::R2(x) => x.triu(0).into(),
        Float::R3(x) => x.triu(1).into(),
        other => other,
    });
    Exact causal_fill: |m, p| {
        let number = m.number(p);
        let x: Float = m.of_rank(2, p);
        let Float::R2(x) = x else {
            return None;
        };
        let mask = Tensor::<2, Bool>::tril_mask(x.dims(), 0, &m.device());
        Some(x.mask_fill(mask, number).into())
    };
    Exact embedding: |m, p| {
        let width = p.below(4) + 1;
        let Float::R2(table) = m.parameter(p.below(2), &[5, width]) else {
            return None;
        };
        let places: Vec<i64> = (0..6).map(|_| p.below(5) as i64).collect();
        let places = Tensor::<1, Int>::from_ints(places.as_slice(), &m.device());
        Some(module::embedding(table, places.reshape([2, 3])).into())
    };
};
