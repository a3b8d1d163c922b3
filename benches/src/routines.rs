//! Finds out which routine computed a product.

use burn_fp8::kernels::MatmulRoutine;

use crate::Launches;

/// The routine that computed a product, as its launched kernels show: if one routine cannot compute it, another does.
/// cuBLASLt's own kernels are not launched by CubeCL; its routine is recognized by the CubeCL kernel for the factors. Two
/// routines for tensor cores share one kernel: `tiles` is the one of them that the GPU supports.
///
/// ```
/// use benches::{Launches, multiplied_by};
/// use burn_fp8::kernels::MatmulRoutine;
///
/// assert_eq!(multiplied_by(&Launches::default(), MatmulRoutine::Mma), None);
/// ```
pub fn multiplied_by(launches: &Launches, tiles: MatmulRoutine) -> Option<MatmulRoutine> {
    let kernels = [
        ("tmakernel", MatmulRoutine::WgmmaTma),
        ("tilekernel", tiles),
        ("scalekernel", MatmulRoutine::Decoded),
        ("matmulkernel", MatmulRoutine::Direct),
        ("factorskernel", MatmulRoutine::CublasLt),
    ];
    let names = launches.0.keys();
    let names: Vec<String> = names
        .map(|name| name.to_lowercase().replace('_', ""))
        .collect();
    let launched = |kernel: &str| names.iter().any(|name| name.contains(kernel));
    let (_, routine) = kernels.into_iter().find(|(kernel, _)| launched(kernel))?;
    Some(routine)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::tensor::{Device, FloatDType, Tensor};
    use burn_fp8::{
        Fp8Format, Fp8Tensor,
        kernels::{MatmulPolicy, set_matmul_policy},
        scaled_matmul,
    };

    use super::*;

    #[test]
    fn the_kernels_tell_the_routine() {
        let device = Device::cpu();
        let x = Tensor::<2>::ones([16, 16], &device);
        let x = Fp8Tensor::quantize(x, Fp8Format::E4M3);
        for routine in [
            MatmulRoutine::Direct,
            MatmulRoutine::Decoded,
            MatmulRoutine::Wgmma,
        ] {
            set_matmul_policy(MatmulPolicy::Only(routine));
            let launches = Launches::of(|| {
                let product = scaled_matmul(&x, &x, None, FloatDType::F32);
                drop(product.unwrap().into_data());
            });
            let found = multiplied_by(&launches, MatmulRoutine::Wgmma);
            assert_eq!(found, Some(routine), "{launches:?}");
        }
        set_matmul_policy(MatmulPolicy::Automatic);
    }
}
