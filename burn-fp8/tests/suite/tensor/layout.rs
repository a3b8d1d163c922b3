//! Views, reshapes and transposes.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fp8::{Fp8Format, Fp8Tensor, scaled_matmul};

use super::super::device::{Random, devices, values};

/// Views, whose elements are in another order, have gaps between them, or stand for several elements each.
#[test]
fn a_view_is_cast_as_what_it_shows() {
    let format = Fp8Format::E4M3;
    for device in devices() {
        for columns in [12, 7, 256] {
            let size = [4, 6, columns];
            let x = Random::new(9).matrix([24, columns], &device).reshape(size);
            let views = [
                x.clone().swap_dims(1, 2),
                x.clone().permute([1, 0, 2]),
                x.clone().permute([2, 1, 0]),
                x.clone().slice([0..4, 0..6, 4..7]),
                // Which no device has to copy for the sake of alignment, if there are many columns.
                x.clone().slice([0..4, 0..6, columns / 2..columns]),
                x.clone()
                    .slice([0..4, 0..6, columns / 2..columns])
                    .swap_dims(1, 2),
                x.clone().slice([1..3, 0..6, 0..columns]),
                x.clone().slice([0..4, 0..1, 0..columns]).expand(size),
            ];
            for (number, view) in views.into_iter().enumerate() {
                let shown = values(view.clone());
                let largest = shown.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                let q = Fp8Tensor::quantize(view.clone(), format);
                assert_eq!(q.dims(), view.dims());
                assert_eq!(values(q.scale()), [format.max() / largest], "view {number}");
                let code = |x: &f32| format.encode(x * (format.max() / largest));
                let expected: Vec<u8> = shown.iter().map(code).collect();
                assert_eq!(q.clone().into_data().codes, expected, "view {number}");
                // The result can be used like any other.
                let values_of = |code: &u8| format.decode(*code) * largest / format.max();
                let back = values(q.clone().dequantize(FloatDType::F32));
                for (found, code) in back.iter().zip(&expected) {
                    let value = values_of(code);
                    assert!((found - value).abs() <= value.abs() * 1e-6, "view {number}");
                }
                let count = expected.len();
                if moves_bytes(&device) {
                    assert_eq!(
                        q.reshape([count]).into_data().codes,
                        expected,
                        "view {number}"
                    );
                }
            }
        }
    }
}

/// Whether Burn's ops can move codes. WebGPU has no type for bytes.
fn moves_bytes(device: &Device) -> bool {
    device.supports_dtype(DType::U8)
}

#[test]
fn reshape_and_transpose_move_values() {
    for device in devices() {
        let x = Random::new(9).matrix([4, 6], &device);
        let q = Fp8Tensor::quantize(x, Fp8Format::E4M3);
        let y = q.dequantize(FloatDType::F32);
        let reshaped = q.clone().reshape([2, 3, 4]);
        assert_eq!(reshaped.dims(), [2, 3, 4]);
        assert_eq!(
            values(reshaped.dequantize(FloatDType::F32)),
            values(y.clone())
        );
        let transposed = q.clone().transpose();
        assert_eq!(transposed.dims(), [6, 4]);
        assert_eq!(
            values(transposed.dequantize(FloatDType::F32)),
            values(y.clone().transpose())
        );
        // The codes of a transposed tensor are read in the order of the transpose.
        if moves_bytes(&device) {
            assert_eq!(transposed.clone().into_data().codes, {
                let codes = q.clone().into_data().codes;
                (0..24)
                    .map(|i| codes[i % 4 * 6 + i / 4])
                    .collect::<Vec<_>>()
            });
        }
        let twice = transposed.transpose().reshape([24]);
        assert_eq!(values(twice.dequantize(FloatDType::F32)), values(y));
    }
}

/// Sizes on both sides of a word, a tile and a block of tiles, and batches.
#[test]
fn the_transposed_copy_is_the_transpose() {
    for device in devices() {
        for shape in [
            [1, 1, 1],
            [1, 4, 4],
            [1, 3, 7],
            [2, 17, 34],
            [3, 6, 1],
            [1, 20, 65],
            [2, 0, 3],
        ] {
            for format in Fp8Format::ALL {
                let count = shape.iter().product();
                let data = TensorData::new(Random::new(15).normals(count), shape);
                let x = Tensor::<3>::from_data(data, &device);
                let scale = Tensor::<1>::from_floats([30.0], &device);
                let (q, transposed, amax) =
                    Fp8Tensor::quantize_with_transpose(x.clone(), scale.clone(), format);
                let (expected, expected_amax) =
                    Fp8Tensor::quantize_with_device_scale(x, scale, format);
                assert_eq!(values(amax), values(expected_amax));
                if moves_bytes(&device) {
                    assert_eq!(q.clone().into_data(), expected.clone().into_data());
                }
                let turned = expected.clone().transpose();
                if count == 0 {
                    assert_eq!(transposed.dims(), turned.dims());
                    continue;
                }
                if moves_bytes(&device) {
                    assert_eq!(transposed.clone().into_data(), turned.clone().into_data());
                }

                // Whatever the layout is, products, reshapes and values are the same.
                let product = |a: &Fp8Tensor<3>, b: &Fp8Tensor<3>| {
                    values(scaled_matmul(a, b, None, FloatDType::F32).unwrap())
                };
                assert_eq!(product(&q, &transposed), product(&expected, &turned));
                assert_eq!(product(&transposed, &q), product(&turned, &expected));
                for (found, expected) in [(&q, &expected), (&transposed, &turned)] {
                    assert_eq!(
                        values(found.dequantize(FloatDType::F32)),
                        values(expected.dequantize(FloatDType::F32))
                    );
                }
                if moves_bytes(&device) {
                    let flat = |q: Fp8Tensor<3>| q.reshape([count]).into_data().codes;
                    assert_eq!(flat(transposed), flat(turned));
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "a tensor of rank 1 has no transpose")]
fn a_vector_has_no_transposed_copy() {
    let device = Device::flex();
    let scale = Tensor::ones([1], &device);
    let _ =
        Fp8Tensor::quantize_with_transpose(Tensor::<1>::ones([3], &device), scale, Fp8Format::E4M3);
}
