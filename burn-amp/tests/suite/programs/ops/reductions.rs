//! Sums, means, maxima and orders.

use super::{Op, table};
use crate::suite::programs::value::{Float, ask, each, like};

/// A table of ops along a dimension.
macro_rules! along {
    ($($kind:ident $name:ident: |$x:ident, $dim:ident| $body:expr;)*) => {
        table! {
            $($kind $name: |m, p| {
                let x = m.float(p);
                let $dim = p.below(x.rank());
                Some(each!(x, |$x| $body))
            };)*
            Exact sum: |m, p| Some(Float::from(ask!(m.float(p), |x| x.sum())));
            Exact mean: |m, p| Some(Float::from(ask!(m.float(p), |x| x.mean())));
            Exact max: |m, p| Some(Float::from(ask!(m.float(p), |x| x.max())));
            Exact min: |m, p| Some(Float::from(ask!(m.float(p), |x| x.min())));
            Rounded prod: |m, p| Some(Float::from(ask!(m.float(p), |x| x.prod())));
            Exact max_abs: |m, p| Some(Float::from(ask!(m.float(p), |x| x.max_abs())));
            Exact sum_dims: |m, p| {
                let x = m.float(p);
                let last = x.rank() - 1;
                Some(each!(x, |x| x.sum_dims(&[0, last][..last.min(1) + 1])))
            };
            Exact mean_dims: |m, p| {
                let x = m.float(p);
                let last = x.rank() - 1;
                Some(each!(x, |x| x.mean_dims(&[0, last][..last.min(1) + 1])))
            };
        }
    };
}

pub(super) const REDUCTIONS: &[Op] = along! {
    Exact sum_dim: |x, dim| x.sum_dim(dim);
    Exact mean_dim: |x, dim| x.mean_dim(dim);
    Exact max_dim: |x, dim| x.max_dim(dim);
    Exact min_dim: |x, dim| x.min_dim(dim);
    Exact max_abs_dim: |x, dim| x.max_abs_dim(dim);
    Rounded prod_dim: |x, dim| x.prod_dim(dim);
    Exact cumsum: |x, dim| x.cumsum(dim);
    Rounded cumprod: |x, dim| x.cumprod(dim);
    Exact cummax: |x, dim| x.cummax(dim);
    Exact cummin: |x, dim| x.cummin(dim);
    Exact minus_max: |x, dim| x.clone() - x.max_dim(dim);
    Rounded minus_mean: |x, dim| x.clone() - x.mean_dim(dim);
    Rounded var: |x, dim| x.var_bias(dim);
    Exact argmax: |x, dim| x.argmax(dim).float();
    Exact argmin: |x, dim| x.argmin(dim).float();
    Exact maxima_and_places: |x, dim| {
        let (maxima, places) = x.max_dim_with_indices(dim);
        let places = like(places.float(), &maxima);
            maxima + places
    };
    Exact sort: |x, dim| x.sort(dim);
    Exact sort_and_places: |x, dim| {
        let (sorted, places) = x.sort_descending_with_indices(dim);
        let places = like(places.float(), &sorted);
        sorted + places
    };
    Exact argsort: |x, dim| x.argsort(dim).float();
    Exact topk: |x, dim| x.topk(1, dim);
    Exact any_dim: |x, dim| x.greater_scalar(0).any_dim(dim).float();
};
