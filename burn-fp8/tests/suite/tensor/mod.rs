//! Fp8 tensors: their layout and their data.

mod data;
mod layout;

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Tensor, Granularity, scaled_matmul};

use super::device::{Random, devices, sqnr, values};

#[test]
fn quantize_fills_the_range() {
    for device in devices() {
        for format in Fp8Format::ALL {
            let x = Random::new(8).matrix([7, 13], &device);
            let amax = values(x.clone())
                .iter()
                .fold(0.0f32, |max, x| max.max(x.abs()));
            let q = Fp8Tensor::quantize(x.clone(), format);
            assert_eq!(q.granularity(), Granularity::Tensor);
            assert_eq!(values(q.scale()), [format.max() / amax]);
            let data = q.clone().into_data();
            assert_eq!(
                data.codes.iter().map(|code| code & 0x7F).max(),
                Some(format.max_code())
            );
            let expected: Vec<u8> = values(x)
                .iter()
                .map(|x| format.encode(x * (format.max() / amax)))
                .collect();
            assert_eq!(data.codes, expected);
            let codes = q.codes();
            assert_eq!((codes.dtype(), codes.dims()), (DType::U8, [7, 13]));
            assert_eq!(codes.into_data().try_to_vec::<u8>().unwrap(), expected);
        }
    }
}

#[test]
fn an_amax_without_a_scale_gives_one() {
    for device in devices() {
        for input in [0.0, f32::INFINITY, f32::NAN] {
            let x = Tensor::<1>::from_floats([input, 0.0], &device);
            let q = Fp8Tensor::quantize(x, Fp8Format::E4M3);
            assert_eq!(values(q.scale()), [1.0], "amax {input}");
            assert_eq!(Fp8Format::E4M3.scale_for(input), 1.0);
        }
        let tiny = Tensor::<1>::from_floats([1e-42], &device);
        assert_eq!(
            values(Fp8Tensor::quantize(tiny, Fp8Format::E4M3).scale()),
            [f32::MAX]
        );
        assert_eq!(Fp8Format::E4M3.scale_for(1e-42), f32::MAX);
    }
}

#[test]
fn granular_scales_follow_their_elements() {
    for device in devices() {
        let x = Random::new(10).matrix([5, 7], &device);
        let host = values(x.clone());
        let format = Fp8Format::E4M3;
        let amax = |cells: &dyn Fn(usize, usize) -> bool| {
            let cell = |i: usize| {
                if cells(i / 7, i % 7) {
                    host[i].abs()
                } else {
                    0.0
                }
            };
            (0..35).map(cell).fold(0.0, f32::max)
        };
        let rows = Fp8Tensor::quantize_rows(x.clone(), format);
        let expected: Vec<_> = (0..5).map(|row| 448.0 / amax(&|r, _| r == row)).collect();
        assert_eq!(rows.scale().dims(), [5, 1]);
        super::linear::assert_near(&values(rows.scale()), &expected, 1e-6);

        let blocks = Fp8Tensor::quantize_blocks(x.clone(), [2, 3], format).unwrap();
        assert_eq!(blocks.scale().dims(), [3, 3]);
        let expected: Vec<_> = (0..9)
            .map(|block| 448.0 / amax(&|r, c| (r / 2, c / 3) == (block / 3, block % 3)))
            .collect();
        super::linear::assert_near(&values(blocks.scale()), &expected, 1e-6);

        let transposed = blocks.clone().transpose();
        assert_eq!(
            transposed.granularity(),
            Granularity::Block {
                rows: 3,
                columns: 2
            }
        );
        assert_eq!(
            values(transposed.dequantize(FloatDType::F32)),
            values(blocks.dequantize(FloatDType::F32).transpose())
        );
        let columns = Fp8Tensor::quantize_columns(x.clone(), format);
        assert_eq!(columns.granularity(), Granularity::Column);
        assert_eq!(columns.scale().dims(), [1, 7]);
        let expected: Vec<_> = (0..7)
            .map(|column| 448.0 / amax(&|_, c| c == column))
            .collect();
        super::linear::assert_near(&values(columns.scale()), &expected, 1e-6);
        // torchao requires 25 dB for a row-wise cast.
        for q in [rows, columns, blocks] {
            assert!(sqnr(&host, &values(q.dequantize(FloatDType::F32))) > 25.0);
        }
    }
}

/// For scales of all magnitudes: the result is the largest power of two that is not above the scale, found by trying all of them.
#[test]
fn scales_are_rounded_down_to_powers_of_two() {
    for device in devices() {
        for format in Fp8Format::ALL {
            let mut amaxes: Vec<f32> = (-149..128).map(|e| 2f64.powi(e) as f32).collect();
            let mut random = Random::new(16);
            amaxes.extend((0..200).map(|_| f32::from_bits(random.bits() as u32 >> 1)));
            amaxes.extend([0.0, f32::INFINITY, f32::NAN, f32::MAX, 448.0, 57344.0]);
            let count = amaxes.len();
            let x = Tensor::<1>::from_data(TensorData::new(amaxes.clone(), [count]), &device);
            let rows = x.reshape([count, 1]);
            let cast = Fp8Cast::new(Granularity::Row, format).with_power_of_two(true);
            let scales = values(Fp8Tensor::quantize_as(rows.clone(), cast).unwrap().scale());
            let exact = values(Fp8Tensor::quantize_rows(rows, format).scale());
            for ((amax, scale), exact) in amaxes.into_iter().zip(scales).zip(exact) {
                let mut powers = (-126..128).rev().map(|e| 2f64.powi(e) as f32);
                let expected = powers.find(|power| *power <= exact).unwrap();
                assert_eq!(scale, expected, "amax {amax:e}, scale {exact:e}");
                assert_eq!(format.rounded_scale_for(amax, true), expected);
                assert_eq!(format.rounded_scale_for(amax, false), exact);
            }
        }
        let x = Random::new(17).matrix([4, 6], &device);
        let cast = Fp8Cast::new(Granularity::Tensor, Fp8Format::E4M3).with_power_of_two(true);
        let q = Fp8Tensor::quantize_as(x.clone(), cast).unwrap();
        let scale = values(q.scale())[0];
        let plain = values(Fp8Tensor::quantize(x, Fp8Format::E4M3).scale())[0];
        assert!(scale <= plain && plain < 2.0 * scale && scale.log2().fract() == 0.0);
    }
}

#[test]
fn empty_tensors_are_fine() {
    for device in devices() {
        let q = Fp8Tensor::quantize(Tensor::<2>::zeros([0, 3], &device), Fp8Format::E4M3);
        assert_eq!(q.dims(), [0, 3]);
        assert_eq!(q.dequantize(FloatDType::F32).dims(), [0, 3]);
        assert!(q.into_data().codes.is_empty());
        for granularity in [
            Granularity::Row,
            Granularity::Column,
            Granularity::Block {
                rows: 2,
                columns: 2,
            },
        ] {
            for shape in [[0, 3], [3, 0]] {
                let x = Tensor::<2>::zeros(shape, &device);
                let cast = Fp8Cast::new(granularity, Fp8Format::E4M3);
                let data = Fp8Tensor::quantize_as(x, cast).unwrap().into_data();
                let q = Fp8Tensor::<2>::from_data(data, &device).unwrap();
                assert_eq!(q.dequantize(FloatDType::F32).dims(), shape);
            }
        }
    }
}

#[test]
fn device_scales_are_used_as_they_are() {
    for device in devices() {
        let x = Tensor::<1>::from_floats([1.0, -3.0, 0.1], &device);
        let scale = Tensor::from_data(TensorData::from([8.0f32]), &device);
        let (q, amax) = Fp8Tensor::quantize_with_device_scale(x, scale, Fp8Format::E5M2);
        assert_eq!(values(amax), [3.0]);
        let expected = [8.0, -24.0, 0.8].map(|x| Fp8Format::E5M2.encode(x));
        assert_eq!(q.into_data().codes, expected);
    }
}

/// A scale from a training step has no effect on where the tensor is: nothing about it can be differentiated.
#[test]
fn a_scale_on_an_autodiff_device_is_only_a_scale() {
    let device = Device::flex();
    let x = Tensor::<2>::ones([2, 2], &device);
    let scale = || Tensor::<1>::ones([1], &device.clone().autodiff());
    let (one, amax) = Fp8Tensor::quantize_with_device_scale(x.clone(), scale(), Fp8Format::E4M3);
    let (both, turned, other) = Fp8Tensor::quantize_with_transpose(x, scale(), Fp8Format::E4M3);
    for tensor in [&one, &both, &turned] {
        assert_eq!(tensor.device(), device);
    }
    assert!(!amax.is_autodiff() && !other.is_autodiff());
}

/// Kernels count rows and columns in 32 bits.
#[test]
fn blocks_may_be_larger_than_any_tensor() {
    for device in devices() {
        let x = Tensor::<2>::from_floats([[1.0, 2.0], [-4.0, 0.5]], &device);
        for block in [[1 << 32, 1], [1, 1 << 32], [(1 << 32) + 1, 1 << 33]] {
            let cast = Fp8Tensor::quantize_blocks(x.clone(), block, Fp8Format::E4M3).unwrap();
            let product = scaled_matmul(&cast, &cast, None, FloatDType::F32).unwrap();
            // All of these codes are exact.
            for (found, expected) in [
                (cast.dequantize(FloatDType::F32), [1.0, 2.0, -4.0, 0.5]),
                (product, [-7.0, 3.0, -6.0, -7.75]),
            ] {
                for (found, expected) in values(found).into_iter().zip(expected) {
                    assert!(
                        (found - expected).abs() < 1e-5,
                        "{found}: {block:?}, {device:?}"
                    );
                }
            }
        }
    }
}
