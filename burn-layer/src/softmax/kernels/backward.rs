//! The kernels of backward, which compute a softmax once more from its rows' statistics.

use burn_backend::{TensorMetadata, cubecl::dtype_to_storage_type};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::*;

use super::{
    super::logits::{Numbers, Scaling, Source, filled, logits, rounded, scaled},
    exponentials, place_of,
};
use crate::{
    ops::SoftmaxBackward,
    rowwise::{Rows, Units, cubes, empty, of_cube, plain},
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
        rows.address,
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
        rows.held(),
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
        rows.address,
        rows.vector,
        x.into_buffer_arg(),
        maxima.into_buffer_arg(),
        factors.into_buffer_arg(),
        indices.into_buffer_arg(),
        gradient.into_buffer_arg(),
        output.clone().into_buffer_arg(),
        vectors,
        rows.rows,
        rows.columns,
        rows.group() == 1,
        dtype,
    );
    output
}

#[cube(launch, address_type = "dynamic")]
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
    #[comptime] units: Units,
    #[comptime] held: usize,
    #[comptime] scaling: Scaling,
    #[comptime] masked: bool,
    #[comptime] end: Scaling,
    #[define(F, M, G)] _types: [ElemType; 3],
) {
    let width = columns / N::value();
    let mut shared = Shared::<[f32]>::new_slice(comptime!(units.count));
    if comptime!(held > 0) {
        let mut row = CUBE_POS;
        while row < rows {
            gradient_of_row::<F, M, G, N>(
                x,
                &mask,
                gradient,
                maxima[row],
                f32::new(1.0) / sums[row],
                factor,
                output,
                row,
                width,
                numbers,
                &mut shared,
                units,
                held,
                scaling,
                masked,
                end,
            );
            row += CUBE_COUNT;
        }
    } else {
        let mut own_maxima = Shared::<[f32]>::new_slice(group);
        let mut inverses = Shared::<[f32]>::new_slice(group);
        let mut projections = Shared::<[f32]>::new_slice(group);
        let mut first_row = CUBE_POS * group;
        while first_row < rows {
            // The sum of the softmax times its gradient, of each row.
            for place in 0..group {
                let row = first_row + place;
                let (first, last) = (row * columns, (row + 1) * columns);
                let maximum = maxima[row];
                let mut sum = f32::new(0.0);
                let mut at = first / N::value() + UNIT_POS as usize;
                while at * N::value() < last {
                    let values = logits::<F, M, N>(x, &mask, at, row, width, numbers, scaling);
                    let gradients = Vector::<f32, N>::cast_from(gradient[at]);
                    #[unroll]
                    for lane in 0..N::value() {
                        let weight = (values.extract(lane) - maximum).exp();
                        let more = sum + weight * gradients.extract(lane);
                        if comptime!(group == 1) {
                            sum = more;
                        } else {
                            let element = at * N::value() + lane;
                            sum = select(element >= first && element < last, more, sum);
                        }
                    }
                    at += comptime!(units.count);
                }
                let sum = of_cube(sum, &mut shared, units, false);
                if UNIT_POS == 0 {
                    let inverse = f32::new(1.0) / sums[row];
                    own_maxima[place] = maximum;
                    inverses[place] = inverse;
                    projections[place] = sum * inverse;
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
                let gradients = Vector::<f32, N>::cast_from(gradient[at]);
                let row = at * N::value() / columns;
                let mut result = Vector::<f32, N>::new(0.0f32);
                #[unroll]
                for lane in 0..N::value() {
                    let place = place_of(at * N::value() + lane, row, first_row, columns, group);
                    let y = (values.extract(lane) - own_maxima[place]).exp() * inverses[place];
                    result.insert(lane, y * (gradients.extract(lane) - projections[place]));
                }
                output[at] = ended::<F, M, N>(
                    result, &mask, at, first_row, width, factor, numbers, masked, end,
                );
                at += comptime!(units.count);
            }
            first_row += CUBE_COUNT * group;
            // What is known of the rows is read before it is written again.
            if comptime!(units.count > 1) {
                sync_cube();
            }
        }
    }
}

/// Writes the gradient of a row of whole loads, which its units keep until the projection is known. `inverse` is that of its sum. All units of the cube must call this.
#[cube]
#[allow(clippy::too_many_arguments)]
fn gradient_of_row<F: Float, M: Numeric, G: Float, N: Size>(
    x: &[Vector<F, N>],
    mask: &ComptimeOption<&[Vector<M, N>]>,
    gradient: &[Vector<G, N>],
    maximum: f32,
    inverse: f32,
    factor: f32,
    output: &mut [Vector<F, N>],
    row: usize,
    width: usize,
    numbers: &Numbers,
    shared: &mut Shared<[f32]>,
    #[comptime] units: Units,
    #[comptime] held: usize,
    #[comptime] scaling: Scaling,
    #[comptime] masked: bool,
    #[comptime] end: Scaling,
) {
    let first = row * width;
    let unit = UNIT_POS as usize;
    let mut weights = Array::<Vector<f32, N>>::new(held);
    let mut gradients = Array::<Vector<f32, N>>::new(held);
    let mut sum = f32::new(0.0);
    #[unroll]
    for load in 0..held {
        let at = unit + comptime!(load * units.count);
        if at < width {
            let values = logits::<F, M, N>(x, mask, first + at, row, width, numbers, scaling);
            let weight = exponentials::<N>(values, maximum) * Vector::new(inverse);
            let own = Vector::<f32, N>::cast_from(gradient[first + at]);
            let products = weight * own;
            #[unroll]
            for lane in 0..N::value() {
                sum += products.extract(lane);
            }
            weights[load] = weight;
            gradients[load] = own;
        }
    }
    let projection = Vector::<f32, N>::new(of_cube(sum, shared, units, false));
    #[unroll]
    for load in 0..held {
        let at = unit + comptime!(load * units.count);
        if at < width {
            let result = weights[load] * (gradients[load] - projection);
            output[first + at] = ended::<F, M, N>(
                result,
                mask,
                first + at,
                row,
                width,
                factor,
                numbers,
                masked,
                end,
            );
        }
    }
}

/// What backward does with the gradient of a softmax: it is rounded, masked and scaled as its forward was.
#[cube]
#[allow(clippy::too_many_arguments)]
fn ended<F: Float, M: Numeric, N: Size>(
    gradient: Vector<f32, N>,
    mask: &ComptimeOption<&[Vector<M, N>]>,
    at: usize,
    row: usize,
    width: usize,
    factor: f32,
    numbers: &Numbers,
    #[comptime] masked: bool,
    #[comptime] end: Scaling,
) -> Vector<F, N> {
    let mut result = rounded::<F, N>(gradient);
    if comptime!(masked) {
        result = filled::<M, N>(result, mask, at, row, width, 0.0f32, numbers);
    }
    Vector::cast_from(scaled::<F, N>(result, factor, end))
}

#[cube(launch, address_type = "dynamic")]
fn gathered_backward_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    maxima: &[f32],
    factors: &[f32],
    indices: &[i32],
    gradient: &[f32],
    output: &mut [Vector<F, N>],
    vectors: usize,
    rows: usize,
    columns: usize,
    #[comptime] whole: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < vectors {
        let values = Vector::<f32, N>::cast_from(x[at]);
        let mut result = Vector::<f32, N>::new(0.0f32);
        // A load reaches into the next row at most, and not if rows are of whole loads.
        let row = at * N::value() / columns;
        let mut next = row;
        if comptime!(!whole) {
            next = min(row + 1, rows - 1);
        }
        let (own_maximum, next_maximum) = (maxima[row], maxima[next]);
        let (own_factor, next_factor) = (factors[row], factors[next]);
        let (own_gradient, next_gradient) = (gradient[row], gradient[next]);
        let (own_index, next_index) = (indices[row], indices[next] + columns as i32);
        #[unroll]
        for lane in 0..N::value() {
            // From the start of `row`.
            let column = (at * N::value() - row * columns + lane) as i32;
            let mut is_next = false;
            if comptime!(!whole) {
                is_next = column >= columns as i32;
            }
            let maximum = select(is_next, next_maximum, own_maximum);
            let factor = select(is_next, next_factor, own_factor);
            let spread = (values.extract(lane) - maximum).exp() * factor;
            let own = spread + select(is_next, next_gradient, own_gradient);
            let index = select(is_next, next_index, own_index);
            result.insert(lane, select(column == index, own, spread));
        }
        output[at] = Vector::cast_from(result);
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}
