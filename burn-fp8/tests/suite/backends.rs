//! The ops on the backends themselves: CubeCL's without fusion and with it, and a backend without kernels.

use burn::backend::{Backend, Flex, tensor::Device};
use burn::tensor::{FloatDType, Shape, TensorData};
use burn_backend::try_read_sync;
use burn_fp8::recipe::DelayedScaling;
use burn_fp8::{Bias, Fp8Format, Fp8Ops, MatmulSpec};

use super::fixtures;

fn floats<B: Backend>(tensor: B::FloatTensorPrimitive) -> Vec<f32> {
    let data = try_read_sync(B::float_into_data(tensor)).unwrap().unwrap();
    data.try_to_vec::<f32>().unwrap()
}

fn tensor<B: Backend>(
    values: Vec<f32>,
    shape: &[usize],
    device: &Device<B>,
) -> B::FloatTensorPrimitive {
    B::float_from_data(TensorData::new(values, Shape::from(shape.to_vec())), device)
}

fn check<B: Fp8Ops>(device: Device<B>) {
    let one = || tensor::<B>(vec![1.0], &[1], &device);
    for format in Fp8Format::ALL {
        let (inputs, expected) = fixtures::from_f32(format);
        let (codes, amax) = B::fp8_quantize(
            tensor::<B>(inputs.clone(), &[inputs.len()], &device),
            one(),
            format,
        );
        assert!(
            floats::<B>(amax)[0].is_nan(),
            "there is a NaN among the samples"
        );
        let decoded = B::fp8_dequantize(codes.clone(), one(), format, FloatDType::F32);
        let codes = try_read_sync(B::int_into_data(codes)).unwrap().unwrap();
        let codes = codes.try_to_vec::<u8>().unwrap();
        fixtures::assert_codes(format, &inputs, &codes, &expected);
        for (value, code) in floats::<B>(decoded).into_iter().zip(codes) {
            let exact = fixtures::values(format)[code as usize];
            assert!(value.to_bits() == exact.to_bits() || value.is_nan() && exact.is_nan());
        }
    }

    // Small integers: every product and sum is exact.
    let codes = |values: Vec<f32>, shape: &[usize]| {
        B::fp8_quantize(tensor::<B>(values, shape, &device), one(), Fp8Format::E4M3).0
    };
    let lhs = codes(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
    let rhs = codes(vec![1.0, -1.0, 2.0, 0.5, -3.0, 4.0], &[3, 2]);
    let spec = MatmulSpec::new(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32);
    let half = tensor::<B>(vec![0.5], &[1], &device);
    let bias = Bias::Row(tensor::<B>(vec![10.0, 20.0], &[2], &device));
    let (product, amax) = B::fp8_matmul_amax(
        lhs.clone(),
        rhs.clone(),
        half.clone(),
        one(),
        bias.clone(),
        spec,
    );
    assert_eq!(floats::<B>(product), [2.0, 44.0, 2.0, 65.0]);
    assert_eq!(floats::<B>(amax), [65.0]);
    let product = B::fp8_matmul(lhs, rhs, half, one(), bias, spec);
    assert_eq!(floats::<B>(product), [2.0, 44.0, 2.0, 65.0]);

    let rows = tensor::<B>(vec![1.0, 2.0, 3.0, 4.0, 5.0, -6.0], &[2, 3], &device);
    let (codes, transposed, amax) = B::fp8_quantize_transposed(rows, one(), Fp8Format::E4M3);
    assert_eq!(floats::<B>(amax), [6.0]);
    let decoded = |codes| {
        let decoded = B::fp8_dequantize(codes, one(), Fp8Format::E4M3, FloatDType::F32);
        floats::<B>(decoded)
    };
    assert_eq!(decoded(codes), [1.0, 2.0, 3.0, 4.0, 5.0, -6.0]);
    assert_eq!(decoded(transposed), [1.0, 4.0, 2.0, 5.0, 3.0, -6.0]);

    let amaxes = || tensor::<B>(vec![0.0, 3.0, 1e-42], &[3], &device);
    let scales = B::fp8_scales(amaxes(), Fp8Format::E4M3, false);
    assert_eq!(floats::<B>(scales), [1.0, 448.0 / 3.0, f32::MAX]);
    let scales = B::fp8_scales(amaxes(), Fp8Format::E4M3, true);
    assert_eq!(floats::<B>(scales), [1.0, 128.0, 2f32.powi(127)]);

    let history = tensor::<B>(vec![0.0, 8.0, 1.0], &[3], &device);
    let amax = B::fp8_amax(tensor::<B>(vec![0.25, -2.0], &[2], &device));
    let update = DelayedScaling::new().update(Fp8Format::E4M3);
    let (history, scale) = B::fp8_update_scale(history, one(), amax, update);
    assert_eq!(floats::<B>(history), [0.0, 1.0, 2.0]);
    assert_eq!(floats::<B>(scale), [56.0]);
}

#[test]
fn flex() {
    check::<Flex>(Default::default());
}

#[cfg(feature = "cpu")]
mod cube {
    use burn_cubecl::{CubeBackend, CubeDevice, cubecl::cpu::CpuDevice};
    use burn_fusion::Fusion;

    use super::check;

    #[test]
    fn without_fusion() {
        check::<CubeBackend>(CubeDevice::Cpu(CpuDevice));
    }

    #[test]
    fn with_fusion() {
        check::<Fusion<CubeBackend>>(CubeDevice::Cpu(CpuDevice));
    }
}
