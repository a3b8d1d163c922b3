//! The ids of tensors on layered devices.

use burn::tensor::Tensor;
use burn_dispatch::{BackendTensor, DispatchKindConversion, DispatchTensor, backends::Remote};
use burn_fusion::{FusionRuntime, FusionTensor};
use burn_router::{RouterClient, RouterTensor};

/// The id of a tensor on a layered device. Tensors that were created later have higher ids, such as the result
/// of an all-reduce that backward submitted later.
pub(super) fn number<const D: usize>(tensor: Tensor<D>) -> Option<u64> {
    let tensor = tensor.without_autodiff().into_dispatch();
    match <DispatchTensor as DispatchKindConversion<Remote>>::try_into_backend(tensor).ok()? {
        BackendTensor::Float(tensor) => Some(tensor.number()),
        _ => None,
    }
}

/// The tensor type of Burn's client of a served device. With Burn's feature `fusion`, it is a different one.
trait Numbered {
    fn number(&self) -> u64;
}

impl<C: RouterClient> Numbered for RouterTensor<C> {
    fn number(&self) -> u64 {
        self.id().value()
    }
}

impl<R: FusionRuntime> Numbered for FusionTensor<R> {
    fn number(&self) -> u64 {
        self.id.value()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use burn_layer::Layers;

    use super::*;

    #[test]
    fn later_tensors_have_higher_numbers() {
        assert_eq!(number(Tensor::<1>::zeros([2], &Device::flex())), None);
        let device = Layers::on(Device::flex()).serve().unwrap().autodiff();
        let first = Tensor::<1>::zeros([2], &device);
        let second = first.clone().exp();
        let numbers = [first.clone(), second, first].map(|it| number(it).unwrap());
        assert!(numbers[0] < numbers[1], "{numbers:?}");
        assert_eq!(numbers[0], numbers[2]);
    }
}
