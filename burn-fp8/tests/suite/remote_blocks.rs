//! Scales of rows, columns and blocks over a websocket.

use burn::backend::Flex;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Tensor, Granularity, custom_ops, scaled_matmul};
use burn_router::CustomOpRegistry;
use std::sync::Mutex;

use super::device::{Random, sqnr, values};
use super::remote::{serve, servers};

/// The scales of the sides of a product, some of them along its inner dimension.
const SIDES: [[Granularity; 2]; 4] = [
    [Granularity::Row, Granularity::Column],
    [block(1, 4), block(4, 4)],
    [block(1, 4), Granularity::Tensor],
    [block(2, 3), block(9, 2)],
];

const fn block(rows: usize, columns: usize) -> Granularity {
    Granularity::Block { rows, columns }
}

/// Casts both sides, multiplies them, and casts one of them back.
fn run(inputs: &[Tensor<2>; 2], sides: [Granularity; 2]) -> ([Fp8Tensor<2>; 2], [Vec<f32>; 2]) {
    let cast = |side: usize| {
        let cast = Fp8Cast::new(sides[side], Fp8Format::ALL[side]);
        Fp8Tensor::quantize_as(inputs[side].clone(), cast).unwrap()
    };
    let [a, b] = [0, 1].map(cast);
    let bias = Tensor::from_floats([1.0, 2.0, -3.0, 0.0, 0.5], &inputs[0].device());
    let product = scaled_matmul(&a, &b, Some(bias), FloatDType::F32).unwrap();
    let back = a.clone().dequantize(FloatDType::F32);
    ([a, b], [values(product), values(back)])
}

fn inputs(device: &Device) -> [Tensor<2>; 2] {
    [[7, 9], [9, 5]].map(|shape| Random::new(35).matrix(shape, device))
}

#[test]
fn block_scales_give_what_they_give_on_the_local_device() {
    let local = inputs(&Device::flex());
    for (runtime, device) in servers() {
        let remote = inputs(&device);
        for sides in SIDES {
            let ([a, b], [product, back]) = run(&remote, sides);
            let ([near_a, near_b], [near, near_back]) = run(&local, sides);
            assert_eq!(a.into_data(), near_a.into_data());
            assert_eq!(b.into_data(), near_b.into_data());
            assert_eq!(back, near_back);
            assert!(sqnr(&near, &product) > 100.0, "{sides:?}");
        }
        runtime.shutdown_background();
    }
}

/// So that the served backend runs its own kernels, and nothing else travels.
#[test]
fn casts_and_products_with_block_scales_are_one_op_each() {
    static OPS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    fn register(registry: &mut CustomOpRegistry<Flex>) {
        for (id, handler) in custom_ops::<Flex>() {
            registry.register(id, move |handles, desc, device| {
                OPS.lock().unwrap().push(desc.id.clone());
                handler(handles, desc, device)
            });
        }
    }
    let (runtime, device) = serve(register);
    for sides in SIDES {
        run(&inputs(&device), sides);
        let mut ops = core::mem::take(&mut *OPS.lock().unwrap());
        let cast = |side| match side {
            Granularity::Tensor => &["amax", "scales", "quantize"][..],
            _ => &["quantize_blocks"],
        };
        let casts = sides.map(cast).concat();
        let names = casts.iter().chain(&["matmul", "dequantize"]);
        let mut expected: Vec<String> = names.map(|name| format!("fp8::{name}")).collect();
        // With Burn's own fusion, its client may send independent ops in another order.
        ops.sort();
        expected.sort();
        assert_eq!(ops, expected, "{sides:?}");
    }
    runtime.shutdown_background();
}
