//! What a layer asks the other ranks for, and how it uses the answer.

use std::error::Error;
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_fp8::recipe::{AmaxReducer, CurrentScaling};
use burn_fp8::{Fp8Linear, Fp8LinearConfig, share_amaxes};

use super::super::device::{Random, values};
use super::{linear, pass_fp8};

type Reduced = Result<Tensor<1>, Box<dyn Error + Send + Sync>>;

/// Records the amaxes that it gets, and answers as if another rank had twice as much.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<Vec<f32>>>);

impl Recorder {
    /// The amaxes since the last call.
    fn take(&self) -> Vec<Vec<f32>> {
        core::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl AmaxReducer for Recorder {
    fn max(&self, amaxes: Tensor<1>) -> Reduced {
        self.0.lock().unwrap().push(values(amaxes.clone()));
        Ok(amaxes * 2.0)
    }
}

#[test]
fn a_reducer_sees_every_amax_once() {
    let device = Device::flex().autodiff();
    let mut random = Random::new(28);
    let reducer = Arc::new(Recorder::default());
    let layer =
        Fp8Linear::from(linear(&mut random, 4, 3, &device)).with_amax_reducer(reducer.clone());
    let (x, g) = (
        random.matrix([5, 4], &device),
        random.matrix([5, 3], &device),
    );
    pass_fp8(&layer, &x, &g);
    let staged = layer.scaling_state().unwrap().map(|state| state.amax);
    assert!(staged.iter().all(|amax| *amax > 0.0));
    pass_fp8(&layer, &x, &g);
    assert_eq!(reducer.take(), [vec![0.0; 3], staged.to_vec()]);
    let [input, ..] = layer.scaling_state().unwrap();
    assert_eq!(input.scale, 448.0 / (2.0 * staged[0]));
    // Evaluations are not shared.
    layer.valid().forward(x.without_autodiff());
    assert!(reducer.take().is_empty());
}

#[test]
fn a_model_shares_all_of_its_amaxes_in_one_call() {
    let device = Device::flex().autodiff();
    let mut random = Random::new(32);
    let mut layer = || {
        let layer = Fp8Linear::from(linear(&mut random, 4, 4, &device));
        let (x, g) = (
            random.matrix([5, 4], &device),
            random.matrix([5, 4], &device),
        );
        pass_fp8(&layer, &x, &g);
        layer
    };
    let model = vec![layer(), layer()];
    let staged = |model: &[Fp8Linear]| -> Vec<f32> {
        let states = model
            .iter()
            .flat_map(|layer| layer.scaling_state().unwrap());
        states.map(|state| state.amax).collect()
    };
    let own = staged(&model);
    assert!(own.iter().all(|amax| *amax > 0.0));
    let weights = values(model[1].weight.val());
    let reducer = Recorder::default();
    let model = share_amaxes(model, &reducer).unwrap();
    assert_eq!(reducer.take(), std::slice::from_ref(&own));
    assert_eq!(
        staged(&model),
        own.iter().map(|amax| amax * 2.0).collect::<Vec<_>>()
    );
    assert_eq!(values(model[1].weight.val()), weights);
    assert!(model[1].weight.val().is_require_grad());

    let without = Fp8LinearConfig::new(4, 4)
        .with_recipe(CurrentScaling::new().into())
        .init(&device);
    share_amaxes(without, &reducer).unwrap();
    assert!(reducer.take().is_empty());
    assert_eq!(
        share_amaxes(model, &Broken).unwrap_err().to_string(),
        "the second rank is gone"
    );
}

/// A group whose second rank is missing.
#[derive(Debug)]
struct Broken;

impl AmaxReducer for Broken {
    fn max(&self, _: Tensor<1>) -> Reduced {
        Err("the second rank is gone".into())
    }
}

#[test]
#[should_panic(expected = "the second rank is gone")]
fn a_reducer_that_fails_is_heard() {
    let device = Device::flex().autodiff();
    let layer = Fp8LinearConfig::new(2, 2)
        .init(&device)
        .with_amax_reducer(Arc::new(Broken));
    layer.forward(Tensor::<2>::ones([1, 2], &device));
}
