use burn::backend::{Backend, TensorMetadata};
use burn::tensor::DType;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{CubeBackend, ops::permute, tensor::CubeTensor};
use cubecl::prelude::*;

use super::{
    amax::{raise_together, together},
    buffer,
    codec::{Codec, encode, largest_of},
    input,
    rows::{self, Lines, Rows},
};
use crate::Fp8Format;

/// See [`Fp8Ops::fp8_quantize`](crate::Fp8Ops::fp8_quantize).
pub(crate) fn quantize(
    input: CubeTensor,
    scale: CubeTensor,
    format: Fp8Format,
) -> (CubeTensor, CubeTensor) {
    // Codes get the layout of the floats, so the floats are read only once. This requires that the device can copy bytes, in case
    // the codes have to be copied later.
    if CubeBackend::supports_dtype(&input.device, DType::U8)
        && let Some((turned, axes)) = buffer::in_memory_order(&input)
    {
        let (codes, amax) = quantize(turned, scale, format);
        return (permute(codes, &axes), amax);
    }
    let amax = buffer::zero_scalar(&input);
    let codes = buffer::empty_codes(&input.client, &input.device, input.shape());
    let length = input.shape().num_elements();
    if length == 0 {
        return (codes, amax);
    }
    let rows = Rows::of(input);
    let input = &rows.tensor;
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));
    let (count, dim) = buffer::grid(&client, buffer::words(length));
    let vector = rows.vector_across();
    quantize_kernel::launch(
        &client,
        count,
        dim,
        vector,
        input::by(input, vector),
        buffer::scalar(scale),
        buffer::code_words(&codes),
        buffer::raw(amax.handle.clone(), 1),
        length,
        rows.launch(),
        rows.have_gaps(),
        Codec::of(&client, format),
        together(&client, dim),
        dtype,
    );
    (codes, amax)
}

/// Each unit encodes two words of four codes at a time.
#[cube(launch)]
fn quantize_kernel<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    scale: &[f32],
    codes: &mut [u32],
    amax: &[Atomic<u32>],
    length: usize,
    lines: Lines,
    #[comptime] gaps: bool,
    #[comptime] codec: Codec,
    #[comptime] together: usize,
    #[define(F)] _dtype: ElemType,
) {
    let scale = Vector::new(scale[0]);
    let units = CUBE_COUNT * CUBE_DIM as usize;
    let mut max = 0u32;
    let mut word = ABSOLUTE_POS;
    while word < codes.len() {
        let next = word + units;
        let first = rows::four(input, 4 * word, length, &lines, gaps);
        let second = rows::four(input, 4 * next, length, &lines, gaps);
        max = largest_of(second, largest_of(first, max));
        codes[word] = encode(first * scale, codec);
        if next < codes.len() {
            codes[next] = encode(second * scale, codec);
        }
        word += 2 * units;
    }
    raise_together(amax, max, together);
}
