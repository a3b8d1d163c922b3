//! Kernels that are looked at instead of launched.

use burn::tensor::{DType, FloatDType};
use burn_backend::cubecl::dtype_to_storage_type;
use cubecl::{client::Client, prelude::KernelDefinition};

use super::{
    amax, dequantize, dequantize_blocks, matmul, quantize, quantize_blocks, quantize_transposed,
};
use crate::Fp8Format;

/// The definition of a kernel with some arguments.
macro_rules! define {
    ($client:expr, $kernel:ident($($argument:expr),* $(,)?)) => {
        $kernel::create_dummy_kernel(
            $client.properties_shared(),
            $client.target_properties_shared(),
            CubeCount::new_single(),
            CubeDim::new_1d(256),
            $($argument),*
        )
        .define()
    };
}

pub(in crate::kernels) use define;

/// The kernels that need no tensor cores, by name: casts of floats of `dtype` to `format` and back, and products. As
/// [`matmul_definition`](super::matmul_definition) gives those that do.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn::tensor::FloatDType;
/// use burn_cubecl::{CubeDevice, cubecl::cpu::CpuDevice};
/// use burn_fp8::{Fp8Format, kernels::portable_definitions};
///
/// let client = CubeDevice::Cpu(CpuDevice).client();
/// let kernels = portable_definitions(&client, Fp8Format::E4M3, FloatDType::BF16);
/// assert!(kernels.iter().any(|(name, _)| *name == "quantize"));
/// # }
/// ```
pub fn portable_definitions(
    client: &Client,
    format: Fp8Format,
    dtype: FloatDType,
) -> Vec<(&'static str, KernelDefinition)> {
    let bf16 = dtype == FloatDType::BF16;
    let dtype = dtype_to_storage_type(DType::from(dtype));
    let [block_amax, block_codes, block_columns] =
        quantize_blocks::definitions(client, format, dtype);
    [
        ("amax", amax::definition(client, dtype)),
        ("quantize", quantize::definition(client, format, dtype)),
        (
            "quantize_transposed",
            quantize_transposed::definition(client, format, dtype),
        ),
        ("quantize_blocks: amax", block_amax),
        ("quantize_blocks: codes", block_codes),
        ("quantize_blocks: codes by columns", block_columns),
        (
            "dequantize",
            dequantize::definition(client, format, dtype, bf16),
        ),
        (
            "dequantize_blocks",
            dequantize_blocks::definition(client, format, dtype, bf16),
        ),
    ]
    .into_iter()
    .chain(matmul::definitions(client, format, dtype, bf16))
    .collect()
}
