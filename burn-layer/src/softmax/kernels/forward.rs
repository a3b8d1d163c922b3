//! The kernels of forward: rows' statistics, and softmaxes.

use burn_backend::{DType, TensorMetadata, cubecl::dtype_to_storage_type};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::*;

use super::{
    super::logits::{Numbers, Scaling, Source, logits},
    of_row, place_of, row_of,
};
use crate::{
    ops::Logits,
    rowwise::{cubes, empty, of_cube, of_rows, plain},
};

/// See [`Rowwise::statistics`](super::super::Rowwise::statistics).
pub(in crate::softmax) fn statistics(of: Logits<CubeBackend>) -> [CubeTensor; 2] {
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

/// See [`Rowwise::whole_softmax`](super::super::Rowwise::whole_softmax).
pub(in crate::softmax) fn whole_softmax(of: Logits<CubeBackend>, dtype: DType) -> [CubeTensor; 3] {
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

/// See [`Rowwise::softmax_forward`](super::super::Rowwise::softmax_forward).
pub(in crate::softmax) fn softmax_forward(
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
