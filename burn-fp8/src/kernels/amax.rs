use burn::backend::TensorMetadata;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{CubeKernel, client::Client, prelude::*};

use super::{buffer, codec::magnitude_bits, definitions::define};

/// See [`Fp8Ops::fp8_amax`](crate::Fp8Ops::fp8_amax).
pub(crate) fn amax(input: CubeTensor) -> CubeTensor {
    let output = buffer::zero_scalar(&input);
    let length = input.shape().num_elements();
    if length == 0 {
        return output;
    }
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));
    let (count, dim) = buffer::grid(&client, length);
    amax_kernel::launch(
        &client,
        count,
        dim,
        buffer::elements(input),
        buffer::raw(output.handle.clone(), 1),
        dtype,
    );
    output
}

pub(super) fn definition(client: &Client, dtype: ElemType) -> KernelDefinition {
    define!(
        client,
        amax_kernel(buffer::word(client), buffer::word(client), dtype)
    )
}

#[cube(launch, create_dummy_kernel)]
fn amax_kernel<F: Numeric>(input: &[F], amax: &[Atomic<u32>], #[define(F)] _dtype: ElemType) {
    let mut max = 0u32;
    let mut index = ABSOLUTE_POS;
    while index < input.len() {
        max = u32::max(max, magnitude_bits(f32::cast_from(input[index])));
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
    raise(amax, 0usize, max);
}

/// `amax[index] = max(amax[index], bits)`. Most units find it large enough already.
#[cube]
pub(in crate::kernels) fn raise(amax: &[Atomic<u32>], index: usize, bits: u32) {
    if bits > amax[index].load() {
        amax[index].fetch_max(bits);
    }
}
