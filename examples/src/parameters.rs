//! Counts the parameters of a model, and computes a checksum to compare two models by.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// The number of parameters and the checksum of a model on an autodiff device.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
/// use examples::parameters::Parameters;
///
/// let model = LinearConfig::new(3, 2).init(&Device::flex().autodiff());
/// assert_eq!(Parameters::of(&model).count, 8);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameters {
    /// The number of trained values. Running statistics do not count.
    pub count: usize,
    /// The CRC-32 of the bits of all parameters and running statistics. It is equal for equal models, whatever the ids of their
    /// parameters.
    pub checksum: u32,
}

impl Parameters {
    /// Counts and reads all parameters of `model`.
    pub fn of<M: Module>(model: &M) -> Self {
        let mut trained = Trained(0);
        model.visit(&mut trained);
        let mut checksum = Checksum(crc32fast::Hasher::new());
        // `valid` applies the pending update of running statistics.
        model.valid().visit(&mut checksum);
        Self {
            count: trained.0,
            checksum: checksum.0.finalize(),
        }
    }
}

struct Trained(usize);

impl ModuleVisitor for Trained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.val().is_require_grad() {
            self.0 += param.shape().num_elements();
        }
    }
}

struct Checksum(crc32fast::Hasher);

impl ModuleVisitor for Checksum {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.update(param.val().into_data().as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{BatchNormConfig, LinearConfig};
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn running_statistics_are_not_counted() {
        let norm = BatchNormConfig::new(5).init(&Device::flex().autodiff());
        assert_eq!(Parameters::of(&norm).count, 10);
    }

    #[test]
    fn the_checksum_is_of_the_bits_alone() {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(3, 2).init(&device);
        let other = LinearConfig::new(3, 2).init(&device);
        assert_ne!(Parameters::of(&model), Parameters::of(&other));
        let bytes = |model: &burn::nn::Linear| {
            let weight = model.weight.val().into_data().as_bytes().to_vec();
            [
                weight,
                model
                    .bias
                    .as_ref()
                    .unwrap()
                    .val()
                    .into_data()
                    .as_bytes()
                    .to_vec(),
            ]
            .concat()
        };
        assert_eq!(
            Parameters::of(&model).checksum,
            crc32fast::hash(&bytes(&model))
        );
        // The same values with other parameter ids.
        let copy = other.load_record(model.clone().into_record());
        assert_eq!(Parameters::of(&model), Parameters::of(&copy));
    }

    #[test]
    fn a_pending_update_of_running_statistics_counts() {
        let device = Device::flex().autodiff();
        let norm = BatchNormConfig::new(1).init(&device);
        let before = Parameters::of(&norm).checksum;
        norm.forward(Tensor::<2>::from_floats([[1.0], [3.0]], &device));
        assert_ne!(Parameters::of(&norm).checksum, before);
    }
}
