use burn::backend::TensorMetadata;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{client::Client, prelude::*};

use super::{
    buffer,
    codec::largest_of,
    input,
    rows::{self, Lines, Rows},
};

/// See [`Fp8Ops::fp8_amax`](crate::Fp8Ops::fp8_amax).
pub(crate) fn amax(input: CubeTensor) -> CubeTensor {
    let output = buffer::zero_scalar(&input);
    raise_to(input, &output);
    output
}

/// `amax = max(amax, |input|)`, where `amax` is a single f32.
pub(in crate::kernels) fn raise_to(input: CubeTensor, amax: &CubeTensor) {
    let length = input.shape().num_elements();
    if length == 0 {
        return;
    }
    let rows = Rows::of(match buffer::in_memory_order(&input) {
        Some((turned, _)) => turned,
        None => input,
    });
    let input = &rows.tensor;
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));
    let (count, dim) = buffer::grid(&client, buffer::words(length));
    let vector = rows.vector_across();
    amax_kernel::launch(
        &client,
        count,
        dim,
        vector,
        input::by(input, vector),
        buffer::raw(amax.handle.clone(), 1),
        length,
        rows.launch(),
        rows.have_gaps(),
        together(&client, dim),
        dtype,
    );
}

#[cube(launch)]
fn amax_kernel<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    amax: &[Atomic<u32>],
    length: usize,
    lines: Lines,
    #[comptime] gaps: bool,
    #[comptime] together: usize,
    #[define(F)] _dtype: ElemType,
) {
    let fours = length.div_ceil(4);
    let units = CUBE_COUNT * CUBE_DIM as usize;
    let mut max = 0u32;
    let mut index = ABSOLUTE_POS;
    while index < fours {
        // Two loads are in flight at a time, because one would not fill the path to a GPU's memory. Beyond the end, values are 0.
        let first = rows::four(input, 4 * index, length, &lines, gaps);
        let second = rows::four(input, 4 * (index + units), length, &lines, gaps);
        max = largest_of(second, largest_of(first, max));
        index += 2 * units;
    }
    raise_together(amax, max, together);
}

/// The number of units of a cube that find their largest value together before one of them raises the amax: all of them, or 1 on
/// processors, where units that wait for each other cost more than they save.
pub(in crate::kernels) fn together(client: &Client, dim: CubeDim) -> usize {
    match client.properties().hardware.num_cpu_cores {
        Some(_) => 1,
        None => dim.num_elems() as usize,
    }
}

/// `amax[0] = max(amax[0], bits)` for all units of a cube. `together` is the number of units, or 1. All units must call this.
///
/// If thousands of units raised one word, they would wait for each other longer than they read.
#[cube]
pub(in crate::kernels) fn raise_together(
    amax: &[Atomic<u32>],
    bits: u32,
    #[comptime] together: usize,
) {
    if comptime!(together > 1) {
        let largest = largest_of_cube(bits, together);
        if UNIT_POS == 0 {
            raise(amax, 0usize, largest);
        }
    } else {
        raise(amax, 0usize, bits);
    }
}

/// `amax[index] = max(amax[index], bits)`. For most units, it is already large enough.
#[cube]
pub(in crate::kernels) fn raise(amax: &[Atomic<u32>], index: usize, bits: u32) {
    if bits > amax[index].load() {
        amax[index].fetch_max(bits);
    }
}

/// The largest `value` of all units, returned to the first unit.
#[cube]
pub(in crate::kernels) fn largest_of_cube(value: u32, #[comptime] units: usize) -> u32 {
    let unit = UNIT_POS as usize;
    let mut values = Shared::new_slice(units);
    values[unit] = value;
    let mut width = CUBE_DIM as usize;
    while width > 1 {
        let half = width.div_ceil(2);
        sync_cube();
        if unit + half < width {
            values[unit] = u32::max(values[unit], values[unit + half]);
        }
        width = half;
    }
    // Only the first unit may read this: there is no barrier between its last write and the other units.
    let mut largest = value;
    if unit == 0 {
        largest = values[0];
    }
    largest
}
