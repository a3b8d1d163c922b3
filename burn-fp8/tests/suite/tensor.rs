//! Fp8 tensors: their layout and their data.

use burn::optim::{RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fp8::{Fp8Cast, Fp8Data, Fp8Format, Fp8Tensor, Granularity, scaled_matmul};

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

#[test]
fn data_makes_the_round_trip_through_json() {
    for device in devices() {
        let x = Random::new(11).matrix([3, 5], &device);
        for q in [
            Fp8Tensor::quantize(x.clone(), Fp8Format::E5M2),
            Fp8Tensor::quantize_blocks(x.clone(), [2, 2], Fp8Format::E4M3).unwrap(),
        ] {
            let data = q.clone().into_data();
            let json = serde_json::to_string(&data).unwrap();
            let read: Fp8Data = serde_json::from_str(&json).unwrap();
            assert_eq!(read, data);
            for target in devices() {
                let again = Fp8Tensor::<2>::from_data(read.clone(), &target).unwrap();
                assert_eq!(
                    values(again.dequantize(FloatDType::F32)),
                    values(q.dequantize(FloatDType::F32))
                );
            }
        }
    }
}

#[test]
fn states_keep_tensors() {
    let device = Device::flex();
    let x = Random::new(13).matrix([3, 5], &device);
    let e4m3 = |granularity| {
        Fp8Tensor::quantize_as(x.clone(), Fp8Cast::new(granularity, Fp8Format::E4M3)).unwrap()
    };
    let block = |rows, columns| Granularity::Block { rows, columns };
    for q in [
        Fp8Tensor::quantize(x.clone(), Fp8Format::E5M2),
        e4m3(Granularity::Row),
        e4m3(Granularity::Column),
        e4m3(block(1, 2)),
        e4m3(block(2, 2)),
    ] {
        let mut sink = StateSink::default();
        q.state_flatten("weight", &mut sink);
        let mut source = StateSource::new(sink.scalars.into_iter().collect());
        assert!(Fp8Tensor::<2>::state_unflatten("weight", &mut source, &device).is_none());
        for (name, data) in sink.tensors {
            source.insert_tensor(name, data);
        }
        let again = Fp8Tensor::<2>::state_unflatten("weight", &mut source, &device).unwrap();
        assert_eq!(again.into_data(), q.clone().into_data());

        let json = serde_json::to_string(&q).unwrap();
        let read: Fp8Tensor<2> = serde_json::from_str(&json).unwrap();
        assert_eq!(read.into_data(), q.into_data());
    }
    let refused = serde_json::from_str::<Fp8Tensor<2>>(
        &serde_json::to_string(&e4m3(Granularity::Row).into_data())
            .unwrap()
            .replace("\"shape\":[3,5]", "\"shape\":[3,6]"),
    );
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("do not fill the shape")
    );
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

/// Ways to share scales: one for the tensor, one for each row, and one for each block.
const GRANULARITIES: [Granularity; 3] = [
    Granularity::Tensor,
    Granularity::Row,
    Granularity::Block {
        rows: 2,
        columns: 2,
    },
];

#[test]
fn to_device_keeps_everything() {
    let from = devices().into_iter();
    for (from, granularity) in from.flat_map(|from| GRANULARITIES.map(|it| (from.clone(), it))) {
        let x = Random::new(12).matrix([3, 5], &from);
        let q = Fp8Tensor::quantize_as(x, Fp8Cast::new(granularity, Fp8Format::E4M3)).unwrap();
        for to in devices() {
            let moved = q.clone().to_device(&to);
            assert_eq!((moved.device(), moved.scale().device()), (to.clone(), to));
            assert_eq!(
                values(moved.dequantize(FloatDType::F32)),
                values(q.dequantize(FloatDType::F32))
            );
            assert_eq!(moved.into_data(), q.clone().into_data());
        }
    }
}

#[test]
fn debug_shows_values() {
    let scales = ["[[0.25]]", "[[1.0],\n [0.25]]", "[[0.25, 1.0]]"];
    for device in devices() {
        let x = Tensor::<2>::from_floats([[2.0, -448.0, 3.0], [-1792.0, 8.0, 448.0]], &device);
        for (granularity, scale) in GRANULARITIES.into_iter().zip(scales) {
            let cast = Fp8Cast::new(granularity, Fp8Format::E4M3);
            let q = Fp8Tensor::quantize_as(x.clone(), cast).unwrap();
            let text = format!("{q:?}");
            for part in [
                "format: E4M3",
                &format!("granularity: {granularity:?}"),
                scale,
                "[[2.0, -448.0, 3.0],\n [-1792.0, 8.0, 448.0]]",
            ] {
                assert!(text.contains(part), "no {part} in {text}");
            }
        }
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
