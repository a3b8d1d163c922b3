//! Gradients clipped by the norm of all of them together, as PyTorch's `clip_grad_norm_` does.

use super::gradients::{Factor, scale};
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, FloatDType, Tensor},
};

/// PyTorch adds as much to the norm.
const EPSILON: f64 = 1e-6;

/// The gradients clipped, and the norm that they had. The host waits once.
pub(super) fn on_host<M: Module>(
    grads: GradientsParams,
    module: &M,
    max_norm: f64,
) -> (GradientsParams, f64) {
    check(max_norm);
    let Some(norm) = norm(&grads, module) else {
        return (grads, 0.0);
    };
    let norm = f64::from(norm.into_scalar::<f32>());
    let factor = max_norm / (norm + EPSILON);
    let grads = match factor < 1.0 {
        true => scale(grads, module, Factor::host(factor as f32)),
        false => grads,
    };
    (grads, norm)
}

/// The same without waiting.
pub(super) fn on_device<M: Module>(
    grads: GradientsParams,
    module: &M,
    max_norm: f64,
) -> (GradientsParams, Option<Tensor<1>>) {
    check(max_norm);
    let Some(norm) = norm(&grads, module) else {
        return (grads, None);
    };
    let factor = norm.clone().add_scalar(EPSILON).recip();
    let factor = factor.mul_scalar(max_norm).clamp_max(1.0);
    (scale(grads, module, Factor::device(factor)), Some(norm))
}

fn check(max_norm: f64) {
    assert!(
        max_norm > 0.0,
        "the largest norm, {max_norm}, must be positive"
    );
}

/// The Euclidean norm of all gradients of a module, one element on the device of the first.
fn norm<M: Module>(grads: &GradientsParams, module: &M) -> Option<Tensor<1>> {
    let mut squares = Squares {
        grads,
        sums: Vec::new(),
    };
    module.visit(&mut squares);
    let device = squares.sums.first()?.device();
    let there = squares.sums.into_iter().map(|sum| sum.to_device(&device));
    Some(Tensor::cat(there.collect(), 0).sum().sqrt())
}

/// Sums the squares of each gradient, in f32 at least.
struct Squares<'a> {
    grads: &'a GradientsParams,
    sums: Vec<Tensor<1>>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            let grad = match grad.dtype() {
                DType::F64 => grad,
                _ => grad.cast(FloatDType::F32),
            };
            self.sums.push(grad.square().sum().cast(FloatDType::F32));
        }
    }
}
