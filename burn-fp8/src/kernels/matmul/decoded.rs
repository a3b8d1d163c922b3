//! Decodes both operands, multiplies them by Burn's own kernels (tuned, with tensor cores if there are any), and scales
//! afterwards.
//!
//! bf16 holds every code exactly, so nothing is lost on devices that multiply bf16 faster. Scales that change along the inner
//! dimension must be applied to the operands. These are f32 then, and Burn's kernels round them to TF32 on devices that have it.

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{
    CubeBackend, CubeDevice,
    kernel::matmul as burn_matmul,
    ops::{numeric::ones, reshape},
    tensor::CubeTensor,
};
use cubecl::prelude::*;

use super::{Outline, Product, Size, routine::Routine};
use crate::{
    Granularity,
    granular::scaled_together,
    kernels::{
        amax::raise,
        batch::side_by_side,
        buffer::{self, swapped},
        codec::{by_hand, float_to, magnitude_bits},
        dequantize,
        dequantize_blocks::dequantize as dequantize_scaled,
        scale_grid::{ScaleGrid, Scales, scale_index},
    },
};

/// See [`MatmulRoutine::Decoded`](super::MatmulRoutine::Decoded).
pub(super) struct Decoded;

impl Routine for Decoded {
    fn fits(&self, outline: &Outline) -> bool {
        let Size { m, n, k, batches } = outline.size;
        // Values are counted as they are written: four at a time if the sizes allow it and no scales are applied to single
        // values.
        let fours = |[rows, columns]: [usize; 2]| {
            let fours = rows.is_multiple_of(4) && columns.is_multiple_of(4);
            match fours && !scales_terms(outline.granularities, k) {
                true => 4,
                false => 1,
            }
        };
        let mut sides = outline.codes.into_iter().zip([[m, k], [k, n]]);
        outline.size.multiplications() * batches > 0
            && sides.all(|(codes, side)| codes <= fours(side) * buffer::MOST)
    }

    fn matmul(&self, product: Product) -> CubeTensor {
        let device = &product.lhs.device;
        let (dtype, shaped) = (operand_dtype(device), matches!(device, CubeDevice::Cuda(_)));
        matmul(product, dtype, shaped)
    }
}

/// Whether CubeCL 0.11's autotune fails at a product in 16 bits on GPUs with TMA: it tries kernels whose tiles have 512 rows, where TMA takes
/// 256, and once their launch has failed, so does all that is computed of the operands.
fn is_tall(rows: usize, columns: usize) -> bool {
    columns > 32 && rows >= 4 * columns
}

/// The product by Burn's kernels, in f32. If it is `shaped`, a tall one is computed as the transposition of `right^T left^T`, and so are all
/// rows of a batch at once, where Burn might multiply them at once.
fn multiply(left: CubeTensor, right: CubeTensor, shaped: bool) -> CubeTensor {
    let (mut shape, wide) = (left.shape(), right.shape());
    let row = shape.num_dims() - 2;
    let (inner, columns) = (shape[row + 1], wide[row + 1]);
    let all: usize = shape[..=row].iter().product();
    let shared = row > 0 && wide[..row].iter().all(|&matrices| matrices == 1);
    if shaped && shared && is_tall(all, columns) {
        let left = reshape(left, Shape::new([all, inner]));
        let right = reshape(right, Shape::new([inner, columns]));
        shape[row + 1] = columns;
        return reshape(multiply(left, right, shaped), shape);
    }
    match shaped && is_tall(shape[row], columns) {
        true => swapped(multiply(swapped(right), swapped(left), shaped)),
        false => burn_matmul::matmul(left, right, None, Default::default(), DType::F32)
            .expect("Burn multiplies floats of any shape"),
    }
}

/// The product, with operands decoded to `dtype` unless they have to be scaled, which takes f32.
fn matmul(product: Product, dtype: FloatDType, shaped: bool) -> CubeTensor {
    let Size { m, n, k, .. } = product.size();
    let along = scales_terms(product.spec.granularities, k);
    let Product {
        lhs,
        rhs,
        lhs_scales,
        rhs_scales,
        bias,
        spec,
        amax,
    } = product;
    let unit = ones(lhs.device.clone(), [1].into(), DType::F32);
    let (left, right, lhs_scales, rhs_scales) = if along {
        let f32 = FloatDType::F32;
        let unit = Scales {
            tensor: unit,
            granularity: Granularity::Tensor,
        };
        (
            dequantize_scaled(lhs, lhs_scales, spec.lhs, f32),
            dequantize_scaled(rhs, rhs_scales, spec.rhs, f32),
            unit.clone(),
            unit,
        )
    } else {
        (
            dequantize(lhs, unit.clone(), spec.lhs, dtype),
            dequantize(rhs, unit, spec.rhs, dtype),
            lhs_scales,
            rhs_scales,
        )
    };
    let sums = multiply(left, right, shaped && !along);

    let output = buffer::empty_floats(&sums, sums.shape(), DType::from(spec.output));
    let length = output.shape().num_elements();
    let client = output.client.clone();
    let starts = [&lhs_scales, &rhs_scales].map(|scales| scales.starts(&output.shape()));
    let whole = [lhs_scales.granularity, rhs_scales.granularity] == [Granularity::Tensor; 2];
    let (count, dim) = buffer::grid(&client, length);
    scale_kernel::launch(
        &client,
        count,
        dim,
        buffer::elements(sums),
        lhs_scales.elements(),
        rhs_scales.elements(),
        side_by_side(&client, starts),
        buffer::bias(&client, &bias),
        buffer::whole(&output),
        buffer::amax(&client, &amax),
        lhs_scales.grid(),
        rhs_scales.grid(),
        m as u32,
        n as u32,
        whole,
        bias.row().is_some(),
        amax.is_some(),
        by_hand(&client, output.dtype),
        dtype_to_storage_type(output.dtype),
    );
    output
}

/// Whether scales change along sums of `k` terms.
fn scales_terms(granularities: [Granularity; 2], k: usize) -> bool {
    scaled_together(granularities).is_some_and(|together| together < k)
}

/// bf16 if the device computes in it, otherwise f32. Processors compute bf16 in f32.
fn operand_dtype(device: &CubeDevice) -> FloatDType {
    let processor = matches!(device, CubeDevice::Cpu(_));
    match !processor && CubeBackend::supports_dtype(device, DType::BF16) {
        true => FloatDType::BF16,
        false => FloatDType::F32,
    }
}

#[cfg_attr(not(test), cube(launch))]
#[cfg_attr(test, cube(launch, create_dummy_kernel))]
fn scale_kernel<F: Numeric>(
    sums: &[f32],
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    starts: &[u32],
    bias: &[f32],
    output: &mut [F],
    amax: &[Atomic<u32>],
    left_scales: ScaleGrid,
    right_scales: ScaleGrid,
    m: u32,
    n: u32,
    #[comptime] whole: bool,
    #[comptime] has_bias: bool,
    #[comptime] has_amax: bool,
    #[comptime] by_hand: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut lhs_inverse = 1.0f32 / lhs_scale[0];
    let mut rhs_inverse = 1.0f32 / rhs_scale[0];
    let mut max = 0u32;
    let mut index = ABSOLUTE_POS;
    while index < output.len() {
        if comptime!(!whole) {
            let (line, column) = (index / n as usize, index % n as usize);
            let (batch, row) = (line / m as usize, line % m as usize);
            let start = starts[2 * batch] as usize;
            lhs_inverse = 1.0f32 / lhs_scale[scale_index(&left_scales, start, row, 0usize)];
            let start = starts[2 * batch + 1] as usize;
            rhs_inverse = 1.0f32 / rhs_scale[scale_index(&right_scales, start, 0usize, column)];
        }
        let mut value = sums[index] * lhs_inverse * rhs_inverse;
        if has_bias {
            value += bias[index % bias.len()];
        }
        let value = float_to::<F>(value, by_hand);
        output[index] = value;
        if has_amax {
            max = u32::max(max, magnitude_bits(f32::cast_from(value)));
        }
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
    if has_amax {
        raise(amax, 0usize, max);
    }
}

#[cfg(all(test, feature = "cpu"))]
#[path = "../../../tests/suite/nvrtc.rs"]
#[allow(dead_code)]
mod nvrtc;

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::TensorData;
    use burn_std::reader::try_read_sync;
    use cubecl::{Compiler, CubeKernel};
    use cubecl_cpp::{shared::CppCompiler, target::Cuda};

    use super::*;
    use crate::kernels::scale_grid::ScaleGridLaunch;
    use crate::{Bias, Fp8Format, Fp8Ops, MatmulSpec};

    /// As on GPUs: operands in bf16, and a product in f32.
    #[test]
    fn bf16_holds_every_code() {
        let device = CubeDevice::Cpu(Default::default());
        let one = || ones(device.clone(), [1].into(), DType::F32);
        let cast = |values: &[f32], shape: [usize; 2], format| {
            let data = TensorData::new(values.to_vec(), shape);
            CubeBackend::fp8_quantize(CubeBackend::float_from_data(data, &device), one(), format).0
        };
        let finite = |format: Fp8Format| -> Vec<f32> {
            let values = format.values().iter().copied();
            values.filter(|value| value.is_finite()).collect()
        };
        let (left, right) = (finite(Fp8Format::E4M3), finite(Fp8Format::E5M2));
        let spec = MatmulSpec::new(Fp8Format::E4M3, Fp8Format::E5M2, FloatDType::F32);
        for shaped in [false, true] {
            let product = Product::new(
                [
                    cast(&left, [left.len(), 1], spec.lhs),
                    cast(&right, [1, right.len()], spec.rhs),
                ],
                [one(), one()],
                Bias::None,
                spec,
            );
            let output = matmul(product, FloatDType::BF16, shaped);
            let data = try_read_sync(CubeBackend::float_into_data(output));
            let found = data.unwrap().unwrap().try_to_vec::<f32>().unwrap();
            // Sums of a single term, all exact.
            let expected = left.iter().flat_map(|x| right.iter().map(move |y| x * y));
            assert!(found.iter().copied().eq(expected));
        }
    }

    #[test]
    fn the_product_is_the_same_in_every_shape() {
        let device = CubeDevice::Cpu(Default::default());
        let tensor = |shape: &[usize]| {
            let count = shape.iter().product();
            let values: Vec<f32> = (0..count).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
            CubeBackend::float_from_data(TensorData::new(values, shape.to_vec()), &device)
        };
        for (left, right) in [
            (&[140, 3][..], &[3, 33][..]),
            (&[2, 140, 3], &[2, 3, 33]),
            // All rows of a batch; and of the transposition, where the batch is the right factor's.
            (&[3, 50, 3], &[1, 3, 33]),
            (&[1, 140, 3], &[20, 3, 33]),
            (&[2, 5, 3], &[2, 3, 4]),
        ] {
            let [plain, shaped] = [false, true].map(|shaped| {
                let product = multiply(tensor(left), tensor(right), shaped);
                try_read_sync(CubeBackend::float_into_data(product))
                    .unwrap()
                    .unwrap()
            });
            assert_eq!(shaped, plain, "{left:?} by {right:?}");
        }
    }

    /// The kernel behind Burn's. The tests that launch kernels for GPUs do not launch those of Burn.
    #[test]
    fn sums_are_scaled_on_gpus() {
        let Some(toolkit) = nvrtc::toolkit() else {
            return;
        };
        let client = CubeDevice::Cpu(Default::default()).client();
        for (architecture, dtype) in [
            ("89", DType::BF16),
            ("90a", DType::F16),
            ("90a", DType::F32),
        ] {
            let word = || buffer::word(&client);
            let grid = || ScaleGridLaunch::new(1, 1, 1, 1);
            let kernel = scale_kernel::create_dummy_kernel(
                client.properties_shared(),
                client.target_properties_shared(),
                CubeCount::new_single(),
                CubeDim::new_1d(256),
                word(),
                word(),
                word(),
                word(),
                word(),
                word(),
                word(),
                grid(),
                grid(),
                1,
                1,
                false,
                true,
                true,
                false,
                dtype_to_storage_type(dtype),
            );
            let source = CppCompiler::<Cuda>::default()
                .compile(kernel.define(), &Default::default())
                .unwrap()
                .source;
            nvrtc::cubin(&source, architecture, &toolkit).unwrap_or_else(|log| panic!("{log}"));
        }
    }
}
