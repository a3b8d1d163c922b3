//! The tensor-core kernels for GPUs that are not here: their CUDA C++ compiles for the GPU each is for, and its machine code
//! has the GPU's fp8 instruction. `scripts/nvrtc` brings the compiler and the disassembler.

use std::{
    ffi::{CStr, CString},
    path::PathBuf,
    process::Command,
};

use burn::tensor::FloatDType;
use burn_cubecl::{CubeDevice, cubecl::Compiler};
use burn_fp8::kernels::{MatmulRoutine, matmul_definition};
use burn_fp8::{Fp8Format, Granularity, MatmulSpec};
use cubecl_cpp::{
    shared::{CompilationOptions, CppCompiler, CppSupportedFeatures},
    target::Cuda,
};
use cudarc::nvrtc::{result, sys};

/// A folder with `include` and `bin`, if NVRTC can be loaded.
fn toolkit() -> Option<PathBuf> {
    // SAFETY: opens a library of NVIDIA's, if there is one.
    let present = unsafe { sys::is_culib_present() };
    let home = ["NVRTC_HOME", "CUDA_PATH"]
        .into_iter()
        .find_map(std::env::var_os)
        .map_or(PathBuf::from("/usr/local/cuda"), PathBuf::from);
    if !present || !home.join("include/cuda_fp16.h").exists() {
        eprintln!("no NVRTC, or no headers of CUDA: skipped (scripts/nvrtc downloads them)");
        return None;
    }
    Some(home)
}

/// The CUDA C++ that CubeCL makes of a kernel.
fn source(routine: MatmulRoutine, spec: MatmulSpec) -> String {
    let client = CubeDevice::Cpu(Default::default()).client();
    let definition =
        matmul_definition(&client, routine, spec, [Granularity::Tensor; 2], true).unwrap();
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
            eprintln!("no nvdisasm: the instructions are not looked at");
            None
        }
    }
}

/// The kernel compiles for `architecture`, to `instruction` on the codes themselves: not unpacked for wider ones. Returns
/// all instructions of the last variant, if there is a disassembler.
fn check(routine: MatmulRoutine, architecture: &str, instruction: &str) -> Option<String> {
    let toolkit = toolkit()?;
    let mut last = None;
    for (lhs, rhs, output) in [
        (Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32),
        (Fp8Format::E5M2, Fp8Format::E4M3, FloatDType::BF16),
    ] {
        let source = source(routine, MatmulSpec::new(lhs, rhs, output));
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
    assert!(compile(&source(MatmulRoutine::Wgmma, e4m3), "sm_89", &toolkit).is_err());
    let binary = compile(&source(MatmulRoutine::Mma, e4m3), "sm_90a", &toolkit).unwrap();
    if let Some(code) = disassemble(&binary, &toolkit) {
        assert!(code.contains("HMMA") && !code.contains("QMMA"));
    }
}
