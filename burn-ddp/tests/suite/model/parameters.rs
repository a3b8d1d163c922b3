//! The parameters of random training, whose gradients are known.

use burn::{
    module::{Module, Param},
    optim::GradientsParams,
    store::ModuleRecord,
    tensor::{DType, Device, FloatDType, Tensor, TensorData},
};

use super::{training::Training, values::mix};

#[derive(Module, Debug)]
pub(crate) struct Model {
    pub(crate) parameters: Vec<Param<Tensor<2>>>,
}

impl Model {
    pub(crate) fn new(training: &Training, rank: usize, device: &Device) -> Self {
        let phase = if training.broadcast { rank } else { 0 };
        let mut parameters: Vec<Param<Tensor<2>>> = Vec::new();
        for (place, slot) in training.slots.iter().enumerate() {
            parameters.push(match slot.tied {
                Some(first) => parameters[first].clone(),
                None => {
                    let value = |index: usize| ((index + place * 7 + phase * 31) as f64).sin();
                    let values: Vec<f64> = (0..slot.shape[0] * slot.shape[1]).map(value).collect();
                    let data = TensorData::new(values, slot.shape);
                    let tensor = Tensor::from_data(data, (device, DType::from(slot.dtype)));
                    Param::from_tensor(tensor).set_require_grad(!slot.frozen)
                }
            });
        }
        Self { parameters }
    }

    /// Burn's optimizers change the first place alone of a parameter that is in several.
    pub(crate) fn tied(mut self, training: &Training) -> Self {
        for (place, slot) in training.slots.iter().enumerate() {
            if let Some(first) = slot.tied {
                self.parameters[place] = self.parameters[first].clone();
            }
        }
        self
    }

    /// The same parameters on another device, with graphs of their own.
    pub(crate) fn on(&self, training: &Training, device: &Device) -> Self {
        let mut parameters: Vec<Param<Tensor<2>>> = Vec::new();
        for (own, slot) in self.parameters.iter().zip(&training.slots) {
            parameters.push(match slot.tied {
                Some(first) => parameters[first].clone(),
                None => {
                    let data = own.val().into_data();
                    let tensor = Tensor::from_data(data, (device, DType::from(slot.dtype)));
                    Param::from_tensor(tensor).set_require_grad(!slot.frozen)
                }
            });
        }
        Self { parameters }
    }

    /// The same parameters as a checkpoint has them.
    pub(crate) fn reloaded(self, training: &Training) -> Self {
        let record = self.clone().into_record().into_bytes().unwrap();
        let record = ModuleRecord::from_bytes(record).unwrap();
        self.load_record(record).tied(training)
    }

    /// The gradients of a pass of a rank: in each use of parameter p, p / 2 and a number of the rank and pass.
    pub(crate) fn backward(&self, used: &[usize], seed: u64) -> GradientsParams {
        let term = |place: &usize| {
            let parameter = &self.parameters[*place];
            let factor = (mix(seed ^ *place as u64) % 17) as f64 / 8.0 - 1.0;
            let square = (parameter.val() * parameter.val()).mul_scalar(0.25);
            (square + parameter.val().mul_scalar(factor))
                .sum()
                .cast(FloatDType::F32)
        };
        match used.iter().map(term).reduce(|a, b| a + b) {
            Some(loss) => GradientsParams::from_grads(loss.backward(), self),
            None => GradientsParams::new(),
        }
    }

    pub(crate) fn values_of(&self, gradients: &GradientsParams) -> Vec<Option<Vec<f64>>> {
        let each = self.parameters.iter();
        each.map(|it| gradients.get::<2>(it.id).map(values))
            .collect()
    }
}

pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}
