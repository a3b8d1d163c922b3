//! Kernels for GPUs that are not present: their CUDA C++ compiles for the GPU that each is for, and the machine code of those for
//! tensor cores has the GPU's fp8 instruction.

mod disassembly;
mod tensor_cores;

use std::{process::Command, sync::Arc};

use burn::backend::ops::IntTensorOps;
use burn::tensor::{DType, FloatDType, Shape};
use burn_cubecl::{CubeBackend, CubeDevice, cubecl::client::Client, tensor::CubeTensor};
use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, matmul_by, matmul_policy};
use burn_fp8::recipe::{AmaxCompute, DelayedScaling};
use burn_fp8::{Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, MatmulSpec};
use burn_std::Metadata;

use super::{
    gpu::Gpu,
    nvrtc::{cubin, toolkit},
};
use disassembly::{disassemble, longest_loop};

/// A tensor whose elements nobody reads, with rows so many elements apart.
fn empty(client: &Client, shape: &[usize], pitch: usize, dtype: DType) -> CubeTensor {
    let mut strides = vec![1; shape.len()];
    let mut size = pitch;
    for dim in (0..shape.len() - 1).rev() {
        strides[dim] = size;
        size *= shape[dim];
    }
    CubeTensor::new(
        client.clone(),
        client.empty(size * dtype.size()),
        Metadata::new(Shape::from(shape), strides),
        CubeDevice::Cpu(Default::default()),
        dtype,
    )
}

/// A scale for a whole tensor, or one for each of the rows, columns or blocks, in the same place.
fn scale(client: &Client, granularity: Granularity) -> CubeTensor {
    let shape: &[usize] = match granularity {
        Granularity::Tensor => &[1],
        _ => &[1, 1, 1],
    };
    empty(client, shape, 1, DType::F32)
}

/// The kernels that `launch` launches, of those of this crate that are not for products on tensor cores.
fn portable(gpu: Gpu, launch: impl FnOnce(&Client)) -> Option<Vec<(String, Arc<str>)>> {
    let mut kernels = gpu.kernels(launch)?;
    kernels.retain(|(name, _)| {
        [
            "amax",
            "quantize",
            "columns",
            "held",
            "staged",
            "dequantize",
            "matmul",
            "copy_rows",
            "turn_rows",
        ]
        .iter()
        .any(|kernel| name.starts_with(&format!("{kernel}_kernel")))
    });
    Some(kernels)
}

/// The kernels of casts, for rows that can be read four elements at a time, and for other rows ("one by one").
fn casts(gpu: Gpu, format: Fp8Format, dtype: DType) -> Option<Vec<(String, Arc<str>)>> {
    let mut casts = Vec::new();
    let mut add = |what: &str, kernels: Vec<(String, Arc<str>)>, vector: usize| {
        for (kernel, source) in kernels {
            let (kernel, _) = kernel.split_once("_kernel").unwrap();
            let by = if vector == 4 { "" } else { ", one by one" };
            casts.push((format!("{what}: {kernel}{by}"), source));
        }
    };
    // Rows, columns, and elements from a row to the next.
    for (layout, [rows, columns, pitch], vector) in [
        ("", [24, 40, 40], 4),
        ("", [5, 7, 7], 1),
        (" rows with gaps", [24, 40, 48], 4),
        (" rows with gaps", [24, 40, 41], 1),
    ] {
        let input = |client: &Client| empty(client, &[rows, columns], pitch, dtype);
        let one = |client: &Client| scale(client, Granularity::Tensor);
        let amax = portable(gpu, |client| drop(CubeBackend::fp8_amax(input(client))))?;
        add(&format!("amax{layout}"), amax, vector);
        let quantize = portable(gpu, |client| {
            drop(CubeBackend::fp8_quantize(
                input(client),
                one(client),
                format,
            ));
        })?;
        add(&format!("quantize{layout}"), quantize, vector);
        let both = portable(gpu, |client| {
            drop(CubeBackend::fp8_quantize_transposed(
                input(client),
                one(client),
                format,
            ));
        })?;
        add(&format!("quantize both ways{layout}"), both, vector);
    }
    for ([rows, columns], vector) in [([128, 136], 4), ([130, 129], 1)] {
        let together = portable(gpu, |client| {
            drop(CubeBackend::fp8_quantize_transposed(
                empty(client, &[rows, columns], columns, dtype),
                scale(client, Granularity::Tensor),
                format,
            ));
        })?;
        add("quantize both ways, together", together, vector);
    }
    let block = |rows, columns| Granularity::Block { rows, columns };
    for (what, granularity, shape, vector) in [
        // A cube holds a block; but not if it is large, or does not fill words or tiles.
        ("held", block(1, 128), [24, 128, 128], 4),
        ("held", block(1, 128), [24, 128, 129], 1),
        ("held, by columns", block(128, 128), [128, 128, 128], 4),
        ("held, by columns", block(128, 128), [128, 128, 129], 1),
        ("rows", Granularity::Row, [1, 40_960, 40_960], 4),
        ("rows", Granularity::Row, [3, 70, 70], 1),
        ("columns", block(512, 128), [512, 128, 128], 4),
        ("columns", block(10, 1), [37, 70, 70], 1),
    ] {
        let [rows, columns, pitch] = shape;
        let kernels = portable(gpu, |client| {
            let input = empty(client, &[rows, columns], pitch, dtype);
            drop(CubeBackend::fp8_quantize_blocks(
                input,
                Fp8Cast::new(granularity, format),
            ));
        })?;
        add(what, kernels, vector);
    }
    // One kernel each, but for blocks that no cube holds: they take one for amaxes, one for scales, and one for codes.
    assert_eq!(casts.len(), 4 * 3 + 2 + 4 + 4 * 2);
    Some(casts)
}

/// Whether a cast is as fast as memory depends on this: elements are read four at a time, and encoded by an instruction. A GPU as
/// fast as an H200 has time for about 30 instructions per element of bf16, of which 15 on integers.
#[test]
fn casts_are_native_where_the_gpu_has_the_instruction() {
    let Some(toolkit) = toolkit() else { return };
    let told = MatmulPolicy::Only(MatmulRoutine::Mma);
    if matmul_policy() != told {
        // Ampere's products do not read along their sums, and so it casts nothing both ways, unless it is told to.
        let name = "suite::sources::casts_are_native_where_the_gpu_has_the_instruction";
        let mut own = Command::new(std::env::current_exe().unwrap());
        own.args(["--exact", name, "--nocapture"]);
        let status = own.env("BURN_FP8_MATMUL", "mma").status().unwrap();
        assert!(status.success(), "{status}");
        return;
    }
    for (gpu, architecture, native) in [(Gpu::Ampere, "80", false), (Gpu::Hopper, "90a", true)] {
        let casts = casts(gpu, Fp8Format::E4M3, DType::BF16);
        for (name, source) in casts.into_iter().flatten() {
            let binary = cubin(&source, architecture, &toolkit).unwrap();
            let Some(code) = disassemble(&binary, &toolkit) else {
                return;
            };
            let by_fours = !name.ends_with("one by one");
            let makes_codes = !name.contains(": amax");
            let found = code.contains("F2FP.SATFINITE.E4M3.F32");
            assert_eq!(found, native && makes_codes, "{name} for {architecture}");
            let elements = match name.as_str() {
                "quantize: quantize" => 8,
                "quantize both ways: quantize" => 32,
                "quantize both ways, together: staged" => 32,
                _ => 0,
            };
            if elements > 0 {
                let of_each = longest_loop(&code) as f64 / f64::from(elements);
                println!("{name} for {architecture}: {of_each:.1} instructions an element");
                let most = if native { 16.0 } else { 30.0 };
                assert!(of_each > 1.0 && of_each < most, "{name}: {of_each}");
            }
            assert_eq!(code.contains("LDG.E.64"), by_fours, "{name}");
            assert_eq!(code.contains("LDG.E.U16"), !by_fours, "{name}");
        }
    }
}

/// Casts and the way back, scales and their updates, products without tensor cores, and the kernels that prepare operands for
/// tensor cores. (A unit test has the kernel after the products of decoded operands, which are Burn's.)
#[test]
fn portable_kernels_compile() {
    let Some(toolkit) = toolkit() else { return };
    for (gpu, architecture, format, output) in [
        (Gpu::Ada, "89", Fp8Format::E4M3, FloatDType::BF16),
        (Gpu::Hopper, "90a", Fp8Format::E5M2, FloatDType::F16),
        (Gpu::Hopper, "90a", Fp8Format::E4M3, FloatDType::F32),
    ] {
        let launch = |client: &Client| {
            let codes = |shape: &[usize]| empty(client, shape, shape[shape.len() - 1], DType::U8);
            let turned = |shape| CubeBackend::int_swap_dims(codes(shape), 1, 2);
            // Four codes at a time, and one by one.
            for shape in [[4, 64], [5, 7]] {
                let (whole, codes) = (Granularity::Tensor, codes(&shape));
                CubeBackend::fp8_dequantize(codes, scale(client, whole), whole, format, output);
            }
            let (row, rows) = (Granularity::Row, codes(&[1, 4, 64]));
            CubeBackend::fp8_dequantize(rows, scale(client, row), row, format, output);
            let multiply = |routine, sides| {
                let scales = [(); 2].map(|()| scale(client, Granularity::Tensor));
                let spec = MatmulSpec::new(format, format, output);
                matmul_by(MatmulPolicy::Only(routine), sides, scales, Bias::None, spec);
            };
            multiply(
                MatmulRoutine::Direct,
                [codes(&[1, 4, 64]), codes(&[1, 64, 3])],
            );
            let accelerated = match gpu {
                Gpu::Hopper => MatmulRoutine::Wgmma,
                _ => MatmulRoutine::Mma,
            };
            // The left side is copied by words, the right side by codes.
            multiply(accelerated, [turned(&[1, 37, 132]), codes(&[1, 37, 3])]);
        };
        let scaling = |client: &Client| {
            let floats = |count| empty(client, &[count], count, DType::F32);
            for power_of_two in [false, true] {
                CubeBackend::fp8_scales(floats(70), format, power_of_two);
            }
            for algorithm in [AmaxCompute::Max, AmaxCompute::MostRecent] {
                let recipe = DelayedScaling::new().with_amax_compute(algorithm);
                let update = recipe.update(format);
                CubeBackend::fp8_update_scale(floats(1024), floats(1), floats(1), update);
            }
        };
        let casts = casts(gpu, format, DType::from(output));
        let Some((casts, others)) = casts.zip(portable(gpu, launch)) else {
            return;
        };
        assert_eq!(others.len(), 6);
        let scaling = gpu.kernels(scaling).unwrap();
        for (kernel, expected) in [("scales_kernel", 2), ("update_kernel", 2)] {
            let found = scaling.iter().filter(|(name, _)| name.starts_with(kernel));
            assert_eq!(found.count(), expected, "{kernel}");
        }
        for (name, source) in casts.into_iter().chain(others).chain(scaling) {
            let compiled = cubin(&source, architecture, &toolkit);
            assert!(compiled.is_ok(), "{name} for {architecture}: {compiled:?}");
        }
    }
}
