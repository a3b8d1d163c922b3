//! Gradient checkpointing: backward makes products of tensors that it computes again, of which nothing is known.

use super::devices::Leased;
use burn::{
    nn::{Linear, LinearConfig},
    tensor::{Device, Distribution, Tensor, activation::gelu},
};
use burn_layer::{Inputs, Layer, Layers, Op, Plan, scoped};
use std::sync::{Arc, LazyLock, Mutex};

struct Name(&'static str);

static INSIDE: LazyLock<Arc<Name>> = LazyLock::new(|| Arc::new(Name("inside")));
static BACKWARD: LazyLock<Arc<Name>> = LazyLock::new(|| Arc::new(Name("backward")));

/// Writes down of every product the scope that it is in, and whether it makes the gradient of a factor that a batch shared.
#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Vec<(&'static str, bool)>>>);

impl Layer for Recorder {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        if op == Op::float_matmul {
            let scope = inputs.scope::<Name>().map_or("", |name| name.0);
            self.0.lock().unwrap().push((scope, inputs.of_shared));
        }
        None
    }
}

/// The products of a backward pass, called in a scope of its own, with checkpointing and without.
fn both(loss: impl Fn(&Device) -> Tensor<1>) -> [Vec<(&'static str, bool)>; 2] {
    [false, true].map(|checkpointing| {
        let recorder = Recorder::default();
        let layers = Layers::on(Device::flex()).layer(recorder.clone());
        let device = layers.leased().autodiff();
        let device = match checkpointing {
            true => device.gradient_checkpointing(),
            false => device,
        };
        let loss = loss(&device);
        device.sync().unwrap();
        recorder.0.lock().unwrap().clear();
        scoped(&BACKWARD, || loss.backward());
        device.sync().unwrap();
        core::mem::take(&mut *recorder.0.lock().unwrap())
    })
}

fn linear(outputs: usize, device: &Device) -> Linear {
    LinearConfig::new(3, outputs).with_bias(false).init(device)
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Default, device)
}

#[test]
fn the_gradient_of_a_weight_is_in_the_scope_of_its_forward() {
    let [kept, again] = both(|device| {
        let (first, second) = (linear(3, device), linear(3, device));
        let hidden = gelu(first.forward(random([4, 3], device)));
        scoped(&INSIDE, || second.forward(hidden)).sum()
    });
    // To the input and the weight of the second, and the weight of the first.
    assert_eq!(kept, [("inside", false), ("inside", false), ("", false)]);
    assert_eq!(again, kept);
}

/// And of several layers it is in its own, where they are of one size, and have one gradient as well.
#[test]
fn layers_of_one_input_are_each_in_their_scope() {
    for inside_first in [true, false] {
        let [kept, again] = both(|device| {
            let [first, inside, outside] = [0, 1, 2].map(|_| linear(3, device));
            let hidden = gelu(first.forward(random([4, 3], device)));
            let within = || scoped(&INSIDE, || inside.forward(hidden.clone()));
            match inside_first {
                true => within() + outside.forward(hidden.clone()),
                false => outside.forward(hidden.clone()) + within(),
            }
            .sum()
        });
        let scopes: Vec<_> = kept.iter().map(|(scope, _)| *scope).collect();
        let expected = match inside_first {
            true => ["", "", "inside", "inside", ""],
            false => ["inside", "inside", "", "", ""],
        };
        assert_eq!(scopes, expected, "inside first: {inside_first}");
        assert_eq!(again, kept);
    }
}

/// A layer whose own input has no gradient asks that input, whatever another layer told of the gradient that both have.
#[test]
fn a_frozen_layer_tells_nothing_of_another() {
    let [kept, again] = both(|device| {
        let (first, second) = (linear(3, device), linear(3, device));
        let frozen = random([3, 3], device);
        let hidden = gelu(first.forward(random([4, 3], device)));
        let frozen = scoped(&INSIDE, || hidden.matmul(frozen));
        (second.forward(random([4, 3], device)) + frozen).sum()
    });
    let mut sorted = kept.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [("", false), ("", false), ("inside", false)]);
    assert_eq!(again, kept);
}

#[test]
fn a_batch_shares_a_weight_still() {
    let [kept, again] = both(|device| {
        let (first, second) = (linear(3, device), linear(5, device));
        let hidden = gelu(first.forward(random([2, 4, 3], device)));
        second.forward(hidden).sum()
    });
    assert_eq!(
        kept,
        [("", false), ("", true), ("", true)],
        "input, weight and weight"
    );
    assert_eq!(again, kept);
}
