//! The ranks of a data-parallel run, as a layer sees them from under Burn's tensors.

use burn::{
    backend::{Backend, tensor::FloatTensor},
    tensor::Tensor,
};
use burn_fp8::recipe::AmaxReducer;
use std::sync::Arc;

/// What shares the amaxes of all ranks. Two are equal if they are the same.
#[derive(Clone, Debug)]
pub(super) struct Reducer(pub(super) Arc<dyn AmaxReducer>);

impl PartialEq for Reducer {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Between the tensors of a backend and Burn's.
#[derive(Clone, Copy)]
pub(super) struct Lift<B: Backend> {
    pub(super) up: fn(FloatTensor<B>) -> Tensor<1>,
    pub(super) down: fn(Tensor<1>) -> FloatTensor<B>,
}
