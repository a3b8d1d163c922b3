//! The ops on the backends themselves: CubeCL's with and without fusion, and a backend without kernels.

use burn::backend::{Backend, Flex, tensor::Device};
use burn::tensor::{FloatDType, Shape, TensorData};
use burn_backend::try_read_sync;
use burn_fp8::recipe::DelayedScaling;
use burn_fp8::{Bias, Fp8Format, Fp8Ops, Granularity, MatmulSpec};
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
use {
    super::device::Random,
    burn::backend::{AutodiffBackend, ops::FloatTensorOps},
    burn::tensor::DType,
    burn_autodiff::Autodiff,
    burn_fp8::{Fp8Cast, GradAmaxSlot, LinearSpec, Operand},
};

use super::fixtures;

const WHOLE: Granularity = Granularity::Tensor;

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
        let decoded = B::fp8_dequantize(codes.clone(), one(), WHOLE, format, FloatDType::F32);
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
        let decoded = B::fp8_dequantize(codes, one(), WHOLE, Fp8Format::E4M3, FloatDType::F32);
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

/// Magnitudes of rows: very different ones, a row of zeros, and one that gets the largest scale.
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
const SIZES: [f32; 5] = [1.0, 1e3, 0.0, 1e-5, 1e-42];

/// Codes, scales, values and products of operands with a scale for each row, column or block.
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
fn scaled_apart<B: Fp8Ops>(device: &Device<B>, dtype: DType) -> (Vec<u8>, Vec<u32>, Vec<f32>) {
    let (mut codes, mut bits, mut products) = (vec![], vec![], vec![]);
    let block = |rows, columns| Granularity::Block { rows, columns };
    let mut random = Random::new(40);
    let mut input = |shape: &[usize]| {
        let count = shape.iter().product();
        let mut values = random.normals(count);
        for (index, value) in values.iter_mut().enumerate() {
            *value *= SIZES[index / shape[shape.len() - 1] % 5];
        }
        let data = TensorData::new(values, Shape::from(shape.to_vec()));
        B::float_from_data(data.convert_dtype(dtype), device)
    };
    for granularity in [
        Granularity::Row,
        Granularity::Column,
        block(1, 16),
        block(16, 1),
        block(16, 16),
        block(3, 50),
        block(200, 200),
    ] {
        let mut cast = |shape: &[usize], format, granularity| {
            let cast = Fp8Cast::new(granularity, format).with_power_of_two(dtype == DType::BF16);
            let (quantized, scale) = B::fp8_quantize_blocks(input(shape), cast);
            let data = try_read_sync(B::int_into_data(quantized.clone())).unwrap();
            codes.extend(data.unwrap().try_to_vec::<u8>().unwrap());
            bits.extend(floats::<B>(scale.clone()).into_iter().map(f32::to_bits));
            let dequantize = |codes, scale, granularity| {
                let values = B::fp8_dequantize(codes, scale, granularity, format, FloatDType::F32);
                floats::<B>(values).into_iter().map(f32::to_bits)
            };
            bits.extend(dequantize(quantized.clone(), scale.clone(), granularity));
            let (turned, turned_scale) = (
                B::int_swap_dims(quantized.clone(), 1, 2),
                B::float_swap_dims(scale.clone(), 1, 2),
            );
            let turned_granularity = granularity.transposed();
            bits.extend(dequantize(
                turned.clone(),
                turned_scale.clone(),
                turned_granularity,
            ));
            ([quantized, turned], [scale, turned_scale])
        };
        let ([lhs, _], [lhs_scale, _]) = cast(&[2, 19, 50], Fp8Format::E4M3, granularity);
        let ([_, rhs], [_, rhs_scale]) = cast(&[1, 23, 50], Fp8Format::E5M2, granularity);
        let bias = Bias::Row(tensor::<B>(
            (0..23).map(|x| x as f32).collect(),
            &[23],
            device,
        ));
        let spec = MatmulSpec::new(Fp8Format::E4M3, Fp8Format::E5M2, FloatDType::F32)
            .with_granularities([granularity, granularity.transposed()]);
        let (product, amax) = B::fp8_matmul_amax(
            lhs.clone(),
            rhs.clone(),
            lhs_scale.clone(),
            rhs_scale.clone(),
            bias.clone(),
            spec,
        );
        let product = floats::<B>(product);
        let largest = product
            .iter()
            .fold(0f32, |most, value| most.max(value.abs()));
        assert_eq!(floats::<B>(amax), [largest]);
        let same = B::fp8_matmul(lhs, rhs, lhs_scale, rhs_scale, bias, spec);
        assert_eq!(floats::<B>(same), product);
        assert_eq!(product.len(), 2 * 19 * 23);
        products.extend(product);
    }
    // A tensor of one dimension is a row.
    let row = Fp8Cast::new(Granularity::Row, Fp8Format::E4M3);
    let (quantized, scale) = B::fp8_quantize_blocks(input(&[7]), row);
    let (format, f32) = (Fp8Format::E4M3, FloatDType::F32);
    let values = B::fp8_dequantize(quantized, scale.clone(), Granularity::Row, format, f32);
    bits.extend(
        [scale, values]
            .into_iter()
            .flat_map(floats::<B>)
            .map(f32::to_bits),
    );
    (codes, bits, products)
}

/// Bit-exact results are equal, and products agree up to the last bits of f32, whichever kernels compute them.
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
fn check_scaled_apart<B: Fp8Ops>(device: Device<B>, dtypes: &[DType]) {
    for &dtype in dtypes {
        if !B::supports_dtype(&device, dtype) {
            continue;
        }
        let (codes, bits, products) = scaled_apart::<B>(&device, dtype);
        let (expected_codes, expected_bits, expected) =
            scaled_apart::<Flex>(&Default::default(), dtype);
        assert_eq!(codes, expected_codes);
        assert_eq!(bits, expected_bits);
        for (index, (product, expected)) in products.iter().zip(&expected).enumerate() {
            // 50 terms of about this size.
            let [row, column] = [index / 23 % 38, index % 23].map(|line| SIZES[line % 5]);
            let error = (product - expected).abs();
            assert!(
                error <= 1e-6 * (50.0 * row * column + expected.abs()),
                "{product} is not {expected}"
            );
        }
    }
}

/// A training step of a layer with delayed scaling, whose scales are not yet right: its output, the gradients of input, weight
/// and bias, and what the next step begins with, which are the weight, and a scale for each of the three tensors.
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
fn training_step<B: Fp8Ops>(device: &Device<B>) -> Vec<Vec<f32>> {
    let mut random = Random::new(41);
    // Multiples of an eighth, so that the sum of the bias's gradient is exact in any order.
    let mut leaf = |shape: &[usize]| {
        let values = random.normals(shape.iter().product()).into_iter();
        let values = values.map(|value| (value * 8.0).round() / 8.0).collect();
        Autodiff::<B>::float_set_require_grad(tensor::<Autodiff<B>>(values, shape, device), true)
    };
    let [x, w, g, b] = [&[7, 9][..], &[9, 6], &[7, 6], &[6]].map(&mut leaf);
    let one = || tensor::<Autodiff<B>>(vec![1.0], &[1], device);
    let spec = LinearSpec {
        forward: Fp8Format::E4M3,
        gradient: Fp8Format::E5M2,
        current_gradient_scale: false,
        high_precision_weight_gradient: false,
        power_of_two: false,
        gradient_amax: GradAmaxSlot::default(),
    };
    let slot = spec.gradient_amax.clone();
    let plain = Autodiff::<B>::float_detach(w.clone());
    let (codes, weight_amax) = Operand::<Autodiff<B>>::cast_with(plain, one(), spec.forward);
    let bias = Bias::Row(b.clone());
    let (output, input_amax) =
        Autodiff::<B>::fp8_linear(x.clone(), w.clone(), codes, one(), one(), bias, spec);
    // Without a sum, which CubeCL would tune for seconds; backward begins with ones all the same.
    let gradients = Autodiff::<B>::backward(Autodiff::<B>::float_mul(output.clone(), g));
    let found = [x, w.clone(), b].map(|leaf| Autodiff::<B>::grad(&leaf, &gradients).unwrap());

    let inner = Autodiff::<B>::inner;
    // By a power of two, because only fused ops round product and difference together.
    let step = B::float_mul_scalar(found[1].clone(), 0.125f32.into());
    let next = B::float_sub(inner(w), step);
    let gradient_amax = Autodiff::<B>::fp8_gradient_amax(one(), slot);
    let amaxes = [input_amax, weight_amax, gradient_amax].map(inner);
    let formats = [Fp8Format::E4M3, Fp8Format::E4M3, Fp8Format::E5M2];
    let scales = amaxes.into_iter().zip(formats).map(|(amax, format)| {
        let history = tensor::<B>(vec![0.0; 3], &[3], device);
        let update = DelayedScaling::new().update(format);
        B::fp8_update_scale(history, inner(one()), amax, update).1
    });
    let results = [inner(output)].into_iter().chain(found).chain([next]);
    results.chain(scales).map(floats::<B>).collect()
}

#[test]
fn flex() {
    check::<Flex>(Default::default());
}

#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
mod cube {
    use burn::{backend::Flex, tensor::DType};
    use burn_cubecl::CubeBackend;
    #[cfg(feature = "fusion")]
    use burn_fusion::Fusion;

    use super::{super::routines::cube_devices, check, check_scaled_apart, training_step};

    #[test]
    fn without_fusion() {
        for device in cube_devices() {
            check::<CubeBackend>(device.clone());
            let dtypes = [DType::F32, DType::BF16, DType::F16];
            check_scaled_apart::<CubeBackend>(device, &dtypes);
        }
    }

    #[cfg(feature = "fusion")]
    #[test]
    fn with_fusion() {
        for device in cube_devices() {
            check::<Fusion<CubeBackend>>(device.clone());
            // The kernels are the same. Fusion only adds the way to them.
            check_scaled_apart::<Fusion<CubeBackend>>(device, &[DType::F32]);
        }
    }

    /// Up to the order of f32 sums, it is also that of Flex.
    #[test]
    fn a_training_step_is_the_same_with_and_without_fusion() {
        let expected = training_step::<Flex>(&Default::default());
        for device in cube_devices() {
            let unfused = training_step::<CubeBackend>(&device);
            #[cfg(feature = "fusion")]
            assert_eq!(unfused, training_step::<Fusion<CubeBackend>>(&device));
            for (found, expected) in unfused.iter().zip(&expected) {
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(expected) {
                    // Of sums of fewer than ten terms.
                    let error = (found - expected).abs();
                    assert!(
                        error <= 1e-5 * expected.abs().max(1.0),
                        "{found} is not {expected}"
                    );
                }
            }
        }
    }
}
