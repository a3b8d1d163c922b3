//! The ids of tensors on layered devices.

use burn::tensor::Tensor;
use burn_dispatch::{BackendTensor, DispatchTensorKind};
use burn_fusion::{FusionRuntime, FusionTensor};
use burn_router::{RouterClient, RouterTensor};

/// The id of a tensor on a layered device. Tensors that were created later have higher ids, such as the result
/// of an all-reduce that backward submitted later.
///
/// The tensor is given back: with Burn's feature `fusion`, a clone on another thread than its creator's has a new id.
pub(super) fn number<const D: usize>(tensor: Tensor<D>) -> (Option<u64>, Tensor<D>) {
    let tensor = tensor.into_dispatch();
    let number = match &tensor.kind {
        DispatchTensorKind::Remote(BackendTensor::Float(tensor)) => Some(tensor.number()),
        _ => None,
    };
    (number, Tensor::from_dispatch(tensor))
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
    use std::thread;

    use burn::tensor::Device;
    use burn_layer::Layers;

    use super::*;

    #[test]
    fn later_tensors_have_higher_numbers() {
        let device = Device::flex();
        assert_eq!(number(Tensor::<1>::zeros([2], &device)).0, None);
        let device = Layers::on(device).serve().unwrap();
        // Created on one thread and looked at on another, as averages are.
        let create = || Tensor::<1>::zeros([2], &device);
        let created = thread::scope(|scope| scope.spawn(|| [create(), create()]).join().unwrap());
        let [first, second] = created;
        let (later, second) = number(second);
        let (earlier, _first) = number(first);
        assert!(earlier.unwrap() < later.unwrap());
        assert_eq!(number(second).0, later);
    }
}
