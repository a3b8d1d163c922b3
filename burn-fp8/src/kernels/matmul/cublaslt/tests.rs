//! cuBLASLt compared with the portable kernel, on an NVIDIA GPU.

use std::path::Path;

use burn::backend::{TensorMetadata, ops::FloatTensorOps};
use burn::tensor::{FloatDType, TensorData};
use burn_cubecl::{CubeBackend, CubeDevice, ops::permute, tensor::CubeTensor};
use burn_std::reader::try_read_sync;
use cubecl::cuda::CudaDevice;

use super::{library, multiply};
use crate::{
    Bias,
    Fp8Format::{self, E4M3, E5M2},
    MatmulSpec, kernels,
    kernels::matmul::{MatmulRoutine, Product},
};

fn float<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &CubeDevice) -> CubeTensor {
    CubeBackend::float_from_data(TensorData::new(values, shape), device)
}

fn wave(len: usize, phase: f32) -> Vec<f32> {
    (0..len)
        .map(|i| (i as f32 * 0.7 + phase).sin() * 3.0)
        .collect()
}

fn codes(shape: [usize; 2], scale: &CubeTensor, format: Fp8Format) -> CubeTensor {
    let values = float(
        wave(shape[0] * shape[1], shape[0] as f32),
        shape,
        &scale.device,
    );
    kernels::quantize(values, scale.clone(), format).0
}

fn values(tensor: CubeTensor) -> Vec<f32> {
    let data = try_read_sync(CubeBackend::float_into_data(tensor));
    data.unwrap().unwrap().iter().collect()
}

#[test]
fn products_are_those_of_the_portable_kernel() {
    if !Path::new("/dev/nvidiactl").exists() {
        eprintln!("skipped: no NVIDIA GPU");
        return;
    }
    let device = CubeDevice::Cuda(CudaDevice::new(0));
    let Some(library) = library(&device) else {
        eprintln!("skipped: no cuBLASLt, or a GPU without fp8");
        return;
    };
    // The second is padded.
    let sizes = [(64, 96, 32), (63, 90, 33)];
    let outputs = [
        (FloatDType::F32, 1e-3),
        (FloatDType::BF16, 1e-2),
        (FloatDType::F16, 2e-3),
    ];
    let formats = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)];
    let cases = sizes.map(|size| formats.map(|formats| (size, formats)));
    for ((m, k, n), (lhs_format, rhs_format)) in cases.into_iter().flatten() {
        for (output, tolerance) in outputs {
            for (turned, has_bias) in [(false, false), (true, true), (false, true)] {
                let lhs_scale = float(vec![40.0], [1], &device);
                let rhs_scale = float(vec![8.0], [1], &device);
                let turn = |tensor: CubeTensor| permute(tensor, &[1, 0]);
                let (lhs, rhs) = match turned {
                    true => (
                        turn(codes([k, m], &lhs_scale, lhs_format)),
                        turn(codes([n, k], &rhs_scale, rhs_format)),
                    ),
                    false => (
                        codes([m, k], &lhs_scale, lhs_format),
                        codes([k, n], &rhs_scale, rhs_format),
                    ),
                };
                let product = || {
                    let bias = match has_bias {
                        true => Bias::Row(float(wave(n, 0.5), [n], &device)),
                        false => Bias::None,
                    };
                    Product::new(
                        [lhs.clone(), rhs.clone()],
                        [lhs_scale.clone(), rhs_scale.clone()],
                        bias,
                        MatmulSpec::new(lhs_format, rhs_format, output)
                            .with_fast_accumulation(lhs_format == rhs_format),
                    )
                };
                let found = multiply(&library, &product()).expect("cuBLASLt has this product");
                assert_eq!(found.shape(), [m, n].into());
                let (found, expected) = (
                    values(found),
                    values(MatmulRoutine::Direct.matmul(product())),
                );
                let size = expected
                    .iter()
                    .fold(0f32, |size, value| size.max(value.abs()));
                for (found, expected) in found.iter().zip(&expected) {
                    assert!(
                        (found - expected).abs() <= tolerance * size,
                        "{found} is not {expected}: {lhs_format:?} x {rhs_format:?} in {output:?}"
                    );
                }
            }
        }
    }
}
