//! Kernels for GPUs that are not present: their CUDA C++ compiles for the GPU that each is for, and the machine code of those for
//! tensor cores has the GPU's fp8 instruction.

use std::{collections::HashMap, process::Command};

use burn::tensor::FloatDType;
use burn_cubecl::{
    CubeDevice,
    cubecl::{Compiler, client::Client, prelude::KernelDefinition},
};
use burn_fp8::kernels::{MatmulRoutine, matmul_definition, portable_definitions};
use burn_fp8::{Fp8Format, Granularity, MatmulSpec};
use cubecl_cpp::{
    shared::{CompilationOptions, CppCompiler, CppSupportedFeatures},
    target::Cuda,
};

use super::{
    gpu::Gpu,
    nvrtc::{cubin, missing, toolkit},
};

/// The CUDA C++ into which CubeCL compiles a kernel.
fn source(definition: KernelDefinition) -> String {
    let options = CompilationOptions {
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            ..Default::default()
        },
        ..Default::default()
    };
    let kernel = CppCompiler::<Cuda>::default().compile(definition, &options);
    kernel.unwrap().source
}

fn client() -> Client {
    CubeDevice::Cpu(Default::default()).client()
}

/// The optional parts of a product.
#[derive(Clone, Copy, Default)]
struct Parts {
    batched: bool,
    bias: bool,
    amax: bool,
}

/// The source of a product on tensor cores.
fn product(
    routine: MatmulRoutine,
    spec: MatmulSpec,
    granularities: [Granularity; 2],
    Parts {
        batched,
        bias,
        amax,
    }: Parts,
) -> String {
    let spec = spec.with_granularities(granularities);
    let definition = matmul_definition(&client(), routine, spec, batched, bias, amax);
    source(definition.unwrap())
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
        MatmulRoutine::WgmmaTma256 => 128,
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
        let spec = MatmulSpec::new(lhs, rhs, output);
        let source = product(routine, spec, granularities, parts);
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
        // Of a tall tile, the second half is computed while the first is added: all 255 registers of a unit hold sums, and in each of
        // the loop's four steps some values are kept in memory.
        let most = match routine {
            MatmulRoutine::WgmmaTma256 => 4 * 32,
            _ => 0,
        };
        for spill in ["STL", "LDL"] {
            let spills = code.lines().filter(|line| line.contains(spill)).count();
            assert!(spills <= most, "{spills} {spill} for {architecture}");
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

#[test]
fn tma_loads_are_native_on_hopper() {
    for routine in [MatmulRoutine::WgmmaTma, MatmulRoutine::WgmmaTma256] {
        let code = check(routine, "90a", "QGMMA.64x128x32");
        if let Some(code) = code {
            assert!(code.contains("UTMALDG.2D"), "no TMA loads");
        }
    }
}

/// Why there are two instructions: Hopper splits `mma.sync`, and no GPU before it has `wgmma`.
#[test]
fn each_instruction_is_for_its_gpus() {
    let Some(toolkit) = toolkit() else { return };
    let e4m3 = MatmulSpec::new(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32);
    let whole = [Granularity::Tensor; 2];
    assert!(
        cubin(
            &product(MatmulRoutine::Wgmma, e4m3, whole, Parts::default()),
            "89",
            &toolkit
        )
        .is_err()
    );
    let binary = cubin(
        &product(MatmulRoutine::Mma, e4m3, whole, Parts::default()),
        "90a",
        &toolkit,
    )
    .unwrap();
    if let Some(code) = disassemble(&binary, &toolkit) {
        assert!(code.contains("HMMA") && !code.contains("QMMA"));
    }
}

/// The number of instructions in the longest loop of some machine code: from a label to the branch back to it.
fn longest_loop(code: &str) -> usize {
    let (mut labels, mut count, mut longest) = (HashMap::new(), 0, 0);
    for line in code.lines().map(str::trim) {
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label.to_string(), count);
        } else if let Some((_, instruction)) = line
            .strip_prefix("/*")
            .and_then(|rest| rest.split_once("*/"))
            .filter(|(place, rest)| !place.contains('x') && rest.contains(';'))
        {
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

/// Whether a cast is as fast as memory depends on this: elements are read four at a time, and encoded by an instruction. A GPU as
/// fast as an H200 has time for about 30 instructions per element of bf16, of which 15 on integers.
#[test]
fn casts_are_native_where_the_gpu_has_the_instruction() {
    let Some(toolkit) = toolkit() else { return };
    for (gpu, architecture, native) in [(Gpu::Ampere, "80", false), (Gpu::Hopper, "90a", true)] {
        let Some(client) = gpu.client() else { return };
        let casts = portable_definitions(&client, Fp8Format::E4M3, FloatDType::BF16);
        let casts = casts
            .into_iter()
            .filter(|(name, _)| name.starts_with("quantize") || name.starts_with("amax"));
        for (name, definition) in casts {
            let binary = cubin(&source(definition), architecture, &toolkit).unwrap();
            let Some(code) = disassemble(&binary, &toolkit) else {
                return;
            };
            let by_fours = !name.ends_with("one by one");
            let makes_codes = name.starts_with("quantize") && !name.contains("amax");
            if makes_codes {
                let found = code.contains("F2FP.SATFINITE.E4M3.F32");
                assert_eq!(found, native, "{name} for {architecture}");
            }
            let elements = match name {
                "quantize" => 8,
                "quantize_transposed" => 32,
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

/// Casts, products that decode, and the kernels that prepare operands for tensor cores.
#[test]
fn portable_kernels_compile() {
    let Some(toolkit) = toolkit() else { return };
    for (architecture, format, dtype) in [
        ("89", Fp8Format::E4M3, FloatDType::BF16),
        ("90a", Fp8Format::E5M2, FloatDType::F16),
        ("90a", Fp8Format::E4M3, FloatDType::F32),
    ] {
        let kernels = portable_definitions(&client(), format, dtype);
        assert_eq!(kernels.len(), 27);
        for (name, definition) in kernels {
            let compiled = cubin(&source(definition), architecture, &toolkit);
            assert!(compiled.is_ok(), "{name} for {architecture}: {compiled:?}");
        }
    }
}
