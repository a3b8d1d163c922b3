//! The kernels. A cube takes a row, or as many rows as end where a vector of elements ends.

mod backward;
mod forward;

pub(super) use backward::{gathered_backward, softmax_backward};
use cubecl::prelude::*;
pub(super) use forward::{softmax_forward, statistics, whole_softmax};

/// The place of an element's row in a group of rows.
#[cube]
pub(super) fn place_of(
    element: usize,
    first_row: usize,
    columns: usize,
    #[comptime] group: usize,
) -> usize {
    let mut place = 0usize;
    if comptime!(group > 1) {
        place = element / columns - first_row;
    }
    place
}

/// The row of an element of a load, which begins in the row `first`. It reaches into the next one at most, and not if rows are of `whole`
/// loads.
#[cube]
pub(super) fn row_of(
    element: usize,
    first: usize,
    columns: usize,
    #[comptime] whole: bool,
) -> usize {
    if comptime!(whole) {
        first
    } else {
        select(element >= (first + 1) * columns, first + 1, first)
    }
}

/// `new` if the element is one of the row's, else `old`. Rows of `whole` loads have no others.
#[cube]
pub(super) fn of_row(
    element: usize,
    first: usize,
    end: usize,
    new: f32,
    old: f32,
    #[comptime] whole: bool,
) -> f32 {
    if comptime!(whole) {
        new
    } else {
        select(element >= first && element < end, new, old)
    }
}
