//! Training steps.

use burn::{
    module::Module,
    nn::loss::CrossEntropyLossConfig,
    optim::{GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{Device, FloatDType, Int, Tensor},
};

use crate::{Precision, cast_all, cast_products, is_unchecked};

/// Training steps with SGD.
///
/// When a kernel does not compile or memory runs out, a device may report nothing at first, and skip all work that
/// depends on it. Such steps are very fast. The failure is reported when the loss is [read](Self::check).
pub struct Training {
    step: Box<dyn FnMut() -> Tensor<1>>,
    loss: Option<Tensor<1>>,
    read: Option<f32>,
}

/// Why steps do not train.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NoTraining {
    /// The device could not compute the loss.
    #[error("the loss could not be computed: {0}")]
    Failed(String),
    /// The loss is infinite or NaN.
    #[error("the loss is {0}")]
    NotFinite(f32),
    /// The loss is the same as when it was last read.
    #[error("the loss stays {0}: nothing is learned")]
    Still(f32),
    /// There was no step since the loss was last read.
    #[error("there was no step")]
    NoStep,
}

impl Training {
    /// A training whose steps wait until everything is computed, and return their loss.
    pub fn new(step: impl FnMut() -> Tensor<1> + 'static) -> Self {
        Self {
            step: Box::new(step),
            loss: None,
            read: None,
        }
    }

    /// Runs a step. Returns when everything is computed.
    pub fn step(&mut self) {
        self.loss = Some((self.step)());
    }

    /// Reads the loss of the last step.
    ///
    /// # Errors
    /// [`NoTraining`] if there was no step, or if the loss could not be computed, is not finite, or has not changed.
    pub fn check(&mut self) -> Result<f32, NoTraining> {
        let loss = self.loss.take().ok_or(NoTraining::NoStep)?;
        let loss: f32 = loss
            .cast(FloatDType::F32)
            .try_into_scalar()
            .map_err(|error| NoTraining::Failed(error.to_string()))?;
        if is_unchecked() {
            return Ok(loss);
        }
        if !loss.is_finite() {
            return Err(NoTraining::NotFinite(loss));
        }
        if self.read.replace(loss) == Some(loss) {
            return Err(NoTraining::Still(loss));
        }
        Ok(loss)
    }
}

/// Training steps with SGD. `forward` computes logits `[labels, classes]`, and makes the casts of activations that the program
/// itself has to make in this precision. The casts of parameters are already made.
///
/// ```
/// use benches::{Precision, training_of};
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
///
/// let device = Precision::Bf16.device(Device::flex()).autodiff();
/// let model = LinearConfig::new(4, 3).init(&device);
/// let (x, labels) = (Tensor::<2>::ones([2, 4], &device), Tensor::from_ints([0, 2], &device));
/// let mut training = training_of(Precision::Bf16, model, labels, move |model, _| {
///     model.forward(x.clone())
/// });
/// training.step();
/// assert!(training.check().is_ok());
/// ```
pub fn training_of<M: Module + 'static>(
    precision: Precision,
    model: M,
    labels: Tensor<1, Int>,
    forward: impl Fn(&M, Precision) -> Tensor<2> + 'static,
) -> Training {
    let device: Device = labels.device();
    let criterion = CrossEntropyLossConfig::new().init(&device);
    let mut state: Option<(M, ModuleOptimizer)> = Some((model, SgdConfig::new().init()));
    Training::new(move || {
        let (model, mut optimizer) = state.take().expect("it is put back below");
        let logits = match precision {
            precision if precision.is_by_hand() => {
                forward(&cast_products(model.clone(), FloatDType::BF16), precision)
            }
            Precision::AllBf16 => forward(&cast_all(model.clone(), FloatDType::BF16), precision),
            _ => forward(&model, precision),
        };
        let loss = criterion.forward(logits.cast(FloatDType::F32), labels.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let model = optimizer.step(1e-3, model, gradients);
        device.sync().expect("the device computes");
        state = Some((model, optimizer));
        loss.detach()
    })
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, env, process::Command, rc::Rc};

    use burn::nn::LinearConfig;

    use super::*;
    use crate::BENCH_UNCHECKED;

    /// With autocast, the program is the same as in f32. Only the precisions with casts by hand cast in the program.
    #[test]
    fn the_program_casts_by_hand_alone() {
        for precision in Precision::ALL {
            let device = precision.device(Device::flex()).autodiff();
            let model = LinearConfig::new(32, 16).init(&device);
            let x = Tensor::<2>::ones([16, 32], &device);
            let labels = Tensor::arange(0..16, &device);
            let seen = Rc::new(RefCell::new(Vec::new()));
            let notes = seen.clone();
            let by_hand = precision.is_by_hand() || precision == Precision::AllBf16;
            let expected = match by_hand {
                true => FloatDType::BF16,
                false => FloatDType::F32,
            };
            let mut training = training_of(precision, model, labels, move |model, _| {
                let weight = model.weight.val();
                let values = weight.clone().cast(FloatDType::F32).into_data();
                notes.borrow_mut().push((weight.dtype(), values));
                model.forward(x.clone().cast(expected))
            });
            training.step();
            training.check().unwrap();
            training.step();
            let seen = seen.borrow();
            assert_eq!(seen[0].0, expected.into(), "{precision}");
            assert_ne!(seen[0].1, seen[1].1, "{precision}: nothing was learned");
        }
    }

    #[test]
    fn what_is_no_training_is_told() {
        let losses = |losses: &'static [f32]| {
            let mut losses = losses.iter();
            Training::new(move || Tensor::from_floats([*losses.next().unwrap()], &Device::flex()))
        };
        let mut training = losses(&[2.0, 2.0, 1.5]);
        assert_eq!(training.check(), Err(NoTraining::NoStep));
        training.step();
        assert_eq!(training.check(), Ok(2.0));
        assert_eq!(training.check(), Err(NoTraining::NoStep));
        training.step();
        assert_eq!(training.check(), Err(NoTraining::Still(2.0)));
        training.step();
        assert_eq!(training.check(), Ok(1.5));
        let mut training = losses(&[f32::INFINITY]);
        training.step();
        assert_eq!(training.check(), Err(NoTraining::NotFinite(f32::INFINITY)));
        let mut training = Training::new(|| Tensor::from_floats([1.0, 2.0], &Device::flex()));
        training.step();
        assert!(matches!(training.check(), Err(NoTraining::Failed(_))));
    }

    /// In a process of its own, whose environment says that nothing is computed.
    #[test]
    fn losses_that_were_not_computed_are_not_judged() {
        if !is_unchecked() {
            let name = "training::tests::losses_that_were_not_computed_are_not_judged";
            let mut own = Command::new(env::current_exe().unwrap());
            let own = own.args(["--exact", name]).env(BENCH_UNCHECKED, "");
            assert!(own.status().unwrap().success());
            return;
        }
        let mut training = Training::new(|| Tensor::from_floats([f32::INFINITY], &Device::flex()));
        for _ in 0..2 {
            training.step();
            assert_eq!(training.check(), Ok(f32::INFINITY));
        }
        assert_eq!(training.check(), Err(NoTraining::NoStep));
    }
}
