//! Over a websocket: the ops are sent by name, and run by the backend's kernels or by the portable ones.

use burn::backend::Flex;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, remote::RemoteHost};
use burn_fp8::recipe::{
    AmaxCompute, BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RecipeFormat,
    RowwiseScaling,
};
use burn_fp8::{
    Fp8Cast, Fp8Format, Fp8Linear, Fp8LinearConfig, Fp8Scope, Fp8Tensor, Granularity, Microbatch,
    amax, custom_ops, register_fp8_ops, register_portable_fp8_ops, scaled_matmul,
    scaled_matmul_with_amax,
};
use burn_ir::{ScalarIr, TensorIr, TensorStatus};
use burn_remote::server::{BackendServer, WebSocketTransport};
use burn_router::CustomOpRegistry;
use std::sync::Mutex;
use tokio::runtime::Runtime;

use super::device::{Random, sqnr, values};
use super::fixtures;

/// Serves Flex until the runtime is dropped.
pub(super) fn serve(register: fn(&mut CustomOpRegistry<Flex>)) -> (Runtime, Device) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_io()
        .build()
        .unwrap();
    let mut registry = CustomOpRegistry::<Flex>::new();
    register(&mut registry);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = RemoteHost::websocket(&format!("ws://{}", listener.local_addr().unwrap()));
    let devices: [<Flex as burn::backend::BackendTypes>::Device; 1] = [Default::default()];
    let server = BackendServer::<Flex>::new(devices).with_custom_ops(registry);
    runtime.spawn(server.serve_async(WebSocketTransport::from_listener(listener)));
    (runtime, Device::remote_options(&host).init().unwrap())
}

/// Registers the handlers one by one, as a layered device does.
fn register_one_by_one(registry: &mut CustomOpRegistry<Flex>) {
    for (id, handler) in custom_ops::<Flex>() {
        registry.register(id, move |handles, desc, device| {
            handler(handles, desc, device)
        });
    }
}

pub(super) fn servers() -> [(Runtime, Device); 3] {
    [
        serve(register_fp8_ops::<Flex>),
        serve(register_portable_fp8_ops::<Flex>),
        serve(register_one_by_one),
    ]
}

#[test]
fn casts_match_the_fixtures() {
    for (runtime, device) in servers() {
        for format in Fp8Format::ALL {
            let quantize = |data: TensorData, dtype| {
                let tensor = Tensor::<1>::from_data(data, (&device, dtype));
                Fp8Tensor::quantize_with_scale(tensor, 1.0, format).unwrap()
            };
            let (inputs, expected) = fixtures::from_bf16(format);
            let data = TensorData::new(inputs.clone(), [inputs.len()]);
            let codes = quantize(data, DType::BF16).into_data().codes;
            fixtures::assert_codes(format, &inputs, &codes, &expected);
            let (inputs, expected) = fixtures::from_f16(format);
            let data = TensorData::new(inputs.clone(), [inputs.len()]);
            let codes = quantize(data, DType::F16).into_data().codes;
            fixtures::assert_codes(format, &inputs, &codes, &expected);
            let (inputs, expected) = fixtures::from_f32(format);
            let data = TensorData::new(inputs.clone(), [inputs.len()]);
            let quantized = quantize(data, DType::F32);
            fixtures::assert_codes(
                format,
                &inputs,
                &quantized.clone().into_data().codes,
                &expected,
            );
            let decoded = values(quantized.dequantize(FloatDType::F32));
            for (value, code) in decoded.into_iter().zip(expected) {
                let exact = fixtures::values(format)[code as usize];
                assert!(value.to_bits() == exact.to_bits() || value.is_nan() && exact.is_nan());
            }
        }
        runtime.shutdown_background();
    }
}

#[test]
fn every_op_gives_what_the_local_device_gives() {
    let local = Device::flex();
    for (runtime, device) in servers() {
        let inputs = [[7, 9], [9, 5]].map(|shape| Random::new(30).matrix(shape, &local));
        let bias = Tensor::<1>::from_floats([1.0, 2.0, -3.0, 0.0, 0.5], &local);
        let run = |device: &Device| {
            let [a, b] = inputs.clone().map(|x| x.to_device(device));
            let amaxes = [amax(a.clone()), amax(b.clone())].map(values);
            let rounded = Fp8Cast::new(Granularity::Row, Fp8Format::E4M3).with_power_of_two(true);
            let rounded = Fp8Tensor::quantize_as(a.clone(), rounded)
                .unwrap()
                .into_data();
            let scale = Tensor::<1>::from_floats([100.0], device);
            let (_, turned, _) =
                Fp8Tensor::quantize_with_transpose(a.clone(), scale, Fp8Format::E4M3);
            let a = Fp8Tensor::quantize(a, Fp8Format::E4M3);
            let b = Fp8Tensor::quantize(b, Fp8Format::E5M2);
            let bias = Some(bias.clone().to_device(device));
            let product = scaled_matmul(&a, &b, bias.clone(), FloatDType::F32).unwrap();
            let (again, largest) = scaled_matmul_with_amax(&a, &b, bias, FloatDType::F32).unwrap();
            assert_eq!(values(again), values(product.clone()));
            let tensors = [a.into_data(), b.into_data(), turned.into_data(), rounded];
            (amaxes, tensors, values(product), values(largest))
        };
        assert_eq!(run(&device), run(&local));
        let nan = Tensor::<1>::from_floats([1.0, f32::NAN], &device);
        assert!(values(amax(nan))[0].is_nan());

        for (algorithm, length) in [(AmaxCompute::Max, 4), (AmaxCompute::MostRecent, 1)] {
            let update = DelayedScaling::new()
                .with_margin(1)
                .with_amax_compute(algorithm)
                .update(Fp8Format::E4M3);
            let run = |device: &Device| {
                let mut history = Tensor::<1>::zeros([length], device);
                let mut scale = Tensor::<1>::ones([1], device);
                let mut bits = vec![];
                for amax in [
                    3.0,
                    0.0,
                    1e-44,
                    5.0,
                    f32::INFINITY,
                    2.0,
                    f32::NAN,
                    1.0,
                    0.5,
                    0.25,
                    1.5,
                ] {
                    let staged = Tensor::from_data(TensorData::from([amax]), device);
                    (history, scale) = update.apply(history, scale, staged);
                    let state = [values(history.clone()), values(scale.clone())].concat();
                    bits.extend(
                        state
                            .into_iter()
                            .map(|x| if x.is_nan() { 0 } else { x.to_bits() }),
                    );
                }
                bits
            };
            assert_eq!(run(&device), run(&local));
        }
        runtime.shutdown_background();
    }
}

/// As in Transformer Engine, whatever the gradient's format is.
#[test]
fn only_the_forward_product_is_summed_fast() {
    static FAST: Mutex<Vec<bool>> = Mutex::new(Vec::new());
    fn register(registry: &mut CustomOpRegistry<Flex>) {
        for (id, handler) in custom_ops::<Flex>() {
            registry.register(id, move |handles, desc, device| {
                if desc.id == "fp8::matmul" {
                    let fast = matches!(desc.scalars.last(), Some(ScalarIr::Bool(true)));
                    FAST.lock().unwrap().push(fast);
                }
                handler(handles, desc, device)
            });
        }
    }
    let (runtime, remote) = serve(register);
    let device = remote.autodiff();
    let recipe = CurrentScaling::new().with_format(RecipeFormat::E4M3);
    let layer = Fp8LinearConfig::new(8, 4)
        .with_recipe(recipe.into())
        .init(&device);
    let x = Random::new(32).matrix([6, 8], &device).require_grad();
    let gradients = layer.forward(x.clone()).sum().backward();
    values(x.grad(&gradients).unwrap());
    values(layer.weight.val().grad(&gradients).unwrap());
    assert_eq!(*FAST.lock().unwrap(), [true, false, false]);
    runtime.shutdown_background();
}

/// On a backend that stores the transposes separately, as a GPU with fp8 tensor cores does, every product of a layer finds both
/// operands along its inner dimension, so none is copied. A weight is cast once for both of its products, in all micro-batches of
/// a step.
#[test]
fn no_product_of_a_layer_copies_an_operand() {
    static OPS: Mutex<Vec<(String, Vec<bool>)>> = Mutex::new(Vec::new());
    fn register(registry: &mut CustomOpRegistry<Flex>) {
        for (id, handler) in custom_ops::<Flex>() {
            registry.register(id, move |handles, desc, device| {
                let kept = |ir: &TensorIr| TensorIr {
                    status: TensorStatus::ReadOnly,
                    ..ir.clone()
                };
                let mut along = Vec::new();
                if desc.id == "fp8::matmul" {
                    for (side, sum) in desc.inputs[..2].iter().zip([1, 0]) {
                        let codes = handles.get_int_tensor::<Flex>(&kept(side));
                        along.push(codes.layout().strides()[sum] == 1);
                    }
                }
                OPS.lock().unwrap().push((desc.id.clone(), along));
                handler(handles, desc, device);
                if desc.id == "fp8::quantize_transposed" {
                    let transposed = &desc.outputs[1];
                    let view = handles.get_int_tensor::<Flex>(&kept(transposed));
                    // Flex itself reads any layout.
                    assert_eq!(view.layout().strides()[0], 1);
                    handles.register_int_tensor::<Flex>(&transposed.id, view.to_contiguous());
                }
            });
        }
    }
    let (runtime, remote) = serve(register);
    let device = remote.autodiff();
    let layer = Fp8LinearConfig::new(8, 4).init(&device);
    for microbatch in [Microbatch::First, Microbatch::Later] {
        let x = Random::new(33).matrix([6, 8], &device).require_grad();
        let scope = Fp8Scope::current().with_microbatch(microbatch);
        let gradients = scope.run(|| layer.forward(x.clone())).sum().backward();
        values(x.grad(&gradients).unwrap());
        values(layer.weight.val().grad(&gradients).unwrap());
    }
    let ops = OPS.lock().unwrap();
    let named = |name: &str| -> Vec<_> { ops.iter().filter(|(id, _)| id == name).collect() };
    // The weight once, input and gradient twice each.
    assert_eq!(named("fp8::quantize_transposed").len(), 5);
    assert!(named("fp8::quantize").is_empty());
    let products = named("fp8::matmul");
    assert_eq!(products.len(), 6);
    for (_, along) in products {
        assert_eq!(along, &[true, true]);
    }
    runtime.shutdown_background();
}

/// In three micro-batches, a later one skips the cast of the weight and nothing else, with every recipe.
#[test]
fn later_microbatches_do_not_cast_the_weight() {
    static CASTS: Mutex<usize> = Mutex::new(0);
    fn register(registry: &mut CustomOpRegistry<Flex>) {
        for (id, handler) in custom_ops::<Flex>() {
            registry.register(id, move |handles, desc, device| {
                if desc.id.starts_with("fp8::quantize") {
                    *CASTS.lock().unwrap() += 1;
                }
                handler(handles, desc, device)
            });
        }
    }
    let (runtime, remote) = serve(register);
    let device = remote.autodiff();
    let recipes: [(Fp8Recipe, _); 4] = [
        // Input, weight and gradient, each both ways in one cast.
        (DelayedScaling::new().into(), [3, 2, 2]),
        (CurrentScaling::new().into(), [3, 2, 2]),
        // Input, weight and gradient, each by rows and by columns.
        (RowwiseScaling::new().into(), [6, 4, 4]),
        // The weight by squares, which serve both directions.
        (BlockScaling::new().with_size(4).into(), [5, 4, 4]),
    ];
    for (recipe, expected) in recipes {
        let config = Fp8LinearConfig::new(8, 4).with_recipe(recipe);
        let layer = config.init(&device);
        let microbatches = [Microbatch::First, Microbatch::Later, Microbatch::Later];
        let casts = microbatches.map(|microbatch| {
            let x = Random::new(34).matrix([6, 8], &device).require_grad();
            let scope = Fp8Scope::current().with_microbatch(microbatch);
            let gradients = scope.run(|| layer.forward(x.clone())).sum().backward();
            values(x.grad(&gradients).unwrap());
            values(layer.weight.val().grad(&gradients).unwrap());
            core::mem::take(&mut *CASTS.lock().unwrap())
        });
        assert_eq!(casts, expected, "{recipe:?}");
    }
    runtime.shutdown_background();
}

#[test]
fn training_on_a_remote_device() {
    let step = |layer: &Fp8Linear, x: &Tensor<2>| {
        let loss = layer.forward(x.clone()).powf_scalar(2.0).mean();
        let gradients = loss.backward();
        let gradient = layer.weight.val().grad(&gradients).unwrap();
        (
            values(loss),
            values(gradient),
            layer.scaling_state().unwrap(),
        )
    };
    use burn::module::Module;
    let local = Device::flex().autodiff();
    let record = Fp8LinearConfig::new(8, 4).init(&local).into_record();
    for (runtime, remote) in servers() {
        let layers = [&local, &remote.autodiff()].map(|device| {
            let layer = Fp8LinearConfig::new(8, 4)
                .init(device)
                .load_record(record.clone());
            (layer, Random::new(31).matrix([6, 8], device))
        });
        for _ in 0..3 {
            let [(_, near, here), (_, far, there)] =
                [&layers[0], &layers[1]].map(|(layer, x)| step(layer, x));
            assert!(sqnr(&near, &far) > 100.0);
            assert_eq!(
                here.map(|state| state.history),
                there.map(|state| state.history)
            );
        }
        runtime.shutdown_background();
    }
}
