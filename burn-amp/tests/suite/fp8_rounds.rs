//! How often a device asks the other ranks for their amaxes.

use burn::{
    module::Module,
    nn::Linear,
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Tensor},
};
use burn_amp::{
    Autocast, AutocastLease,
    recipe::{AmaxReducer, DelayedScaling},
};
use std::{
    error::Error,
    sync::{Arc, Mutex},
};

use super::fp8::{linear, values, wave};

/// A rank by itself, which counts the amaxes of each call.
#[derive(Debug, Default)]
struct Calls(Mutex<Vec<usize>>);

impl AmaxReducer for Calls {
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
        self.0.lock().unwrap().push(amaxes.dims()[0]);
        Ok(amaxes)
    }
}

/// A device that shares amaxes, and one that does not, with the same model on each.
struct Pair {
    calls: Arc<Calls>,
    leases: [AutocastLease; 2],
    models: [Vec<Linear>; 2],
    steps: usize,
}

impl Pair {
    fn new(layers: usize) -> Self {
        let calls = Arc::new(Calls::default());
        let autocast = || Autocast::fp8(DelayedScaling::new().with_amax_history_len(4)).unwrap();
        let shares = autocast().amax_reducer(calls.clone());
        let leases = [shares, autocast()].map(|it| it.lease(Device::flex()).unwrap());
        let model = |lease: &AutocastLease| {
            let device = lease.device().autodiff();
            (0..layers).map(|_| linear([16, 16], &device)).collect()
        };
        let models = [model(&leases[0]), model(&leases[1])];
        Self {
            calls,
            leases,
            models,
            steps: 0,
        }
    }

    /// Trains these layers, one after the other. Returns how many amaxes each call had.
    fn step(&mut self, layers: &[usize]) -> Vec<usize> {
        self.steps += 1;
        for (lease, model) in self.leases.iter().zip(&mut self.models) {
            let device = lease.device().autodiff();
            let x = wave([6, 16], 0.2 + self.steps as f32, &device);
            let forward = |x, layer: &usize| model[*layer].forward(x);
            let output = layers.iter().fold(x, forward);
            let gradients = (output * 1e-2).sum().backward();
            let gradients = GradientsParams::from_grads(gradients, model);
            *model = SgdConfig::new().init().step(1e-2, model.clone(), gradients);
            values(model[layers[0]].weight.val());
        }
        self.calls()
    }

    /// Runs all layers without backward, on the device that shares.
    fn evaluate(&self) -> Vec<usize> {
        let x = wave([6, 16], 0.2, &self.leases[0].device());
        let forward = |x, layer: &Linear| layer.valid().forward(x);
        values(self.models[0].iter().fold(x, forward));
        self.calls()
    }

    fn calls(&self) -> Vec<usize> {
        std::mem::take(&mut self.calls.0.lock().unwrap())
    }

    /// Sharing with nobody changes nothing.
    fn states_are_equal(&self) {
        let [shares, alone] = self.leases.each_ref().map(|it| it.fp8_state().unwrap());
        assert_eq!(shares, alone);
        assert_eq!(shares.layers(), self.models[0].len());
    }
}

/// As in Transformer Engine; and in backward, so that one rank alone may evaluate or save next.
#[test]
fn a_backward_makes_one_call_for_all_layers() {
    let mut pair = Pair::new(3);
    // Input, weight and gradient of each layer. Which layer is the last one shows only after it.
    assert_eq!(pair.step(&[0, 1, 2]), [3, 3, 3]);
    for _ in 0..5 {
        assert_eq!(pair.step(&[0, 1, 2]), [9]);
        pair.states_are_equal();
        assert_eq!(pair.evaluate(), [0; 0]);
    }
}

/// A model of which a part is trained alone at times: the discriminator of a GAN.
#[test]
fn a_backward_that_ends_elsewhere_is_shared_too() {
    let mut pair = Pair::new(3);
    assert_eq!(pair.step(&[0, 1, 2]), [3, 3, 3]);
    assert_eq!(pair.step(&[0, 1, 2]), [9]);
    // It would go on to layer 0, as far as known. The next forward shows that it did not.
    assert_eq!(pair.step(&[1, 2]), [0; 0]);
    assert_eq!(pair.step(&[1, 2]), [6, 6]);
    pair.states_are_equal();
    assert_eq!(pair.step(&[0, 1, 2]), [6, 3]);
    assert_eq!(pair.step(&[1, 2]), [6]);
    // What waits is in the state, and is shared once.
    assert_eq!(pair.step(&[2]), [0; 0]);
    pair.states_are_equal();
    assert_eq!(pair.calls(), [3]);
    assert_eq!(pair.step(&[0, 1, 2]), [3, 3, 3]);
    pair.states_are_equal();
}

/// A layer whose model is gone has had its place in the call, which other ranks may still make.
#[test]
fn a_layer_that_is_dropped_is_still_in_the_call() {
    let mut pair = Pair::new(2);
    pair.step(&[0, 1]);
    assert_eq!(pair.step(&[1]), [0; 0]);
    for model in &mut pair.models {
        model.truncate(1);
    }
    assert_eq!(pair.step(&[0]), [3, 3]);
    pair.states_are_equal();
}
