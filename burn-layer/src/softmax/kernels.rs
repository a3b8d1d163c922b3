//! The kernels. A cube takes a row, or as many rows as end where a vector of elements ends.

use burn_backend::{DType, TensorMetadata, cubecl::dtype_to_storage_type};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::*;

use super::logits::{Numbers, Scaling, Source, filled, logits, rounded, scaled};
use crate::{
    ops::{Logits, SoftmaxBackward},
    rowwise::{Rows, cubes, empty, of_cube, of_rows, plain},
};

/// See [`Rowwise::statistics`](super::Rowwise::statistics).
pub(super) fn statistics(of: Logits<CubeBackend>) -> [CubeTensor; 2] {
    let of = Source::of(of);
    let rows = of.rows(of.x.dtype.size());
    let outputs = [(); 2].map(|()| empty(&of.x, of_rows(&of.x.shape())));
    let [maxima, sums] = outputs.each_ref().map(|output| output.clone());
    let (client, numbers, types) = (of.client(), of.numbers(), of.types());
    statistics_kernel::launch(
        &client,
        cubes(rows.rows),
        rows.dim(),
        rows.vector,
        of.x.into_buffer_arg(),
        of.mask.map(|mask| mask.into_buffer_arg()).into(),
        maxima.into_buffer_arg(),
        sums.into_buffer_arg(),
        numbers,
        rows.rows,
        rows.columns,
        rows.units,
        rows.group() == 1,
        of.scaling,
        types,
    );
    outputs
}

/// See [`Rowwise::whole_softmax`](super::Rowwise::whole_softmax).
pub(super) fn whole_softmax(of: Logits<CubeBackend>, dtype: DType) -> [CubeTensor; 3] {
    let of = Source::of(of);
    let rows = of.rows(of.x.dtype.size().max(dtype.size()));
    let form = || of_rows(&of.x.shape());
    let outputs = [form(), form(), (of.x.shape(), dtype)].map(|form| empty(&of.x, form));
    let [maxima, sums, softmax] = outputs.each_ref().map(|output| output.clone());
    let (client, numbers, [x, mask]) = (of.client(), of.numbers(), of.types());
    let group = rows.group();
    softmax_kernel::launch(
        &client,
        cubes(rows.rows / group),
        rows.dim(),
        rows.vector,
        of.x.into_buffer_arg(),
        of.mask.map(|mask| mask.into_buffer_arg()).into(),
        maxima.into_buffer_arg(),
        sums.into_buffer_arg(),
        softmax.into_buffer_arg(),
        numbers,
        rows.rows,
        rows.columns,
        group,
        rows.units,
        group == 1,
        of.scaling,
        [x, mask, dtype_to_storage_type(dtype)],
    );
    outputs
}

/// See [`Rowwise::softmax_forward`](super::Rowwise::softmax_forward).
pub(super) fn softmax_forward(
    of: Logits<CubeBackend>,
    statistics: [CubeTensor; 2],
    dtype: DType,
) -> CubeTensor {
    let of = Source::of(of);
    let [maxima, sums] = statistics.map(plain);
    let rows = of.rows(of.x.dtype.size().max(dtype.size()));
    let output = empty(&of.x, (of.x.shape(), dtype));
    let (client, numbers, [x, mask]) = (of.client(), of.numbers(), of.types());
    let vectors = rows.rows * rows.columns / rows.vector;
    let dim = CubeDim::new(&client, vectors);
    softmax_forward_kernel::launch(
        &client,
        cubes(vectors.div_ceil(dim.num_elems() as usize)),
        dim,
        rows.vector,
        of.x.into_buffer_arg(),
        of.mask.map(|mask| mask.into_buffer_arg()).into(),
        maxima.into_buffer_arg(),
        sums.into_buffer_arg(),
        output.clone().into_buffer_arg(),
        numbers,
        vectors,
        rows.columns,
        rows.group() == 1,
        of.scaling,
        [x, mask, dtype_to_storage_type(dtype)],
    );
    output
}

/// See [`Rowwise::softmax_backward`](super::Rowwise::softmax_backward).
pub(super) fn softmax_backward(backward: SoftmaxBackward<CubeBackend>) -> CubeTensor {
    let SoftmaxBackward {
        of,
        maxima,
        sums,
        gradient,
        masked,
        scale,
    } = backward;
    let of = Source::of(of);
    let [maxima, sums, gradient] = [maxima, sums, gradient].map(plain);
    let rows = of.rows(of.x.dtype.size().max(gradient.dtype.size()));
    let output = empty(&of.x, (of.x.shape(), of.x.dtype));
    let (client, numbers, [x, mask]) = (of.client(), of.numbers(), of.types());
    let types = [x, mask, dtype_to_storage_type(gradient.dtype)];
    let group = rows.group();
    let (end, factor) = Scaling::of(scale);
    softmax_backward_kernel::launch(
        &client,
        cubes(rows.rows / group),
        rows.dim(),
        rows.vector,
        of.x.into_buffer_arg(),
        of.mask.map(|mask| mask.into_buffer_arg()).into(),
        gradient.into_buffer_arg(),
        maxima.into_buffer_arg(),
        sums.into_buffer_arg(),
        output.clone().into_buffer_arg(),
        numbers,
        factor,
        rows.rows,
        rows.columns,
        group,
        rows.units,
        group == 1,
        of.scaling,
        masked,
        end,
        types,
    );
    output
}

/// See [`Rowwise::gathered_backward`](super::Rowwise::gathered_backward).
pub(super) fn gathered_backward(
    of: [CubeTensor; 3],
    indices: CubeTensor,
    gradient: CubeTensor,
) -> CubeTensor {
    let [x, maxima, factors] = of.map(plain);
    let [indices, gradient] = [indices, gradient].map(plain);
    let rows = Rows::of(&x.client, &x.shape(), x.dtype.size());
    let output = empty(&x, (x.shape(), x.dtype));
    let (client, dtype) = (x.client.clone(), dtype_to_storage_type(x.dtype));
    let vectors = rows.rows * rows.columns / rows.vector;
    let dim = CubeDim::new(&client, vectors);
    gathered_backward_kernel::launch(
        &client,
        cubes(vectors.div_ceil(dim.num_elems() as usize)),
        dim,
        rows.vector,
        x.into_buffer_arg(),
        maxima.into_buffer_arg(),
        factors.into_buffer_arg(),
        indices.into_buffer_arg(),
        gradient.into_buffer_arg(),
        output.clone().into_buffer_arg(),
        vectors,
        rows.columns,
        dtype,
    );
    output
}

#[cube(launch)]
fn statistics_kernel<F: Float, M: Numeric, N: Size>(
    x: &[Vector<F, N>],
    mask: ComptimeOption<&[Vector<M, N>]>,
    maxima: &mut [f32],
    sums: &mut [f32],
    numbers: &Numbers,
    rows: usize,
    columns: usize,
    #[comptime] units: usize,
    #[comptime] whole: bool,
    #[comptime] scaling: Scaling,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let mut shared = Shared::<[f32]>::new_slice(units);
    let mut row = CUBE_POS;
    while row < rows {
        let (maximum, sum) = statistics_of_row::<F, M, N>(
            x,
            &mask,
            row,
            columns,
            numbers,
            &mut shared,
            units,
            whole,
            scaling,
        );
        if UNIT_POS == 0 {
            maxima[row] = maximum;
            sums[row] = sum;
        }
        row += CUBE_COUNT;
    }
}

/// The maximum of a row, and the sum of `exp(x - maximum)`. All units of the cube must call this.
#[cube]
#[allow(clippy::too_many_arguments)]
fn statistics_of_row<F: Float, M: Numeric, N: Size>(
    x: &[Vector<F, N>],
    mask: &ComptimeOption<&[Vector<M, N>]>,
    row: usize,
    columns: usize,
    numbers: &Numbers,
    shared: &mut Shared<[f32]>,
    #[comptime] units: usize,
    #[comptime] whole: bool,
    #[comptime] scaling: Scaling,
) -> (f32, f32) {
    let width = columns / N::value();
    let (first, end) = (row * columns, (row + 1) * columns);
    // As Burn's own maxima: -inf of nothing else, and NaN of a row that has one. (WGSL has no infinity but this.)
    let mut largest = f32::reinterpret(0xFF80_0000u32);
    let mut at = first / N::value() + UNIT_POS as usize;
    while at * N::value() < end {
        let values = logits::<F, M, N>(x, mask, at, row, width, numbers, scaling);
        #[unroll]
        for lane in 0..N::value() {
            let element = at * N::value() + lane;
            let larger = max_nan(largest, values.extract(lane));
            largest = of_row(element, first, end, larger, largest, whole);
        }
        at += units;
    }
    let maximum = of_cube(largest, shared, units, true);
    let mut sum = f32::new(0.0);
    let mut at = first / N::value() + UNIT_POS as usize;
    while at * N::value() < end {
        let values = logits::<F, M, N>(x, mask, at, row, width, numbers, scaling);
        #[unroll]
        for lane in 0..N::value() {
            let element = at * N::value() + lane;
            let more = sum + (values.extract(lane) - maximum).exp();
            sum = of_row(element, first, end, more, sum, whole);
        }
        at += units;
    }
    (maximum, of_cube(sum, shared, units, false))
}

#[cube(launch)]
fn softmax_kernel<F: Float, M: Numeric, O: Float, N: Size>(
    x: &[Vector<F, N>],
    mask: ComptimeOption<&[Vector<M, N>]>,
    maxima: &mut [f32],
    sums: &mut [f32],
    output: &mut [Vector<O, N>],
    numbers: &Numbers,
    rows: usize,
    columns: usize,
    #[comptime] group: usize,
    #[comptime] units: usize,
    #[comptime] whole: bool,
    #[comptime] scaling: Scaling,
    #[define(F, M, O)] _types: [ElemType; 3],
) {
    let width = columns / N::value();
    let mut shared = Shared::<[f32]>::new_slice(units);
    let mut own_maxima = Shared::<[f32]>::new_slice(group);
    let mut own_sums = Shared::<[f32]>::new_slice(group);
    let mut first_row = CUBE_POS * group;
    while first_row < rows {
        for place in 0..group {
            let row = first_row + place;
            let (maximum, sum) = statistics_of_row::<F, M, N>(
                x,
                &mask,
                row,
                columns,
                numbers,
                &mut shared,
                units,
                whole,
                scaling,
            );
            if UNIT_POS == 0 {
                maxima[row] = maximum;
                sums[row] = sum;
                own_maxima[place] = maximum;
                own_sums[place] = sum;
            }
        }
        if comptime!(units > 1) {
            sync_cube();
        }
        let last = (first_row + group) * columns;
        let mut at = first_row * columns / N::value() + UNIT_POS as usize;
        while at * N::value() < last {
            // A mask is read of the only row of a group.
            let values = logits::<F, M, N>(x, &mask, at, first_row, width, numbers, scaling);
            let mut result = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for lane in 0..N::value() {
                let place = place_of(at * N::value() + lane, first_row, columns, group);
                let e = (values.extract(lane) - own_maxima[place]).exp();
                result.insert(lane, e / own_sums[place]);
            }
            output[at] = Vector::cast_from(result);
            at += units;
        }
        first_row += CUBE_COUNT * group;
        // The statistics are read before they are written again.
        if comptime!(units > 1) {
            sync_cube();
        }
    }
}

#[cube(launch)]
fn softmax_forward_kernel<F: Float, M: Numeric, O: Float, N: Size>(
    x: &[Vector<F, N>],
    mask: ComptimeOption<&[Vector<M, N>]>,
    maxima: &[f32],
    sums: &[f32],
    output: &mut [Vector<O, N>],
    numbers: &Numbers,
    vectors: usize,
    columns: usize,
    #[comptime] whole: bool,
    #[comptime] scaling: Scaling,
    #[define(F, M, O)] _types: [ElemType; 3],
) {
    let width = columns / N::value();
    let mut at = ABSOLUTE_POS;
    while at < vectors {
        let first_row = at * N::value() / columns;
        let values = logits::<F, M, N>(x, &mask, at, first_row, width, numbers, scaling);
        let mut result = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for lane in 0..N::value() {
            let row = row_of(at * N::value() + lane, first_row, columns, whole);
            let e = (values.extract(lane) - maxima[row]).exp();
            result.insert(lane, e / sums[row]);
        }
        output[at] = Vector::cast_from(result);
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

#[cube(launch)]
fn softmax_backward_kernel<F: Float, M: Numeric, G: Float, N: Size>(
    x: &[Vector<F, N>],
    mask: ComptimeOption<&[Vector<M, N>]>,
    gradient: &[Vector<G, N>],
    maxima: &[f32],
    sums: &[f32],
    output: &mut [Vector<F, N>],
    numbers: &Numbers,
    factor: f32,
    rows: usize,
    columns: usize,
    #[comptime] group: usize,
    #[comptime] units: usize,
    #[comptime] whole: bool,
    #[comptime] scaling: Scaling,
    #[comptime] masked: bool,
    #[comptime] end: Scaling,
    #[define(F, M, G)] _types: [ElemType; 3],
) {
    let width = columns / N::value();
    let mut shared = Shared::<[f32]>::new_slice(units);
    let mut projections = Shared::<[f32]>::new_slice(group);
    let mut first_row = CUBE_POS * group;
    while first_row < rows {
        // The sum of the softmax times its gradient, of each row.
        for place in 0..group {
            let row = first_row + place;
            let (first, end) = (row * columns, (row + 1) * columns);
            let maximum = maxima[row];
            let mut sum = f32::new(0.0);
            let mut at = first / N::value() + UNIT_POS as usize;
            while at * N::value() < end {
                let values = logits::<F, M, N>(x, &mask, at, row, width, numbers, scaling);
                let gradients = Vector::<f32, N>::cast_from(gradient[at]);
                #[unroll]
                for lane in 0..N::value() {
                    let element = at * N::value() + lane;
                    let weight = (values.extract(lane) - maximum).exp();
                    let more = sum + weight * gradients.extract(lane);
                    sum = of_row(element, first, end, more, sum, whole);
                }
                at += units;
            }
            let sum = of_cube(sum, &mut shared, units, false);
            if UNIT_POS == 0 {
                projections[place] = sum / sums[row];
            }
        }
        if comptime!(units > 1) {
            sync_cube();
        }
        let last = (first_row + group) * columns;
        let mut at = first_row * columns / N::value() + UNIT_POS as usize;
        while at * N::value() < last {
            // A mask is read of the only row of a group.
            let values = logits::<F, M, N>(x, &mask, at, first_row, width, numbers, scaling);
            let gradients = Vector::<f32, N>::cast_from(gradient[at]);
            let mut result = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for lane in 0..N::value() {
                let place = place_of(at * N::value() + lane, first_row, columns, group);
                let row = first_row + place;
                let y = (values.extract(lane) - maxima[row]).exp() / sums[row];
                result.insert(lane, y * (gradients.extract(lane) - projections[place]));
            }
            let mut result = rounded::<F, N>(result);
            if comptime!(masked) {
                result = filled::<M, N>(result, &mask, at, first_row, width, 0.0f32, numbers);
            }
            output[at] = Vector::cast_from(scaled::<F, N>(result, factor, end));
            at += units;
        }
        first_row += CUBE_COUNT * group;
        // The projections are read before they are written again.
        if comptime!(units > 1) {
            sync_cube();
        }
    }
}

#[cube(launch)]
fn gathered_backward_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    maxima: &[f32],
    factors: &[f32],
    indices: &[i32],
    gradient: &[f32],
    output: &mut [Vector<F, N>],
    vectors: usize,
    columns: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < vectors {
        let values = Vector::<f32, N>::cast_from(x[at]);
        let mut result = Vector::<f32, N>::new(0.0f32);
        let first_row = at * N::value() / columns;
        #[unroll]
        for lane in 0..N::value() {
            let element = at * N::value() + lane;
            let row = row_of(element, first_row, columns, false);
            let column = (element - row * columns) as i32;
            let spread = (values.extract(lane) - maxima[row]).exp() * factors[row];
            let own = spread + gradient[row];
            result.insert(lane, select(column == indices[row], own, spread));
        }
        output[at] = Vector::cast_from(result);
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The place of an element's row in a group of rows.
#[cube]
fn place_of(element: usize, first_row: usize, columns: usize, #[comptime] group: usize) -> usize {
    let mut place = 0usize;
    if comptime!(group > 1) {
        place = element / columns - first_row;
    }
    place
}

/// The row of an element of a load, which begins in the row `first`. It reaches into the next one at most, and not if rows are of `whole`
/// loads.
#[cube]
fn row_of(element: usize, first: usize, columns: usize, #[comptime] whole: bool) -> usize {
    if comptime!(whole) {
        first
    } else {
        select(element >= (first + 1) * columns, first + 1, first)
    }
}

/// `new` if the element is one of the row's, else `old`. Rows of `whole` loads have no others.
#[cube]
fn of_row(
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
