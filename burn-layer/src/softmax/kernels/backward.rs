//! The kernels of backward, which compute a softmax once more from its rows' statistics.

use burn_backend::{TensorMetadata, cubecl::dtype_to_storage_type};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::*;

use super::{
    super::logits::{Numbers, Scaling, Source, filled, logits, rounded, scaled},
    of_row, place_of, row_of,
};
use crate::{
    ops::SoftmaxBackward,
    rowwise::{Rows, cubes, empty, of_cube, plain},
};

/// See [`Rowwise::softmax_backward`](super::super::Rowwise::softmax_backward).
pub(in crate::softmax) fn softmax_backward(backward: SoftmaxBackward<CubeBackend>) -> CubeTensor {
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

/// See [`Rowwise::gathered_backward`](super::super::Rowwise::gathered_backward).
pub(in crate::softmax) fn gathered_backward(
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
