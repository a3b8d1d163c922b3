//! Scopes: which ops are in them, forward and backward.

use super::devices::Leased;
use burn::{
    nn::{LinearConfig, conv::Conv2dConfig},
    tensor::{Device, Distribution, Tensor, activation::sigmoid},
};
use burn_layer::{Inputs, Layer, Layers, Op, Plan, ops_come_whole, scoped};
use burn_std::id::StreamId;
use std::{
    sync::{
        Arc, LazyLock, Mutex,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

struct Name(&'static str);

/// Writes down every op and the scope that it is in.
#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Vec<(Op, &'static str)>>>);

impl Layer for Recorder {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        let scope = inputs.scope::<Name>().map_or("", |name| name.0);
        self.0.lock().unwrap().push((op, scope));
        None
    }
}

impl Recorder {
    fn device(&self) -> Device {
        Layers::on(Device::flex()).layer(self.clone()).leased()
    }

    /// The scopes in which `op` ran, in order.
    fn scopes_of(&self, op: Op) -> Vec<&'static str> {
        let ran = self.0.lock().unwrap();
        let of_op = ran.iter().filter(|(ran, _)| *ran == op);
        of_op.map(|(_, scope)| *scope).collect()
    }
}

static OUTER: LazyLock<Arc<Name>> = LazyLock::new(|| Arc::new(Name("outer")));
static INNER: LazyLock<Arc<Name>> = LazyLock::new(|| Arc::new(Name("inner")));

#[test]
fn scopes_nest_and_end() {
    let recorder = Recorder::default();
    let x = Tensor::<1>::ones([2], &recorder.device());
    let abs = || x.clone().abs();
    let inside = scoped(&OUTER, || {
        let first = abs();
        let inner = scoped(&INNER, abs);
        scoped(&Arc::new(5usize), || first + inner + abs())
    });
    (inside + abs()).into_data();
    // A scope of another type hides none.
    let scopes = recorder.scopes_of(Op::float_abs);
    assert_eq!(scopes, ["outer", "inner", "outer", ""]);
    let scopes = recorder.scopes_of(Op::float_add);
    assert_eq!(scopes, ["outer", "outer", ""]);
}

/// CubeCL synchronizes different streams, and an op in place on a tensor of another stream is not ordered at all.
#[test]
fn plain_devices_do_not_notice() {
    let outside = StreamId::current();
    assert_eq!(scoped(&OUTER, StreamId::current), outside);
}

/// The device of a lease that ended in a scope is the next lease's, and that is in none.
#[test]
fn a_scope_is_not_passed_on_to_the_next_lease() {
    let scopes = |inside: bool| {
        let recorder = Recorder::default();
        let layers = Layers::on(Device::flex()).layer(recorder.clone());
        let run = move || {
            let lease = layers.lease().unwrap();
            Tensor::<1>::ones([2], &lease.device()).abs().into_data();
        };
        match inside {
            true => scoped(&OUTER, run),
            false => run(),
        }
        recorder.scopes_of(Op::float_abs)
    };
    for inside in [true, false, true, false] {
        assert_eq!(scopes(inside), [if inside { "outer" } else { "" }]);
    }
}

#[test]
fn a_scope_ends_when_its_body_panics() {
    let recorder = Recorder::default();
    let x = Tensor::<1>::ones([2], &recorder.device());
    let panics = || scoped(&OUTER, || panic!("on purpose"));
    assert!(std::panic::catch_unwind(panics).is_err());
    x.abs().into_data();
    assert_eq!(recorder.scopes_of(Op::float_abs), [""]);
}

#[test]
fn scopes_belong_to_their_thread() {
    let recorder = Recorder::default();
    let x = Tensor::<1>::ones([2], &recorder.device());
    scoped(&OUTER, || {
        let x = x.clone();
        std::thread::spawn(move || x.abs().into_data())
            .join()
            .unwrap();
        scoped(&INNER, || x_exp(&recorder));
    });
    fn x_exp(recorder: &Recorder) {
        Tensor::<1>::ones([2], &recorder.device()).exp().into_data();
    }
    assert_eq!(recorder.scopes_of(Op::float_abs), [""]);
    assert_eq!(recorder.scopes_of(Op::float_exp), ["inner"]);
}

/// The same module in a scope and outside of it: half of its backward is in the scope, though
/// `backward` is called outside.
#[test]
fn backward_is_in_the_scope_of_its_forward() {
    let recorder = Recorder::default();
    let device = recorder.device().autodiff();
    let random = |shape: [usize; 4]| {
        Tensor::<4>::random(shape, Distribution::Default, &device).require_grad()
    };
    let conv = || Conv2dConfig::new([2, 2], [3, 3]).init(&device);
    let (inside, outside) = (conv(), conv());
    let x = random([1, 2, 5, 5]);
    let y = scoped(&INNER, || inside.forward(x));
    outside.forward(y).sum().backward();
    device.sync().unwrap();
    for op in [Op::conv2d, Op::conv2d_bias_backward] {
        assert_eq!(recorder.scopes_of(op).len(), 2, "{op}");
    }
    assert_eq!(recorder.scopes_of(Op::conv2d), ["inner", ""]);
    for op in [
        Op::conv2d_x_backward,
        Op::conv2d_weight_backward,
        Op::conv2d_bias_backward,
    ] {
        assert_eq!(recorder.scopes_of(op), ["", "inner"], "{op}");
    }
}

#[test]
fn backward_of_products_is_in_the_scope_of_its_forward() {
    for bias in [true, false] {
        let recorder = Recorder::default();
        let device = recorder.device().autodiff();
        let linear = || LinearConfig::new(3, 3).with_bias(bias).init(&device);
        let (inside, outside) = (linear(), linear());
        let x = Tensor::<2>::random([2, 3], Distribution::Default, &device).require_grad();
        let y = scoped(&INNER, || inside.forward(x));
        outside.forward(y).sum().backward();
        device.sync().unwrap();
        let ops = [
            Op::linear,
            Op::linear_x_backward,
            Op::linear_weight_backward,
            Op::float_matmul,
        ];
        let count = |scope: &str| {
            let scopes = ops.iter().flat_map(|op| recorder.scopes_of(*op));
            scopes.filter(|ran| *ran == scope).count()
        };
        // Forward, and backward to the input and to the weight.
        assert_eq!((count("inner"), count("")), (3, 3), "bias: {bias}");
    }
}

/// Of a linear layer in one scope and one outside of all, backward called in a third.
#[test]
fn backward_in_another_scope_is_in_the_scope_of_its_forward() {
    let recorder = Recorder::default();
    let device = recorder.device().autodiff();
    let x = Tensor::<2>::random([2, 3], Distribution::Default, &device).require_grad();
    let linear = || LinearConfig::new(3, 3).init(&device);
    let (inside, outside) = (linear(), linear());
    let images = Tensor::<4>::random([1, 2, 5, 5], Distribution::Default, &device).require_grad();
    let conv = || Conv2dConfig::new([2, 2], [3, 3]).init(&device);
    let (conv_inside, conv_outside) = (conv(), conv());
    let (y, z) = scoped(&INNER, || (inside.forward(x), conv_inside.forward(images)));
    let loss = outside.forward(y).sum() + conv_outside.forward(z).sum();
    scoped(&OUTER, || loss.backward());
    device.sync().unwrap();
    let products = recorder.scopes_of(Op::float_matmul);
    let count = |scope: &str| products.iter().filter(|ran| **ran == scope).count();
    assert_eq!((count("inner"), count("outer"), count("")), (3, 0, 3));
    for op in Op::conv2d.backward() {
        assert_eq!(recorder.scopes_of(op), ["", "inner"], "{op}");
    }
}

/// Burn's backward of a sigmoid begins with that sigmoid once more.
#[test]
fn backward_of_a_sigmoid_is_in_the_scope_of_its_forward() {
    if !ops_come_whole() {
        return println!("SKIPPED: with Burn's own fusion, its client sends this op in parts");
    }
    let recorder = Recorder::default();
    let device = recorder.device().autodiff();
    let linear = LinearConfig::new(3, 3).init(&device);
    let x = linear.forward(Tensor::<2>::random([2, 3], Distribution::Default, &device));
    let y = scoped(&INNER, || {
        sigmoid(x.clone()) + sigmoid(x.clone()).abs().exp()
    });
    scoped(&OUTER, || y.sum().backward());
    device.sync().unwrap();
    assert_eq!(recorder.scopes_of(Op::sigmoid), ["inner"; 4]);
    assert_eq!(recorder.scopes_of(Op::sigmoid_backward), ["inner"; 2]);
    // Forward again.
    let x = linear.forward(x.detach());
    let y = scoped(&OUTER, || sigmoid(x));
    y.sum().backward();
    device.sync().unwrap();
    assert_eq!(recorder.scopes_of(Op::sigmoid)[4..], ["outer"; 2]);
    assert_eq!(recorder.scopes_of(Op::sigmoid_backward)[2..], ["outer"]);
}

/// A batch that comes once more after backward, without a step between, is forward.
#[test]
fn the_same_images_again_are_in_the_scope_that_they_are_used_in() {
    let recorder = Recorder::default();
    let device = recorder.device().autodiff();
    let images = Tensor::<4>::random([1, 2, 5, 5], Distribution::Default, &device);
    let conv = Conv2dConfig::new([2, 2], [3, 3]).init(&device);
    let loss = scoped(&INNER, || conv.forward(images.clone()).sum());
    loss.backward();
    let loss = scoped(&OUTER, || conv.forward(images.clone()).sum());
    loss.backward();
    conv.forward(images).sum().backward();
    device.sync().unwrap();
    assert_eq!(recorder.scopes_of(Op::conv2d), ["inner", "outer", ""]);
    let backward = recorder.scopes_of(Op::conv2d_weight_backward);
    assert_eq!(backward, ["inner", "outer", ""]);
}

/// A weight that is used again, transposed: forward, though it looks as backward does.
#[test]
fn a_tied_weight_is_in_the_scope_that_it_is_used_in() {
    let recorder = Recorder::default();
    let device = recorder.device().autodiff();
    let random = |shape: [usize; 2]| Tensor::<2>::random(shape, Distribution::Default, &device);
    let weight = random([3, 4]).require_grad();
    let code = scoped(&INNER, || {
        random([2, 3]).require_grad().matmul(weight.clone())
    });
    let decoded = code.matmul(weight.transpose());
    decoded.clone().into_data();
    assert_eq!(recorder.scopes_of(Op::float_matmul), ["inner", ""]);
    decoded.sum().backward();
    device.sync().unwrap();
    let backward = recorder.scopes_of(Op::float_matmul).split_off(2);
    assert_eq!(backward, ["", "", "inner", "inner"]);
}

/// The gradient of a weight is as wide as its layer, and tells it from another that has the same input.
#[test]
fn layers_of_one_input_are_each_in_their_scope() {
    for router_first in [true, false] {
        let recorder = Recorder::default();
        let device = recorder.device().autodiff();
        let linear = |outputs| LinearConfig::new(3, outputs).with_bias(false).init(&device);
        let (router, body) = (linear(2), linear(5));
        let x = Tensor::<2>::random([4, 3], Distribution::Default, &device);
        let route = || scoped(&INNER, || router.forward(x.clone())).sum();
        let loss = match router_first {
            true => {
                let routed = route();
                routed + body.forward(x.clone()).sum()
            }
            false => body.forward(x.clone()).sum() + route(),
        };
        device.sync().unwrap();
        let before = recorder.scopes_of(Op::float_matmul).len();
        loss.backward();
        device.sync().unwrap();
        let mut backward = recorder.scopes_of(Op::float_matmul).split_off(before);
        backward.sort_unstable();
        assert_eq!(backward, ["", "inner"], "router first: {router_first}");
    }
}

/// A device whose plan of an absolute value says that it waits, and does, as collectives do for other ranks.
#[derive(Clone, Debug)]
struct Waits(Arc<Mutex<()>>, SyncSender<()>);

impl Layer for Waits {
    fn plan(&self, op: Op, _inputs: &Inputs) -> Option<Plan> {
        if op == Op::float_abs {
            self.1.send(()).unwrap();
            drop(self.0.lock().unwrap());
        }
        None
    }
}

/// One thread waits for its device, which waits for another thread. That one must not be held up by its scopes, of which the first
/// device is told as well.
#[test]
fn a_device_that_others_wait_for_hinders_no_scope() {
    let (says, waits) = sync_channel(1);
    let slow = Waits(Arc::default(), says);
    let lock = slow.0.clone();
    let lock = lock.lock().unwrap();
    let slow = Layers::on(Device::flex()).layer(slow).serve().unwrap();
    let recorder = Recorder::default();
    let device = recorder.device();
    let waiting = thread::spawn(move || {
        let x = Tensor::<1>::ones([2], &slow).abs();
        slow.sync().unwrap();
        x.into_data().try_to_vec::<f32>().unwrap()
    });
    waits.recv().unwrap();
    // Until the thread waits, for all that the test can know.
    thread::sleep(Duration::from_millis(100));
    let (ends, ended) = sync_channel(1);
    thread::spawn(move || {
        let mut x = Tensor::<1>::ones([2], &device);
        // More scopes than the queue to the device has room for.
        for _ in 0..200 {
            x = scoped(&OUTER, || x.abs());
        }
        ends.send(x.into_data().try_to_vec::<f32>().unwrap())
    });
    let ended = ended.recv_timeout(Duration::from_secs(60));
    assert_eq!(ended.unwrap(), [1.0, 1.0]);
    assert_eq!(recorder.scopes_of(Op::float_abs), ["outer"; 200]);
    assert!(!waiting.is_finished());
    drop(lock);
    assert_eq!(waiting.join().unwrap(), [1.0, 1.0]);
}
