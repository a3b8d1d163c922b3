//! Products on tensor cores.

use std::sync::Arc;

use burn::backend::ops::IntTensorOps;
use burn::tensor::{DType, FloatDType};
use burn_cubecl::CubeBackend;
use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, matmul_amax_by, matmul_by};
use burn_fp8::{Bias, Fp8Format, Granularity, MatmulSpec};

use super::super::{
    gpu::Gpu,
    nvrtc::{cubin, toolkit},
};
use super::{
    disassembly::{disassemble, lengths},
    empty, scale,
};

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
