//! Tensors as data, in states, on other devices and as text.

use burn::optim::{RecordState, StateSink, StateSource};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fp8::{Fp8Cast, Fp8Data, Fp8Format, Fp8Tensor, Granularity};

use super::super::device::{Random, devices, values};

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
