use burn::backend::TensorMetadata;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{CubeKernel, client::Client, ir::types::Fp8Format as CubeFormat, prelude::*};

use super::{
    amax::raise,
    buffer,
    codec::{cube_format, encode, magnitude_bits},
    definitions::define,
};
use crate::Fp8Format;

/// See [`Fp8Ops::fp8_quantize`](crate::Fp8Ops::fp8_quantize).
pub(crate) fn quantize(
    input: CubeTensor,
    scale: CubeTensor,
    format: Fp8Format,
) -> (CubeTensor, CubeTensor) {
    let amax = buffer::zero_scalar(&input);
    let codes = buffer::empty_codes(&input.client, &input.device, input.shape());
    let length = input.shape().num_elements();
    if length == 0 {
        return (codes, amax);
    }
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));
    let (count, dim) = buffer::grid(&client, buffer::words(length));
    quantize_kernel::launch(
        &client,
        count,
        dim,
        buffer::elements(input),
        buffer::scalar(scale),
        buffer::code_words(&codes),
        buffer::raw(amax.handle.clone(), 1),
        cube_format(format),
        dtype,
    );
    (codes, amax)
}

pub(super) fn definition(client: &Client, format: Fp8Format, dtype: ElemType) -> KernelDefinition {
    let word = || buffer::word(client);
    let format = cube_format(format);
    define!(
        client,
        quantize_kernel(word(), word(), word(), word(), format, dtype)
    )
}

/// A unit makes one word of four codes at a time.
#[cube(launch, create_dummy_kernel)]
fn quantize_kernel<F: Numeric>(
    input: &[F],
    scale: &[f32],
    codes: &mut [u32],
    amax: &[Atomic<u32>],
    #[comptime] format: CubeFormat,
    #[define(F)] _dtype: ElemType,
) {
    let scale = scale[0];
    let mut max = 0u32;
    let mut word = ABSOLUTE_POS;
    while word < codes.len() {
        let mut packed = 0u32;
        #[unroll]
        for byte in 0..4usize {
            let index = word * 4 + byte;
            if index < input.len() {
                let value = f32::cast_from(input[index]);
                max = u32::max(max, magnitude_bits(value));
                packed |= encode(value * scale, format) << comptime!(8 * byte as u32);
            }
        }
        codes[word] = packed;
        word += CUBE_COUNT * CUBE_DIM as usize;
    }
    raise(amax, 0usize, max);
}
