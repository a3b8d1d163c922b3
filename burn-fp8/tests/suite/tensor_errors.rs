//! What fp8 tensors refuse.

use std::panic::AssertUnwindSafe;

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fp8::recipe::DelayedScaling;
use burn_fp8::{Fp8Cast, Fp8Data, Fp8Error, Fp8Format, Fp8Tensor, Granularity, scaled_matmul};

use super::device::{devices, values};

/// If the device supports the dtype, the result has it; otherwise there is an error.
#[test]
fn dtypes_that_the_device_has_not_are_errors() {
    for device in devices() {
        let ones = Tensor::<2>::ones([2, 2], &device);
        let tensor = Fp8Tensor::quantize_with_scale(ones, 1.0, Fp8Format::E4M3).unwrap();
        for dtype in [FloatDType::F32, FloatDType::BF16, FloatDType::F16] {
            let product = scaled_matmul(&tensor, &tensor, None, dtype);
            let dequantize = AssertUnwindSafe(|| tensor.dequantize(dtype));
            let decoded = std::panic::catch_unwind(dequantize);
            if device.supports_dtype(dtype) {
                assert_eq!(values(product.unwrap()), [2.0; 4]);
                assert_eq!(values(decoded.unwrap()), [1.0; 4]);
                continue;
            }
            let Err(Fp8Error::UnsupportedDType { supported, .. }) = &product else {
                panic!("{dtype:?} on {device:?}: {product:?}");
            };
            assert!(supported.contains(&"F32".to_string()));
            let error = product.unwrap_err().to_string();
            let panic = *decoded.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(panic, format!("dequantize: {error}"));
        }
    }
}

/// More elements than kernels can count, in products and inputs that take hardly any memory. Flex has no such limit.
#[test]
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
fn what_kernels_cannot_count_is_an_error() {
    const SIDE: usize = 1 << 16;
    for device in devices() {
        if device == Device::flex() {
            continue;
        }
        let cast = |shape: [usize; 2]| {
            let ones = Tensor::<2>::ones(shape, &device);
            Fp8Tensor::quantize_with_scale(ones, 1.0, Fp8Format::E4M3).unwrap()
        };
        let (lhs, rhs) = (cast([SIDE, 1]), cast([1, SIDE]));
        let rows = |side| match side {
            true => {
                Fp8Tensor::quantize_rows(Tensor::<2>::ones([SIDE, 1], &device), Fp8Format::E4M3)
            }
            false => lhs.clone(),
        };
        for lhs in [false, true].map(rows) {
            for product in [
                scaled_matmul(&lhs, &rhs, None, FloatDType::F32),
                burn_fp8::scaled_matmul_with_amax(&lhs, &rhs, None, FloatDType::F32)
                    .map(|product| product.0),
            ] {
                match product {
                    Err(Fp8Error::TooLarge { shape, most, .. }) => {
                        assert_eq!(shape, [SIDE, SIDE]);
                        assert!(most < SIDE * SIDE);
                    }
                    other => panic!("{:?}", other.map(|product| product.dims())),
                }
            }
        }
        // A view of a single element.
        let wide = Tensor::<2>::ones([1, 1], &device).expand([SIDE, SIDE]);
        let whole = Fp8Tensor::quantize_with_scale(wide.clone(), 1.0, Fp8Format::E4M3);
        let rows = Fp8Tensor::quantize_as(wide, Fp8Cast::new(Granularity::Row, Fp8Format::E4M3));
        for cast in [whole, rows] {
            let error = cast.map(|cast| cast.dims()).unwrap_err();
            assert!(matches!(error, Fp8Error::TooLarge { .. }), "{error}");
        }
    }
}

#[test]
fn bad_scales_are_errors() {
    let device = Device::flex();
    // The inverse of the last one is infinite.
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-39] {
        let x = Tensor::<1>::ones([2], &device);
        match Fp8Tensor::quantize_with_scale(x, scale, Fp8Format::E4M3) {
            Err(Fp8Error::InvalidScale { scale: refused }) => {
                assert_eq!(refused.to_bits(), scale.to_bits());
            }
            other => panic!("{scale}: {other:?}"),
        }
    }
}

#[test]
fn data_that_do_not_fit_are_errors() {
    let device = Device::flex();
    let good = Fp8Data {
        codes: vec![0; 6],
        shape: vec![2, 3],
        scales: vec![1.0],
        scale_shape: vec![1, 1],
        granularity: Granularity::Tensor,
        format: Fp8Format::E4M3,
    };
    let read = |data: Fp8Data| Fp8Tensor::<2>::from_data(data, &device);
    assert_eq!(read(good.clone()).unwrap().into_data(), good);

    let error = read(Fp8Data {
        codes: vec![0; 5],
        ..good.clone()
    });
    let codes = Fp8Error::CodeLength {
        codes: 5,
        shape: vec![2, 3],
    };
    assert_eq!(error.unwrap_err(), codes);
    let endless = Fp8Data {
        shape: vec![usize::MAX, 2],
        ..good.clone()
    };
    assert!(matches!(
        read(endless).unwrap_err(),
        Fp8Error::CodeLength { codes: 6, .. }
    ));
    let error = read(Fp8Data {
        scales: vec![1.0; 2],
        ..good.clone()
    });
    let scales = Fp8Error::ScaleLength {
        scales: 2,
        shape: vec![1, 1],
    };
    assert_eq!(error.unwrap_err(), scales);
    // The inverse of the last one is infinite.
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-39] {
        let error = read(Fp8Data {
            scales: vec![scale],
            ..good.clone()
        });
        assert!(matches!(
            error.unwrap_err(),
            Fp8Error::InvalidScale { scale: refused } if refused.to_bits() == scale.to_bits()
        ));
    }
    assert_eq!(
        Fp8Tensor::<3>::from_data(good, &device).unwrap_err(),
        Fp8Error::DataRank { data: 2, tensor: 3 }
    );
}

/// Every granularity accepts scales of the shape that quantizing gives, and of no other shape.
#[test]
fn scales_of_another_shape_are_errors() {
    let device = Device::flex();
    let block = |rows, columns| Granularity::Block { rows, columns };
    for (granularity, expected) in [
        (Granularity::Tensor, [1, 1, 1]),
        (Granularity::Row, [2, 5, 1]),
        (Granularity::Column, [2, 1, 7]),
        (block(2, 3), [2, 3, 3]),
        (block(1, 128), [2, 5, 1]),
    ] {
        let x = Tensor::<3>::ones([2, 5, 7], &device);
        let cast = Fp8Cast::new(granularity, Fp8Format::E4M3);
        let data = Fp8Tensor::quantize_as(x, cast).unwrap().into_data();
        assert_eq!(data.scale_shape, expected);
        assert!(Fp8Tensor::<3>::from_data(data.clone(), &device).is_ok());
        for scale_shape in [vec![2, 5, 7], vec![1, 1], vec![1, 6, 1]] {
            let data = Fp8Data {
                scales: vec![1.0; scale_shape.iter().product()],
                scale_shape: scale_shape.clone(),
                ..data.clone()
            };
            let json = serde_json::to_string(&data).unwrap();
            let error = Fp8Error::ScaleShape {
                scales: scale_shape,
                codes: vec![2, 5, 7],
                granularity,
                expected: expected.to_vec(),
            };
            let read = serde_json::from_str::<Fp8Tensor<3>>(&json).unwrap_err();
            assert!(read.to_string().contains(&error.to_string()), "{read}");
            let read = Fp8Tensor::<3>::from_data(data, &device).unwrap_err();
            assert_eq!(read, error);
        }
    }
}

#[test]
fn blocks_without_elements_and_of_vectors_are_errors() {
    let device = Device::flex();
    let format = Fp8Format::E4M3;
    let granularity = Granularity::Block {
        rows: 0,
        columns: 1,
    };
    let empty = Fp8Error::EmptyBlock {
        rows: 0,
        columns: 1,
    };
    let blocks = Fp8Tensor::quantize_blocks(Tensor::<2>::ones([2, 2], &device), [0, 1], format);
    assert_eq!(blocks.unwrap_err(), empty);
    let data = |granularity, shape: &[usize]| Fp8Data {
        codes: vec![0; 4],
        shape: shape.to_vec(),
        scales: vec![1.0],
        scale_shape: vec![1; shape.len()],
        granularity,
        format,
    };
    let read = Fp8Tensor::<2>::from_data(data(granularity, &[2, 2]), &device);
    assert_eq!(read.unwrap_err(), empty);

    let block = Granularity::Block {
        rows: 1,
        columns: 1,
    };
    for granularity in [block, Granularity::Column] {
        let error = Fp8Error::NoMatrix {
            granularity,
            rank: 1,
        };
        let vector = Tensor::<1>::ones([4], &device);
        let cast = Fp8Tensor::quantize_as(vector, Fp8Cast::new(granularity, format));
        assert_eq!(cast.unwrap_err(), error);
        let read = Fp8Tensor::<1>::from_data(data(granularity, &[4]), &device);
        assert_eq!(read.unwrap_err(), error);
    }
    assert!(Fp8Tensor::<1>::from_data(data(Granularity::Row, &[4]), &device).is_ok());
}

/// A kernel would read the bits of another dtype as f32, and use the first of several scales for all elements.
#[test]
fn device_scales_that_are_not_one_f32_are_refused() {
    let refused = |run: &mut dyn FnMut()| {
        let panic = std::panic::catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        let panic = panic.downcast::<String>().unwrap();
        assert!(panic.contains("F32"), "{panic}");
    };
    for device in devices() {
        let x = Tensor::<2>::ones([2, 2], &device);
        let one = Tensor::<1>::ones([1], (&device, DType::F32));
        let half = one.clone().cast(FloatDType::F16);
        let two = Tensor::<1>::ones([2], (&device, DType::F32));
        let update = DelayedScaling::new().update(Fp8Format::E4M3);
        for bad in [half.clone(), two.clone()] {
            let format = Fp8Format::E4M3;
            refused(&mut || {
                Fp8Tensor::quantize_with_device_scale(x.clone(), bad.clone(), format);
            });
            refused(&mut || {
                Fp8Tensor::quantize_with_transpose(x.clone(), bad.clone(), format);
            });
            refused(&mut || {
                update.apply(two.clone(), bad.clone(), one.clone());
            });
            refused(&mut || {
                update.apply(two.clone(), one.clone(), bad.clone());
            });
        }
        for bad in [half, Tensor::<1>::ones([0], (&device, DType::F32))] {
            refused(&mut || {
                update.apply(bad.clone(), one.clone(), one.clone());
            });
        }
        let (history, scale) = update.apply(two.clone(), one.clone(), one.clone());
        assert_eq!(
            (values(history), values(scale)),
            (vec![0.0, 1.0], vec![448.0])
        );
    }
}

/// The same check, on a device that every machine has.
#[cfg(feature = "cpu")]
#[test]
fn the_cpu_runtime_has_no_flex32() {
    let ones = Tensor::<2>::ones([2, 2], &Device::cpu());
    let tensor = Fp8Tensor::quantize_with_scale(ones, 1.0, Fp8Format::E4M3).unwrap();
    let decode = AssertUnwindSafe(|| tensor.dequantize(FloatDType::Flex32));
    let panic = *std::panic::catch_unwind(decode)
        .unwrap_err()
        .downcast::<String>()
        .unwrap();
    assert!(panic.starts_with("dequantize: "), "{panic}");
    let advice = "cannot compute in Flex32; it can in F32, BF16, F16: ask for one of these";
    assert!(panic.ends_with(advice), "{panic}");
}
