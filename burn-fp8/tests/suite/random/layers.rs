//! Random steps of an [`Fp8Linear`] beside those of its model.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_fp8::{Fp8Linear, Fp8Scope, ScalingState, calibrate, fp8_autocast};
use proptest::prelude::*;

use super::model::{Floats, Mode, Model};
use super::reference;
use super::steps::{Backward, Case, Pass, Step, cases};
use super::tensors::Drawn;
use super::{Outcome, check};
use crate::suite::device::{Random, values};

fn start(case: &Case, device: &Device) -> Fp8Linear {
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
    Fp8Linear::from_linear(linear, case.recipe).unwrap()
}

/// What a pass gave: the output, and the gradients of input, weight and bias.
#[derive(Debug, Default, PartialEq)]
struct Given {
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
struct Runner {
    device: Device,
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
    fn run(case: &Case, device: &Device, records: bool) -> Result<Vec<Given>, TestCaseError> {
        let device = device.clone().autodiff();
        let mut runner = Self {
            layer: start(case, &device),
            model: Model::new(case.recipe),
            device,
            gradients: None,
            later: None,
            records,
            given: vec![],
        };
        case.steps
            .iter()
            .try_for_each(|step| runner.step(case, step))?;
        runner.go_back()?;
        runner.look()?;
        Ok(runner.given)
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
                    true => {
                        let record = self.layer.clone().into_record();
                        start(case, &self.device).load_record(record)
                    }
                    false => self.layer.clone(),
                };
                self.model.forget();
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
        }
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
        let rows: usize = pass.batch.iter().product();
        let drawn = |width, seed| Drawn {
            shape: [pass.batch.clone(), vec![width]].concat(),
            view: pass.view,
            numbers: pass.numbers,
            seed,
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
            .forward(pass.mode, &input, &weight, bias.as_deref());

        let layer = &self.layer;
        let output = match pass.mode {
            Mode::Train(microbatch) => Fp8Scope::current()
                .with_microbatch(microbatch)
                .run(|| layer.forward(x.clone())),
            Mode::Evaluate => layer.valid().forward(x.clone()),
            Mode::Off => fp8_autocast(false, None, || layer.forward(x.clone())),
            Mode::Calibrate => calibrate(|| layer.forward(x.clone())),
        };
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
            let gradients = (output * g).sum().backward();
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

#[test]
fn layers_follow_their_model() {
    check(100, cases(), |case| {
        let device = Device::flex();
        let kept = Runner::run(case, &device, false)?;
        // A record in between changes nothing.
        prop_assert_eq!(kept, Runner::run(case, &device, true)?);
        Ok(())
    });
}

#[cfg(feature = "cpu")]
#[test]
fn layers_on_kernels_follow_their_model() {
    check(1, cases(), |case| {
        Runner::run(case, &Device::cpu(), true).map(drop)
    });
}

#[cfg(feature = "remote")]
#[test]
fn layers_over_a_wire_follow_their_model() {
    let servers = [false, true].map(super::serve);
    check(10, (cases(), 0..2usize), |(case, server)| {
        Runner::run(case, &servers[*server].1, true).map(drop)
    });
}
