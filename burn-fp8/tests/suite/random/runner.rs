//! [`Runner`]: an [`Fp8Linear`] that runs steps, beside its model.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_fp8::recipe::{AmaxReducer, Fp8Recipe};
use burn_fp8::{Fp8Linear, Fp8Scope, ScalingState, calibrate, fp8_autocast, share_amaxes};
use proptest::prelude::*;

use super::Outcome;
use super::group::{Doubled, Rank};
use super::model::{Floats, Mode, Model};
use super::reference;
use super::steps::{Backward, Case, Pass, Step};
use super::tensors::Drawn;
use crate::suite::device::{Random, values};

fn start(case: &Case, recipe: Fp8Recipe, device: &Device) -> Fp8Linear {
    let [d_input, d_output] = case.sizes;
    let mut random = Random::new(1);
    let mut parameter = |count| random.normals(count);
    let weight = TensorData::new(parameter(d_input * d_output), case.sizes);
    let bias = TensorData::new(parameter(d_output), [d_output]);
    let linear = Linear {
        weight: Param::from_tensor(Tensor::from_data(weight, device))
            .set_require_grad(!case.frozen),
        bias: case
            .bias
            .then(|| Param::from_tensor(Tensor::from_data(bias, device))),
    };
    Fp8Linear::from_linear(linear, recipe).unwrap()
}

/// What a pass gave: the output, and the gradients of input, weight and bias.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Given {
    output: Vec<u32>,
    gradients: [Option<Vec<u32>>; 3],
    state: Option<Vec<Vec<u32>>>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    let bits = values.iter().map(|value| match value.is_nan() {
        true => f32::NAN.to_bits(),
        false => value.to_bits(),
    });
    bits.collect()
}

fn state_bits(state: Option<[ScalingState; 3]>) -> Option<Vec<Vec<u32>>> {
    let all = |it: ScalingState| bits(&[it.history, vec![it.scale, it.amax]].concat());
    state.map(|state| state.map(all).to_vec())
}

/// A backward pass.
type Later = Box<dyn FnOnce(&mut Runner) -> Outcome>;

/// A layer that runs its steps.
pub(super) struct Runner {
    /// The devices that the layer moves between, and the one that it is on.
    devices: Vec<Device>,
    device: Device,
    rank: Rank,
    recipe: Fp8Recipe,
    layer: Fp8Linear,
    model: Model,
    gradients: Option<GradientsParams>,
    /// The backward pass that is to come.
    later: Option<Later>,
    /// Whether `Step::Record` saves and loads.
    records: bool,
    given: Vec<Given>,
}

impl Runner {
    /// Runs the steps on all ranks.
    pub(super) fn run(
        case: &Case,
        devices: &[Device],
        records: bool,
    ) -> Result<Vec<Given>, TestCaseError> {
        let found: Vec<_> = std::thread::scope(|scope| {
            let run = |rank| scope.spawn(move || Self::run_rank(case, devices, records, rank));
            let ranks: Vec<_> = Rank::all(case.ranks).into_iter().map(run).collect();
            ranks.into_iter().map(|rank| rank.join()).collect()
        });
        // What a rank says is the cause of the panics of others, which wait for it.
        let mut all = vec![];
        let (said, panicked): (Vec<_>, Vec<_>) = found.into_iter().partition(Result::is_ok);
        for said in said {
            all.extend(said.unwrap()?);
        }
        panicked.into_iter().for_each(|rank| drop(rank.unwrap()));
        Ok(all)
    }

    fn run_rank(
        case: &Case,
        devices: &[Device],
        records: bool,
        rank: Rank,
    ) -> Result<Vec<Given>, TestCaseError> {
        struct Leave(Rank);
        impl Drop for Leave {
            fn drop(&mut self) {
                self.0.leave();
            }
        }
        let _leave = Leave(rank.clone());
        let devices: Vec<Device> = devices.iter().map(|it| it.clone().autodiff()).collect();
        let mut runner = Self {
            layer: start(case, case.recipe, &devices[0]),
            model: Model::new(&case.recipe, rank.models()),
            device: devices[0].clone(),
            devices,
            rank,
            recipe: case.recipe,
            gradients: None,
            later: None,
            records,
            given: vec![],
        };
        runner.share();
        case.steps
            .iter()
            .try_for_each(|step| runner.step(case, step))?;
        runner.go_back()?;
        runner.look()?;
        Ok(runner.given)
    }

    /// Gives the layer its reducer.
    fn share(&mut self) {
        if let Some(group) = self.rank.layers() {
            self.layer = self.layer.clone().with_amax_reducer(group);
        }
    }

    /// Runs the backward pass that is to come.
    fn go_back(&mut self) -> Outcome {
        match self.later.take() {
            Some(backward) => backward(self),
            None => Ok(()),
        }
    }

    fn step(&mut self, case: &Case, step: &Step) -> Outcome {
        let Step::Pass(pass) = step else {
            self.go_back()?;
            return self.between(case, step);
        };
        let later = self.later.take();
        match pass.batch.len() {
            0 => self.pass::<1>(case, pass),
            1 => self.pass::<2>(case, pass),
            2 => self.pass::<3>(case, pass),
            _ => self.pass::<4>(case, pass),
        }?;
        later.map_or(Ok(()), |backward| backward(self))
    }

    fn between(&mut self, case: &Case, step: &Step) -> Outcome {
        match step {
            Step::Pass(_) => Ok(()),
            Step::Look => self.look(),
            Step::Record => {
                self.layer = match self.records {
                    true => self.loaded(case),
                    false => self.layer.clone(),
                };
                self.layer = self.layer.clone().with_recipe(self.recipe).unwrap();
                self.share();
                self.model.forget();
                self.model.follow(&self.recipe);
                Ok(())
            }
            Step::Optimize => {
                if let Some(gradients) = self.gradients.take() {
                    let layer = self.layer.clone();
                    self.layer = SgdConfig::new().init().step(0.01, layer, gradients);
                    self.model.forget();
                }
                Ok(())
            }
            Step::Clone => {
                let clone = self.layer.clone();
                let x = Tensor::<2>::full([2, case.sizes[0]], 1e3, &self.device).require_grad();
                let layer = core::mem::replace(&mut self.layer, clone);
                for _ in 0..2 {
                    layer.forward(x.clone()).sum().backward();
                }
                self.model.forget();
                Ok(())
            }
            Step::Convert => {
                let linear = Linear::from(self.layer.clone());
                self.layer = Fp8Linear::from_linear(linear, self.recipe).unwrap();
                self.share();
                self.model = Model::new(&self.recipe, self.rank.models());
                Ok(())
            }
            Step::Move => {
                self.devices.rotate_left(1);
                self.device = self.devices[0].clone();
                self.layer = self.layer.clone().fork(&self.device);
                self.gradients = None;
                self.model.forget();
                Ok(())
            }
            Step::Recipe(recipe) => {
                self.layer = self.layer.clone().with_recipe(*recipe).unwrap();
                self.recipe = *recipe;
                self.model.forget();
                self.model.follow(recipe);
                Ok(())
            }
            Step::Share => {
                let layer = self.layer.clone();
                let layers = self.rank.layers();
                let reducer: &dyn AmaxReducer = match &layers {
                    Some(group) => group.as_ref(),
                    None => &Doubled,
                };
                self.layer = share_amaxes(layer, reducer).unwrap();
                let models = self.rank.models();
                self.model.share(|own| match models {
                    Some(group) => group.max(own).expect("a rank has left"),
                    None => own.into_iter().map(|amax| amax * 2.0).collect(),
                });
                Ok(())
            }
        }
    }

    /// The layer as its record gives it.
    fn loaded(&self, case: &Case) -> Fp8Linear {
        let record = self.layer.clone().into_record();
        let recipe = self.model.recorded().map_or(self.recipe, Fp8Recipe::from);
        start(case, recipe, &self.device).load_record(record)
    }

    fn look(&mut self) -> Outcome {
        let state = state_bits(self.layer.scaling_state());
        prop_assert_eq!(&state, &state_bits(self.model.state()));
        self.given.push(Given {
            state,
            ..Given::default()
        });
        Ok(())
    }

    fn pass<const D: usize>(&mut self, case: &Case, pass: &Pass) -> Outcome {
        let [d_input, d_output] = case.sizes;
        // Another rank has other rows, and perhaps none.
        let mut batch = pass.batch.clone();
        if let Some(first) = batch.first_mut() {
            *first = (*first + 2 * self.rank.number) % 7;
        }
        let recipe = pass.recipe.unwrap_or(self.recipe);
        let rows: usize = batch.iter().product();
        let drawn = |width, seed: u64| Drawn {
            shape: [batch.clone(), vec![width]].concat(),
            view: pass.view,
            numbers: pass.numbers,
            seed: seed ^ (self.rank.number as u64) << 60,
        };
        let trains = pass.mode != Mode::Evaluate;
        let tensor = |width, seed| -> Tensor<D> {
            let x = drawn(width, seed).tensor(pass.dtype, &self.device.clone().inner());
            match trains {
                true => Tensor::from_inner(x),
                false => x,
            }
        };
        let x = match pass.tracked && trains {
            true => tensor(d_input, pass.seed).require_grad(),
            false => tensor(d_input, pass.seed),
        };
        let host = |tensor: &Tensor<D>, width| Floats {
            shape: [rows, width],
            values: values(tensor.clone()),
        };
        let weight = Floats {
            shape: case.sizes,
            values: values(self.layer.weight.val()),
        };
        let bias = self.layer.bias.as_ref().map(|bias| values(bias.val()));
        let bias: Option<Vec<f64>> = bias.map(|it| it.into_iter().map(f64::from).collect());
        let input = host(&x, d_input);
        let (sums, kept) = self
            .model
            .forward(&recipe, pass.mode, &input, &weight, bias.as_deref());

        let layer = &self.layer;
        let run = || match pass.mode {
            Mode::Train(microbatch) => Fp8Scope::current()
                .with_microbatch(microbatch)
                .run(|| layer.forward(x.clone())),
            Mode::Evaluate => {
                let layer = layer.valid();
                let output = layer.forward(x.clone());
                assert_eq!(
                    bits(&values(layer.forward(x.clone()))),
                    bits(&values(output.clone()))
                );
                assert_eq!(
                    state_bits(layer.scaling_state()),
                    state_bits(self.model.state())
                );
                output
            }
            Mode::Off => fp8_autocast(false, pass.recipe, || layer.forward(x.clone())),
            Mode::Calibrate => calibrate(|| layer.forward(x.clone())),
        };
        let (enabled, around) = pass.around;
        // Calibration is for what runs in high precision.
        let around = Fp8Scope::current()
            .with_enabled(enabled)
            .with_calibration(!enabled && pass.mode != Mode::Off)
            .with_recipe(around);
        let output = around.unwrap().run(|| fp8_autocast(true, pass.recipe, run));
        prop_assert_eq!(output.dtype(), x.dtype());
        prop_assert_eq!(output.dims()[D - 1], d_output);
        let found = values(output.clone());
        reference::all_near(&found, &sums, 1e-5, pass.dtype)
            .map_err(|error| TestCaseError::fail(format!("output of {pass:?}: {error}")))?;
        self.given.push(Given {
            output: bits(&found),
            ..Given::default()
        });
        if !trains || !output.is_tracked() || pass.backward == Backward::Never {
            return Ok(());
        }
        let g = tensor(d_output, pass.seed ^ 1);
        let gradient = host(&g, d_output);
        let parameters = (
            self.layer.weight.val(),
            self.layer.bias.as_ref().map(Param::val),
        );
        let frozen = case.frozen;
        let comes_later = pass.backward == Backward::Later;
        let pass = pass.clone();
        let backward = move |runner: &mut Self| {
            let reaches = pass.tracked || !frozen;
            let expected = runner.model.backward(&kept, &weight, &gradient, reaches);
            // The scope of backward does not matter.
            let (enabled, around) = pass.around;
            let gradients = fp8_autocast(enabled, around, || (output * g).sum().backward());
            let (weight, bias) = parameters;
            let found = [
                x.grad(&gradients).map(values),
                weight.grad(&gradients).map(values),
                bias.as_ref()
                    .and_then(|bias| bias.grad(&gradients))
                    .map(values),
            ];
            prop_assert_eq!(found[0].is_some(), pass.tracked);
            prop_assert_eq!(found[1].is_some(), !frozen);
            // A bias without elements has no part in an output without elements.
            prop_assert_eq!(
                found[2].is_some(),
                bias.is_some() && (d_output > 0 || rows * d_input > 0)
            );
            let dtypes = [pass.dtype, FloatDType::F32, FloatDType::F32];
            let names = ["input", "weight", "bias"];
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let Some(found) = found else { continue };
                reference::all_near(found, expected, 1e-5, dtypes[index]).map_err(|error| {
                    let name = names[index];
                    TestCaseError::fail(format!("gradient of {name} of {pass:?}: {error}"))
                })?;
            }
            runner.given.push(Given {
                gradients: found.map(|found| found.map(|found| bits(&found))),
                ..Given::default()
            });
            runner.gradients = Some(GradientsParams::from_grads(gradients, &runner.layer));
            Ok(())
        };
        if comes_later {
            self.later = Some(Box::new(backward));
            return Ok(());
        }
        backward(self)
    }
}
