//! Which routine computed a product.

use burn_fp8::kernels::MatmulRoutine;

use crate::Launches;

/// The routines that the launched kernels belong to. A product may not be computed by the routine that it was asked of: where one
/// cannot compute it, another does. Routines of tensor cores share kernels, so there may be several; there are none where no kernel
/// is known. cuBLASLt's kernels are not CubeCL's, but it launches one of CubeCL's for its scales.
///
/// ```
/// use benches::{Launches, multiplied_by};
///
/// assert_eq!(multiplied_by(&Launches::default()), []);
/// ```
pub fn multiplied_by(launches: &Launches) -> &'static [MatmulRoutine] {
    use MatmulRoutine::{
        CublasLt, Decoded, Direct, Mma, Wgmma, WgmmaTma, WgmmaTma256, WgmmaTmaMulticast,
    };
    const KERNELS: [(&str, &[MatmulRoutine]); 5] = [
        ("tmakernel", &[WgmmaTma, WgmmaTma256, WgmmaTmaMulticast]),
        ("tilekernel", &[Mma, Wgmma]),
        ("scalekernel", &[Decoded]),
        ("matmulkernel", &[Direct]),
        ("factorskernel", &[CublasLt]),
    ];
    let names = launches.0.keys();
    let names: Vec<String> = names
        .map(|name| name.to_lowercase().replace('_', ""))
        .collect();
    let launched = |kernel: &str| names.iter().any(|name| name.contains(kernel));
    let known = KERNELS.into_iter().find(|(kernel, _)| launched(kernel));
    known.map_or(&[], |(_, routines)| routines)
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
        let _alone = crate::LAUNCHES.lock();
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
            let found = multiplied_by(&launches);
            assert!(found.contains(&routine), "{launches:?}");
            let alone = routine != MatmulRoutine::Wgmma;
            assert_eq!(found.len(), if alone { 1 } else { 2 });
        }
        set_matmul_policy(MatmulPolicy::Automatic);
    }
}
