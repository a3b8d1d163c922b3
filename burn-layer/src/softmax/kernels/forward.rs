//! The kernels of forward: rows' statistics, and softmaxes.

use burn_backend::{DType, TensorMetadata, cubecl::dtype_to_storage_type};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::*;

use super::{
    super::logits::{Numbers, Scaling, Source, logits},
    exponentials, largest_of, place_of, row_of,
};
use crate::{
    ops::Logits,
    rowwise::{Units, cubes, empty, of_cube, of_rows, plain},
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
        rows.address,
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
        rows.address,
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
        rows.held(),
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
    let group = rows.group();
    softmax_forward_kernel::launch(
        &client,
        cubes(rows.rows / group),
        rows.dim(),
        rows.address,
        rows.vector,
        of.x.into_buffer_arg(),
        of.mask.map(|mask| mask.into_buffer_arg()).into(),
        maxima.into_buffer_arg(),
        sums.into_buffer_arg(),
        output.clone().into_buffer_arg(),
        numbers,
        rows.rows,
        rows.columns,
        group,
        rows.units,
        of.scaling,
        [x, mask, dtype_to_storage_type(dtype)],
    );
    output
}

#[cube(launch, address_type = "dynamic")]
fn statistics_kernel<F: Float, M: Numeric, N: Size>(
    x: &[Vector<F, N>],
    mask: ComptimeOption<&[Vector<M, N>]>,
    maxima: &mut [f32],
    sums: &mut [f32],
    numbers: &Numbers,
    rows: usize,
    columns: usize,
    #[comptime] units: Units,
    #[comptime] whole: bool,
    #[comptime] scaling: Scaling,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(units.count));
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

/// The maximum of a row, and the sum of `exp(x - maximum)`, in one pass: the sum so far is scaled when the maximum grows. All units of
/// the cube must call this.
#[cube]
#[allow(clippy::too_many_arguments)]
fn statistics_of_row<F: Float, M: Numeric, N: Size>(
    x: &[Vector<F, N>],
    mask: &ComptimeOption<&[Vector<M, N>]>,
    row: usize,
    columns: usize,
    numbers: &Numbers,
    shared: &mut Shared<[f32]>,
    #[comptime] units: Units,
    #[comptime] whole: bool,
    #[comptime] scaling: Scaling,
) -> (f32, f32) {
    let width = columns / N::value();
    let (first, end) = (row * columns, (row + 1) * columns);
    // As Burn's own maxima: -inf of nothing else, and NaN of a row that has one.
    let mut maximum = least();
    let mut sum = f32::new(0.0);
    let mut at = first / N::value() + UNIT_POS as usize;
    while at * N::value() < end {
        let values = logits::<F, M, N>(x, mask, at, row, width, numbers, scaling);
        let values = of_row::<N>(values, at, first, end, whole);
        let larger = largest_of::<N>(values, maximum);
        sum *= (maximum - finite(larger)).exp();
        let terms = exponentials::<N>(values, finite(larger));
        #[unroll]
        for lane in 0..N::value() {
            sum += terms.extract(lane);
        }
        maximum = larger;
        at += comptime!(units.count);
    }
    let own = maximum;
    let maximum = of_cube(own, shared, units, true);
    let sum = sum * (own - finite(maximum)).exp();
    let sum = of_cube(sum, shared, units, false);
    // As with `exp(x - maximum)`, infinities leave no sum.
    (maximum, sum + maximum * 0.0)
}

/// -inf. (WGSL has no infinity but this.)
#[cube]
fn least() -> f32 {
    f32::reinterpret(0xFF80_0000u32)
}

/// The maximum, or 0 if there is nothing but -inf, which has no distance from itself.
#[cube]
fn finite(maximum: f32) -> f32 {
    select(maximum == least(), f32::new(0.0), maximum)
}

/// A load with -inf for what is not of the row. Rows of `whole` loads have no such elements.
#[cube]
fn of_row<N: Size>(
    values: Vector<f32, N>,
    at: usize,
    first: usize,
    end: usize,
    #[comptime] whole: bool,
) -> Vector<f32, N> {
    if comptime!(whole) {
        values
    } else {
        let mut result = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for lane in 0..N::value() {
            let element = at * N::value() + lane;
            let own = element >= first && element < end;
            result.insert(lane, select(own, values.extract(lane), least()));
        }
        result
    }
}

#[cube(launch, address_type = "dynamic")]
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
    #[comptime] units: Units,
    #[comptime] held: usize,
    #[comptime] scaling: Scaling,
    #[define(F, M, O)] _types: [ElemType; 3],
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(units.count));
    if comptime!(held > 0) {
        let mut row = CUBE_POS;
        while row < rows {
            let (maximum, sum) = softmax_of_row::<F, M, O, N>(
                x,
                &mask,
                output,
                row,
                columns,
                numbers,
                &mut shared,
                units,
                held,
                scaling,
            );
            if UNIT_POS == 0 {
                maxima[row] = maximum;
                sums[row] = sum;
            }
            row += CUBE_COUNT;
        }
    } else {
        let width = columns / N::value();
        let mut own_maxima = Shared::<[f32]>::new_slice(group);
        let mut own_inverses = Shared::<[f32]>::new_slice(group);
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
                    comptime!(group == 1),
                    scaling,
                );
                if UNIT_POS == 0 {
                    maxima[row] = maximum;
                    sums[row] = sum;
                    own_maxima[place] = maximum;
                    own_inverses[place] = f32::new(1.0) / sum;
                }
            }
            if comptime!(units.count > 1) {
                sync_cube();
            }
            let last = (first_row + group) * columns;
            let mut at = first_row * columns / N::value() + UNIT_POS as usize;
            while at * N::value() < last {
                // A mask is read of the only row of a group.
                let values = logits::<F, M, N>(x, &mask, at, first_row, width, numbers, scaling);
                let row = at * N::value() / columns;
                let mut result = Vector::<f32, N>::new(0.0f32);
                #[unroll]
                for lane in 0..N::value() {
                    let place = place_of(at * N::value() + lane, row, first_row, columns, group);
                    let e = (values.extract(lane) - own_maxima[place]).exp();
                    result.insert(lane, e * own_inverses[place]);
                }
                output[at] = Vector::cast_from(result);
                at += comptime!(units.count);
            }
            first_row += CUBE_COUNT * group;
            // The statistics are read before they are written again.
            if comptime!(units.count > 1) {
                sync_cube();
            }
        }
    }
}

/// Writes the softmax of a row of whole loads, which its units keep until its sum is known. Returns its maximum and sum. All units of the
/// cube must call this.
#[cube]
#[allow(clippy::too_many_arguments)]
fn softmax_of_row<F: Float, M: Numeric, O: Float, N: Size>(
    x: &[Vector<F, N>],
    mask: &ComptimeOption<&[Vector<M, N>]>,
    output: &mut [Vector<O, N>],
    row: usize,
    columns: usize,
    numbers: &Numbers,
    shared: &mut Shared<[f32]>,
    #[comptime] units: Units,
    #[comptime] held: usize,
    #[comptime] scaling: Scaling,
) -> (f32, f32) {
    let width = columns / N::value();
    let first = row * width;
    let unit = UNIT_POS as usize;
    let mut own = Array::<Vector<f32, N>>::new(held);
    let mut largest = least();
    #[unroll]
    for load in 0..held {
        let at = unit + comptime!(load * units.count);
        if at < width {
            let values = logits::<F, M, N>(x, mask, first + at, row, width, numbers, scaling);
            largest = largest_of::<N>(values, largest);
            own[load] = values;
        }
    }
    let maximum = of_cube(largest, shared, units, true);
    let mut sum = f32::new(0.0);
    #[unroll]
    for load in 0..held {
        if unit + comptime!(load * units.count) < width {
            let terms = exponentials::<N>(own[load], maximum);
            #[unroll]
            for lane in 0..N::value() {
                sum += terms.extract(lane);
            }
            own[load] = terms;
        }
    }
    let sum = of_cube(sum, shared, units, false);
    let inverse = Vector::<f32, N>::new(f32::new(1.0) / sum);
    #[unroll]
    for load in 0..held {
        let at = unit + comptime!(load * units.count);
        if at < width {
            output[first + at] = Vector::cast_from(own[load] * inverse);
        }
    }
    (maximum, sum)
}

#[cube(launch, address_type = "dynamic")]
fn softmax_forward_kernel<F: Float, M: Numeric, O: Float, N: Size>(
    x: &[Vector<F, N>],
    mask: ComptimeOption<&[Vector<M, N>]>,
    maxima: &[f32],
    sums: &[f32],
    output: &mut [Vector<O, N>],
    numbers: &Numbers,
    rows: usize,
    columns: usize,
    #[comptime] group: usize,
    #[comptime] units: Units,
    #[comptime] scaling: Scaling,
    #[define(F, M, O)] _types: [ElemType; 3],
) {
    let width = columns / N::value();
    let mut first_row = CUBE_POS * group;
    while first_row < rows {
        let last = (first_row + group) * columns;
        let inverse = f32::new(1.0) / sums[first_row];
        let mut at = first_row * columns / N::value() + UNIT_POS as usize;
        while at * N::value() < last {
            // A mask is read of the only row of a group.
            let values = logits::<F, M, N>(x, &mask, at, first_row, width, numbers, scaling);
            let mut result = Vector::<f32, N>::new(0.0f32);
            if comptime!(group == 1) {
                result = exponentials::<N>(values, maxima[first_row]) * Vector::new(inverse);
            } else {
                // A load reaches into the next row at most.
                let row = at * N::value() / columns;
                #[unroll]
                for lane in 0..N::value() {
                    let row = row_of(at * N::value() + lane, row, columns);
                    let e = (values.extract(lane) - maxima[row]).exp();
                    result.insert(lane, e * (f32::new(1.0) / sums[row]));
                }
            }
            output[at] = Vector::cast_from(result);
            at += comptime!(units.count);
        }
        first_row += CUBE_COUNT * group;
    }
}
