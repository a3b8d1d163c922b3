//! The kernels for GPUs that are not here: their CUDA C++ compiles for the GPU each is for, and the machine code of those
//! for tensor cores has the GPU's fp8 instruction.
//!
//! `scripts/nvrtc` brings the compiler and the disassembler. Without them nothing is tested, unless `BURN_FP8_REQUIRE_NVRTC`
//! is set: then their absence is a failure.

use std::{
    ffi::{CStr, CString},
    path::PathBuf,
    process::Command,
};

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
use cudarc::nvrtc::{result, sys};

/// Something is not here.
fn missing(what: &str) {
    assert!(
        std::env::var_os("BURN_FP8_REQUIRE_NVRTC").is_none(),
        "{what}, and BURN_FP8_REQUIRE_NVRTC is set (scripts/nvrtc downloads it)"
    );
    eprintln!("{what}: skipped (scripts/nvrtc downloads it)");
}

/// A folder with `include` and `bin`, if NVRTC can be loaded.
fn toolkit() -> Option<PathBuf> {
    // SAFETY: opens a library of NVIDIA's, if there is one.
    let present = unsafe { sys::is_culib_present() };
    let home = ["NVRTC_HOME", "CUDA_PATH"]
        .into_iter()
        .find_map(std::env::var_os)
        .map_or(PathBuf::from("/usr/local/cuda"), PathBuf::from);
    if !present || !home.join("include/cuda_fp16.h").exists() {
        missing("no NVRTC, or no headers of CUDA");
        return None;
    }
    Some(home)
}

/// The CUDA C++ that CubeCL makes of a kernel.
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

/// The source of a product on tensor cores.
fn product(
    routine: MatmulRoutine,
    spec: MatmulSpec,
    granularities: [Granularity; 2],
    has_bias: bool,
) -> String {
    source(matmul_definition(&client(), routine, spec, granularities, has_bias).unwrap())
}

/// The machine code for `architecture`, or what NVRTC has against it.
fn compile(source: &str, architecture: &str, toolkit: &std::path::Path) -> Result<Vec<u8>, String> {
    let source = CString::new(source).unwrap();
    let include = toolkit.join("include");
    let options = [
        format!("--gpu-architecture={architecture}"),
        format!("--include-path={}", include.display()),
        format!("--include-path={}", include.join("cccl").display()),
    ];
    let program = result::create_program(&source, None).unwrap();
    // SAFETY: the program is destroyed last, and its sizes are asked for before what they are of.
    unsafe {
        let compiled = result::compile_program(program, &options);
        let log = result::get_program_log(program).unwrap();
        let log = CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned();
        let binary = compiled.map_err(|_| log).map(|()| {
            let mut size = 0;
            sys::nvrtcGetCUBINSize(program, &mut size).result().unwrap();
            let mut binary = vec![0u8; size];
            sys::nvrtcGetCUBIN(program, binary.as_mut_ptr().cast())
                .result()
                .unwrap();
            binary
        });
        result::destroy_program(program).unwrap();
        binary
    }
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

/// The kernel compiles for `architecture`, to `instruction` on the codes themselves: not unpacked for wider ones. Returns
/// all instructions of the last variant, if there is a disassembler.
fn check(routine: MatmulRoutine, architecture: &str, instruction: &str) -> Option<String> {
    let toolkit = toolkit()?;
    let mut last = None;
    let block = |rows, columns| Granularity::Block { rows, columns };
    let (e4m3, e5m2) = (Fp8Format::E4M3, Fp8Format::E5M2);
    for (lhs, rhs, output, granularities, has_bias) in [
        (e4m3, e4m3, FloatDType::F32, [Granularity::Tensor; 2], true),
        // As `RowwiseScaling` and `BlockScaling` have it.
        (
            e4m3,
            e5m2,
            FloatDType::F16,
            [Granularity::Row, Granularity::Column],
            true,
        ),
        (
            e5m2,
            e4m3,
            FloatDType::BF16,
            [block(1, 128), block(128, 128)],
            false,
        ),
        (
            e5m2,
            e5m2,
            FloatDType::F32,
            [block(1, 128), block(128, 1)],
            false,
        ),
    ] {
        let spec = MatmulSpec::new(lhs, rhs, output);
        let source = product(routine, spec, granularities, has_bias);
        let binary = compile(&source, architecture, &toolkit).unwrap_or_else(|log| panic!("{log}"));
        let code = disassemble(&binary, &toolkit)?;
        let instruction = format!("{instruction}.F32.{lhs:?}.{rhs:?}");
        assert!(
            code.contains(&instruction),
            "no {instruction} for {architecture}"
        );
        for wider in ["HMMA", "HGMMA", "UNPACK"] {
            assert!(!code.contains(wider), "{wider} for {architecture}");
        }
        for spill in ["STL", "LDL"] {
            assert!(
                !code.contains(spill),
                "registers are spilled for {architecture}"
            );
        }
        last = Some(code);
    }
    last
}

#[test]
fn mma_is_native_on_ada() {
    check(MatmulRoutine::Mma, "sm_89", "QMMA.16832");
}

#[test]
fn mma_is_native_on_rtx_blackwell() {
    check(MatmulRoutine::Mma, "sm_120a", "QMMA.16832");
}

#[test]
fn wgmma_is_native_on_hopper() {
    check(MatmulRoutine::Wgmma, "sm_90a", "QGMMA.64x128x32");
}

#[test]
fn tma_loads_are_native_on_hopper() {
    let code = check(MatmulRoutine::WgmmaTma, "sm_90a", "QGMMA.64x128x32");
    if let Some(code) = code {
        assert!(code.contains("UTMALDG.2D"), "no TMA loads");
    }
}

/// Why there are two: Hopper takes `mma.sync` apart, and nothing before it knows `wgmma`.
#[test]
fn each_instruction_is_for_its_gpus() {
    let Some(toolkit) = toolkit() else { return };
    let e4m3 = MatmulSpec::new(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32);
    let whole = [Granularity::Tensor; 2];
    assert!(
        compile(
            &product(MatmulRoutine::Wgmma, e4m3, whole, true),
            "sm_89",
            &toolkit
        )
        .is_err()
    );
    let binary = compile(
        &product(MatmulRoutine::Mma, e4m3, whole, true),
        "sm_90a",
        &toolkit,
    )
    .unwrap();
    if let Some(code) = disassemble(&binary, &toolkit) {
        assert!(code.contains("HMMA") && !code.contains("QMMA"));
    }
}

/// Casts, products that decode, and what goes before tensor cores.
#[test]
fn portable_kernels_compile() {
    let Some(toolkit) = toolkit() else { return };
    for (architecture, format, dtype) in [
        ("sm_89", Fp8Format::E4M3, FloatDType::BF16),
        ("sm_90a", Fp8Format::E5M2, FloatDType::F16),
        ("sm_90a", Fp8Format::E4M3, FloatDType::F32),
    ] {
        let kernels = portable_definitions(&client(), format, dtype);
        assert_eq!(kernels.len(), 11);
        for (name, definition) in kernels {
            let compiled = compile(&source(definition), architecture, &toolkit);
            assert!(compiled.is_ok(), "{name} for {architecture}: {compiled:?}");
        }
    }
}
