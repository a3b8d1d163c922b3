//! Shares amaxes over the ranks of a data-parallel run. A layer has a backend's tensors, which are converted to Burn's for that.

use burn::{
    backend::{Backend, tensor::FloatTensor},
    tensor::Tensor,
};
use burn_fp8::recipe::AmaxReducer;
use std::sync::Arc;

/// Shares the amaxes of all ranks. Two are equal if they are the same object.
#[derive(Clone, Debug)]
pub(super) struct Reducer(pub(super) Arc<dyn AmaxReducer>);

impl PartialEq for Reducer {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Converts the tensors of a backend to Burn's and back.
pub(super) struct Lift<B: Backend> {
    pub(super) up: fn(FloatTensor<B>) -> Tensor<1>,
    /// `None` for a tensor of another backend.
    pub(super) down: fn(Tensor<1>) -> Option<FloatTensor<B>>,
}

impl<B: Backend> Clone for Lift<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Lift<B> {}

impl Reducer {
    /// The largest amaxes of all ranks, or what went wrong.
    pub(super) fn max<B: Backend>(
        &self,
        own: FloatTensor<B>,
        lift: Lift<B>,
    ) -> Result<FloatTensor<B>, String> {
        let asked = (lift.up)(own);
        let (device, shape) = (asked.device(), asked.shape());
        let answer = self.0.max(asked).map_err(|error| error.to_string())?;
        let is = format!("{} on {:?}", answer.shape(), answer.device());
        let fits = answer.device() == device && answer.shape() == shape;
        let primitive = (lift.down)(answer).filter(|_| fits);
        primitive.ok_or_else(|| {
            format!("the reducer's answer is {is}; expected {shape} on {device:?}, as it was asked")
        })
    }
}
