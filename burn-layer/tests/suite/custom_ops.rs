//! Custom ops of backend extensions.

use super::devices::Leased;
use burn::{
    backend::Remote,
    remote::CustomOpClient,
    tensor::{DType, Device, Tensor},
};
use burn_backend::{TensorMetadata, ops::FloatTensorOps};
use burn_dispatch::DispatchDevice;
use burn_flex::Flex;
use burn_ir::{CustomOpIr, OperationOutput, ScalarIr, TensorIr};
use burn_layer::{CustomOpHandler, Inputs, Layer, Layers, Op, Plan, scoped};
use std::sync::{Arc, Mutex};

/// Squares in bf16. Where it keeps, sums with a scalar are stored as their input, and elsewhere in f32. Writes down what is stored.
#[derive(Clone, Debug, Default)]
struct Low(Arc<Mutex<Vec<(DType, usize)>>>);

/// A scope in which everything has the dtype that the program sees.
struct Full;

impl Layer for Low {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        Some(match op {
            _ if inputs.scope::<Full>().is_some() => Plan::compute(inputs.nominal),
            Op::float_mul => Plan::compute(DType::BF16),
            Op::float_add_scalar => Plan::compute(DType::F32).store(inputs.first),
            Op::float_exp => Plan::compute(DType::F32),
            _ => inputs.promote(),
        })
    }

    fn stored(&self, dtype: DType, nominal: DType, elements: usize) {
        assert_eq!(nominal, DType::F32);
        self.0.lock().unwrap().push((dtype, elements));
    }
}

/// The dtypes that ops were called with.
type Seen = Arc<Mutex<Vec<DType>>>;

/// `x` times a number, and the number of its elements in f32.
fn scale(seen: Seen) -> CustomOpHandler<Flex> {
    Arc::new(move |handles, call, device| {
        let ([x], [out, count]) = call.as_fixed();
        let x = handles.get_float_tensor::<Flex>(x);
        seen.lock().unwrap().push(x.dtype());
        let elements = x.shape().num_elements() as f64;
        let counted = Flex::float_full([1].into(), elements.into(), device, DType::F32.into());
        let scaled = Flex::float_mul_scalar(x, call.scalars[0].into());
        handles.register_float_tensor::<Flex>(&out.id, scaled);
        handles.register_float_tensor::<Flex>(&count.id, counted);
    })
}

fn call(name: &'static str, x: Tensor<1>, by: f64) -> [Tensor<1>; 2] {
    let device = x.device();
    let DispatchDevice::Remote(remote) = device.as_dispatch() else {
        panic!("a layered device is a remote device");
    };
    let client = CustomOpClient::new(remote);
    let out = |length| TensorIr::uninit(client.create_empty_handle(), [length].into(), DType::F32);
    let outputs = [out(x.dims()[0]), out(1)];
    let input = x.try_into_primitive::<Remote>().unwrap();
    let call = CustomOpIr::with_scalars(
        name,
        &[input.into_ir()],
        &outputs,
        vec![ScalarIr::Float(by)],
    );
    let outputs: [_; 2] = client.register(call).outputs();
    outputs.map(Tensor::from_primitive::<Remote>)
}

fn values(tensor: Tensor<1>) -> Vec<f32> {
    assert_eq!(tensor.dtype(), DType::F32);
    tensor.into_data().try_to_vec().unwrap()
}

/// A device with the op as it is, like a sum with a scalar, like an elementwise op, and like an op that is not stored low.
fn device(layer: &Low, seen: &Seen) -> Device {
    let op = || scale(seen.clone());
    Layers::on(Device::flex())
        .layer(layer.clone())
        .custom_ops::<Flex>([("test::plain", op())])
        .custom_ops_like::<Flex>(Op::float_add_scalar, [("test::like_sum", op())])
        .custom_ops_like::<Flex>(Op::float_abs, [("test::like_abs", op())])
        .custom_ops_like::<Flex>(Op::float_exp, [("test::like_exp", op())])
        .leased()
}

/// The dtype in which a name's op saw squares that are stored in bf16, and the same in f32, and the one that its results were
/// stored in. The program sees f32.
fn seen_by(name: &'static str, full: bool) -> [(DType, DType); 2] {
    let (layer, seen) = (Low::default(), Seen::default());
    let device = device(&layer, &seen);
    let x = Tensor::<1>::from_floats([1.0, 2.0, 3.0], &device);
    let wide = Tensor::<1>::from_floats([1.0, 4.0, 9.0], &device);
    let squares = [x.clone() * x, wide];
    squares.map(|square| {
        device.sync().unwrap();
        let run = || call(name, square.clone(), 1.0 + 1.0 / 512.0);
        let [out, count] = match full {
            true => scoped(&Arc::new(Full), run),
            false => run(),
        };
        device.sync().unwrap();
        let seen = seen.lock().unwrap().pop().unwrap();
        // In bf16, the numbers are rounded to 8 bits.
        let rounded = [1.0, 4.0, 9.0];
        let exact = rounded.map(|square: f32| square * (1.0 + 1.0 / 512.0));
        let out = values(out);
        let stored = match out == exact {
            true => DType::F32,
            false => {
                assert_eq!(out, rounded);
                DType::BF16
            }
        };
        assert_eq!(values(count), [3.0]);
        (seen, stored)
    })
}

#[test]
fn they_run_on_the_backend_underneath_in_the_dtype_that_the_program_sees() {
    let wide = (DType::F32, DType::F32);
    assert_eq!(seen_by("test::plain", false), [wide; 2]);
}

#[test]
fn like_an_op_whose_result_is_stored_low_they_see_and_return_what_is_stored() {
    let (low, wide) = ((DType::BF16, DType::BF16), (DType::F32, DType::F32));
    for name in ["test::like_sum", "test::like_abs"] {
        assert_eq!(seen_by(name, false), [low, wide]);
        // The layers decide, and they see the scope.
        assert_eq!(seen_by(name, true), [wide; 2]);
    }
    assert_eq!(seen_by("test::like_exp", false), [wide; 2]);
}

#[test]
fn layers_are_told_what_is_stored_low() {
    let (layer, seen) = (Low::default(), Seen::default());
    let device = device(&layer, &seen);
    let x = Tensor::<1>::from_floats([1.0, 2.0], &device);
    let square = x.clone() * x;
    device.sync().unwrap();
    layer.0.lock().unwrap().clear();
    let [doubled, count] = call("test::like_sum", square, 2.0);
    assert_eq!(
        (values(doubled), values(count)),
        (vec![2.0, 8.0], vec![2.0])
    );
    let stored = layer.0.lock().unwrap();
    assert!(
        stored.starts_with(&[(DType::BF16, 2), (DType::F32, 1)]),
        "{stored:?}"
    );
}
