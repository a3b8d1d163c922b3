//! Definitions of kernels, which are inspected instead of launched.

use burn::tensor::{DType, FloatDType};
use burn_backend::cubecl::dtype_to_storage_type;
use cubecl::{client::Client, prelude::KernelDefinition};

use super::{
    amax, codec::by_hand, dequantize, dequantize_blocks, matmul, quantize, quantize_blocks,
    quantize_transposed,
};
use crate::Fp8Format;

/// The definition of a kernel with the given arguments.
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

/// The kernels that need no tensor cores, by name: casts from floats of `dtype` to `format` and back, and products. Casts come in
/// two versions, for rows that can be read and written four elements at a time, and for other rows ("one by one"), and some in two more,
/// for rows with gaps between them.
/// [`matmul_definition`](super::matmul_definition) gives the kernels that need tensor cores.
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
    let dtype = DType::from(dtype);
    let (by_hand, dtype) = (by_hand(client, dtype), dtype_to_storage_type(dtype));
    let casts = [4, 1].map(|vector| {
        let [amaxes, codes, columns, held, held_columns] =
            quantize_blocks::definitions(client, vector, format, dtype);
        let turned = quantize_transposed::definition(client, vector, format, dtype);
        [
            amax::definition(client, vector, false, dtype),
            quantize::definition(client, vector, false, format, dtype),
            turned,
            amaxes,
            codes,
            columns,
            held,
            held_columns,
        ]
    });
    let names = [
        [
            "amax",
            "quantize",
            "quantize_transposed",
            "quantize_blocks: amax",
            "quantize_blocks: codes",
            "quantize_blocks: codes by columns",
            "quantize_blocks: held",
            "quantize_blocks: held, by columns",
        ],
        [
            "amax, one by one",
            "quantize, one by one",
            "quantize_transposed, one by one",
            "quantize_blocks: amax, one by one",
            "quantize_blocks: codes, one by one",
            "quantize_blocks: codes by columns, one by one",
            "quantize_blocks: held, one by one",
            "quantize_blocks: held, by columns, one by one",
        ],
    ];
    let amax = |vector| amax::definition(client, vector, true, dtype);
    let quantize = |vector| quantize::definition(client, vector, true, format, dtype);
    let with_gaps = [
        ("amax of rows with gaps", amax(4)),
        ("amax of rows with gaps, one by one", amax(1)),
        ("quantize rows with gaps", quantize(4)),
        ("quantize rows with gaps, one by one", quantize(1)),
    ];
    let back = [4, 1].map(|vector| dequantize::definition(client, vector, format, dtype, by_hand));
    let blocks_back = dequantize_blocks::definition(client, format, dtype, by_hand);
    let names = names.into_iter().flatten();
    names
        .zip(casts.into_iter().flatten())
        .chain(with_gaps)
        .chain(
            ["dequantize", "dequantize, one by one"]
                .into_iter()
                .zip(back),
        )
        .chain([("dequantize_blocks", blocks_back)])
        .chain(matmul::definitions(client, format, dtype, by_hand))
        .collect()
}
