//! Kernels for GPUs that are not present: their CUDA C++ compiles for the GPU that each is for, and the machine code of those for
//! tensor cores has the GPU's fp8 instruction.

use std::{collections::HashMap, process::Command, sync::Arc};

use burn::backend::ops::IntTensorOps;
use burn::tensor::{DType, FloatDType, Shape};
use burn_cubecl::{CubeBackend, CubeDevice, cubecl::client::Client, tensor::CubeTensor};
use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, matmul_amax_by, matmul_by, matmul_policy};
use burn_fp8::recipe::{AmaxCompute, DelayedScaling};
use burn_fp8::{Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, MatmulSpec};
use burn_std::Metadata;

use super::{
    gpu::Gpu,
    nvrtc::{cubin, missing, toolkit},
};

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

/// The optional parts of a product.
#[derive(Clone, Copy, Default)]
struct Parts {
    batched: bool,
    bias: bool,
    amax: bool,
}

/// The source of a product on tensor cores, for a GPU that has the instruction. The product has more rows than half of a tall tile
/// has, more columns than a cube of a cluster computes, and more terms than share a scale.
fn product(routine: MatmulRoutine, spec: MatmulSpec, parts: Parts) -> Option<Arc<str>> {
    let (gpu, kernel) = match routine {
        MatmulRoutine::Mma => (Gpu::Ada, "tile_kernel"),
        MatmulRoutine::Wgmma => (Gpu::Hopper, "tile_kernel"),
        _ => (Gpu::Hopper, "tma_kernel"),
    };
    let (batch, [m, k, n]) = (1 + usize::from(parts.batched), [256, 512, 256]);
    let kernels = gpu.kernels(|client| {
        let codes = |rows| empty(client, &[batch, rows, k], k, DType::U8);
        let sides = [codes(m), CubeBackend::int_swap_dims(codes(n), 1, 2)];
        let scales = spec.granularities.map(|of| scale(client, of));
        let bias = match parts.bias {
            true => Bias::Row(empty(client, &[n], n, DType::F32)),
            false => Bias::None,
        };
        let policy = MatmulPolicy::Only(routine);
        match parts.amax {
            true => drop(matmul_amax_by(policy, sides, scales, bias, spec)),
            false => drop(matmul_by(policy, sides, scales, bias, spec)),
        }
    })?;
    let mut products = kernels
        .into_iter()
        .filter(|(name, _)| name.starts_with(kernel));
    Some(products.next().expect("it was launched").1)
}

/// The instructions of machine code, if there is a disassembler.
fn disassemble(binary: &[u8], toolkit: &std::path::Path) -> Option<String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), binary).unwrap();
    let own = toolkit.join("bin/nvdisasm");
    let program = if own.exists() { own } else { "nvdisasm".into() };
    match Command::new(program).arg(file.path()).output() {
        Ok(output) if output.status.success() => Some(String::from_utf8(output.stdout).unwrap()),
        _ => {
            missing("no nvdisasm");
            None
        }
    }
}

/// Checks that the kernel compiles for `architecture`, to `instruction` on the codes themselves, not unpacked to a wider type.
/// Returns all instructions of the last variant, if there is a disassembler.
fn check(routine: MatmulRoutine, architecture: &str, instruction: &str) -> Option<String> {
    let toolkit = toolkit()?;
    let mut last = None;
    // Which takes no scales that change both along the sum and with each column.
    let scales = match routine {
        MatmulRoutine::WgmmaTma256 | MatmulRoutine::WgmmaTmaMulticast => 128,
        _ => 1,
    };
    let block = |rows, columns| Granularity::Block { rows, columns };
    let (e4m3, e5m2) = (Fp8Format::E4M3, Fp8Format::E5M2);
    let whole = [Granularity::Tensor; 2];
    let parts = |[batched, bias, amax]: [bool; 3]| Parts {
        batched,
        bias,
        amax,
    };
    for (lhs, rhs, output, granularities, parts) in [
        (
            e4m3,
            e4m3,
            FloatDType::F32,
            whole,
            parts([true, true, false]),
        ),
        // With the granularities of `RowwiseScaling` and `BlockScaling`.
        (
            e4m3,
            e5m2,
            FloatDType::F16,
            [Granularity::Row, Granularity::Column],
            parts([true, true, false]),
        ),
        (
            e5m2,
            e4m3,
            FloatDType::BF16,
            [block(1, 128), block(128, 128)],
            parts([false, true, false]),
        ),
        (
            e5m2,
            e5m2,
            FloatDType::F32,
            [block(1, 128), block(128, scales)],
            parts([true, false, true]),
        ),
        // A layer's output and its weight's gradient, with the amax for the next cast.
        (
            e4m3,
            e4m3,
            FloatDType::BF16,
            whole,
            parts([false, true, true]),
        ),
        (e4m3, e5m2, FloatDType::F32, whole, parts([false; 3])),
    ] {
        let spec = MatmulSpec::new(lhs, rhs, output).with_granularities(granularities);
        let source = product(routine, spec, parts)?;
        let binary = cubin(&source, architecture, &toolkit).unwrap_or_else(|log| panic!("{log}"));
        let code = disassemble(&binary, &toolkit)?;
        let instruction = format!("{instruction}.F32.{lhs:?}.{rhs:?}");
        assert!(
            code.contains(&instruction),
            "no {instruction} for {architecture}"
        );
        for wider in ["HMMA", "HGMMA", "UNPACK"] {
            assert!(!code.contains(wider), "{wider} for {architecture}");
        }
        // Behind the kernel proper there may be another version of its end, for warps whose threads are not together, as they are here.
        // With a tall tile, sums take most of the 255 registers of a unit. If scales change along the sum, some of their values are
        // kept in memory in each of the loop's four steps.
        let most = match routine {
            MatmulRoutine::WgmmaTma256 | MatmulRoutine::WgmmaTmaMulticast
                if granularities[0] == block(1, 128) =>
            {
                4 * 32
            }
            _ => 0,
        };
        let run = code.split("WARPSYNC.COLLECTIVE").next().unwrap();
        let spills = ["STL", "LDL"].map(|spill| run.matches(spill).count());
        assert!(spills.iter().all(|spills| *spills <= most), "{spills:?}");
        if architecture == "90a" {
            let (step, store) = lengths(run);
            let of_parts = format!("bias {}, amax {}", parts.bias, parts.amax);
            println!(
                "{routine}, {output:?}, {granularities:?}, {of_parts}: {step} instructions a step, {store} to store, \
                 {spills:?} stores and loads of what registers do not hold"
            );
        }
        last = Some(code);
    }
    last
}

#[test]
fn mma_is_native_on_ada() {
    check(MatmulRoutine::Mma, "89", "QMMA.16832");
}

#[test]
fn mma_is_native_on_rtx_blackwell() {
    check(MatmulRoutine::Mma, "120a", "QMMA.16832");
}

#[test]
fn wgmma_is_native_on_hopper() {
    check(MatmulRoutine::Wgmma, "90a", "QGMMA.64x128x32");
}

/// The compiler takes minutes for all three, so each is a test of its own.
fn check_tma(routine: MatmulRoutine, multicast: bool) {
    if let Some(code) = check(routine, "90a", "QGMMA.64x128x32") {
        assert!(code.contains("UTMALDG.2D"), "no TMA loads");
        assert_eq!(code.contains("UTMALDG.2D.MULTICAST"), multicast);
        // A cluster waits for its stores once, at the end.
        let waits = code.matches("MEMBAR.ALL.GPU").count();
        assert_eq!(waits, usize::from(multicast));
    }
}

#[test]
fn tma_loads_are_native_on_hopper() {
    check_tma(MatmulRoutine::WgmmaTma, false);
}

#[test]
fn tma_loads_of_tall_tiles_are_native_on_hopper() {
    check_tma(MatmulRoutine::WgmmaTma256, false);
}

#[test]
fn tma_loads_of_clusters_are_native_on_hopper() {
    check_tma(MatmulRoutine::WgmmaTmaMulticast, true);
}

/// Why there are two instructions: Hopper splits `mma.sync`, and no GPU before it has `wgmma`.
#[test]
fn each_instruction_is_for_its_gpus() {
    let Some(toolkit) = toolkit() else { return };
    let spec = MatmulSpec::new(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32);
    let source = |routine| product(routine, spec, Parts::default());
    let [Some(wgmma), Some(mma)] = [MatmulRoutine::Wgmma, MatmulRoutine::Mma].map(source) else {
        return;
    };
    assert!(cubin(&wgmma, "89", &toolkit).is_err());
    let binary = cubin(&mma, "90a", &toolkit).unwrap();
    if let Some(code) = disassemble(&binary, &toolkit) {
        assert!(code.contains("HMMA") && !code.contains("QMMA"));
    }
}

/// The instruction in a line of machine code.
fn instruction(line: &str) -> Option<&str> {
    let (place, rest) = line.trim().strip_prefix("/*")?.split_once("*/")?;
    (!place.contains('x') && rest.contains(';')).then_some(rest)
}

/// The numbers of instructions from one step of `wgmma` to the next, and from the last one until its sums are stored.
fn lengths(code: &str) -> (usize, usize) {
    let instructions: Vec<&str> = code.lines().filter_map(instruction).collect();
    let places = |name: &str| -> Vec<usize> {
        let found = instructions.iter().enumerate();
        let found = found.filter(|(_, instruction)| instruction.contains(name));
        found.map(|(place, _)| place).collect()
    };
    let multiplies = places("QGMMA");
    let stored = places("STG").pop().expect("it stores");
    // Without TMA loads there is one step in the loop. Otherwise there are four, which are not all alike.
    let last = multiplies[multiplies.len() - 1];
    let step = match multiplies.len() {
        4 => longest_loop(code),
        count => (last - multiplies[count / 4 - 1]) / 3,
    };
    (step, stored - last)
}

/// The number of instructions in the longest loop of some machine code: from a label to the branch back to it.
fn longest_loop(code: &str) -> usize {
    let (mut labels, mut count, mut longest) = (HashMap::new(), 0, 0);
    for line in code.lines() {
        if let Some(label) = line.trim().strip_suffix(':') {
            labels.insert(label.to_string(), count);
        } else if let Some(instruction) = instruction(line) {
            count += 1;
            let target = instruction.split_once("BRA").and_then(|(_, to)| {
                let (_, label) = to.split_once("`(")?;
                labels.get(label.split_once(')')?.0)
            });
            longest = target.map_or(longest, |start| longest.max(count - start));
        }
    }
    longest
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
