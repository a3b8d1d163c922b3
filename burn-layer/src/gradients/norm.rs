//! The Euclidean norm of all gradients of a module.

use super::widen;
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{FloatDType, Tensor},
};
use burn_std::ExecutionError;
use std::collections::HashSet;

/// A sum of squares below this may lack squares that underflowed `f32`. Each of those is below
/// 1.2e-38, so 1e10 of them make no difference to a sum above it.
const SMALLEST: f64 = 1e-20;

/// The Euclidean norm of all gradients of a module together; 0 if there are none.
///
/// Squares are summed in at least `f32`, and the norm of finite gradients is finite: if squares overflow or
/// underflow `f32`, each gradient is divided by its largest absolute value first, as BLAS's `nrm2` does.
/// The host waits for a device once, and in that case also for each gradient.
///
/// # Errors
///
/// When a device cannot be read.
pub fn gradient_norm<M: Module>(
    gradients: &GradientsParams,
    module: &M,
) -> Result<f64, ExecutionError> {
    let Some(sums) = visit(module, gradients, SumsOfSquares::default())
        .sums
        .on_one_device()
    else {
        return Ok(0.0);
    };
    let sum = number(sums.sum())?;
    match sum.is_nan() || (SMALLEST..f64::INFINITY).contains(&sum) {
        true => Ok(sum.sqrt()),
        false => visit(module, gradients, ScaledNorm(Ok(0.0))).0,
    }
}

/// The same norm as a tensor of one element on the device of the first gradient, without waiting. `None` if there are no
/// gradients.
///
/// All gradients are divided by the largest absolute value in any of them before they are squared.
pub fn gradient_norm_on_device<M: Module>(
    gradients: &GradientsParams,
    module: &M,
) -> Option<Tensor<1>> {
    let largest = visit(module, gradients, Largest::default())
        .0
        .on_one_device()?;
    // The bounds keep zeros from being divided by zero, and infinities infinite.
    let scale = largest.max().clamp(f32::MIN_POSITIVE, f32::MAX);
    let scaled = SumsOfSquares {
        scale: Some(scale.clone()),
        ..SumsOfSquares::default()
    };
    let sums = visit(module, gradients, scaled).sums.on_one_device()?;
    Some(sums.sum().sqrt() * scale)
}

fn number(tensor: Tensor<1>) -> Result<f64, ExecutionError> {
    Ok(tensor.try_into_data()?.iter::<f64>().sum())
}

/// Something that is computed for each gradient.
trait OfEach {
    fn add<const D: usize>(&mut self, gradient: Tensor<D>);
}

/// Computes `of_each` for each gradient of a module that has elements; once for a parameter that occurs in several places.
fn visit<M: Module, O: OfEach>(module: &M, gradients: &GradientsParams, of_each: O) -> O {
    struct Visitor<'a, O> {
        gradients: &'a GradientsParams,
        seen: HashSet<ParamId>,
        of_each: O,
    }

    impl<O: OfEach> ModuleVisitor for Visitor<'_, O> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.seen.insert(param.id)
                && let Some(gradient) = self.gradients.get::<D>(param.id)
                && gradient.shape().num_elements() > 0
            {
                self.of_each.add(widen(gradient));
            }
        }
    }

    let mut visitor = Visitor {
        gradients,
        seen: HashSet::new(),
        of_each,
    };
    module.visit(&mut visitor);
    visitor.of_each
}

/// One number for each gradient, in `f32`, on the gradient's device.
#[derive(Default)]
struct Numbers(Vec<Tensor<1>>);

impl Numbers {
    fn push(&mut self, number: Tensor<1>) {
        self.0.push(number.cast(FloatDType::F32));
    }

    /// All numbers in one tensor, on the device of the first.
    fn on_one_device(self) -> Option<Tensor<1>> {
        let device = self.0.first()?.device();
        let there = self.0.into_iter().map(|number| number.to_device(&device));
        Some(Tensor::cat(there.collect(), 0))
    }
}

/// The largest absolute value in each gradient.
#[derive(Default)]
struct Largest(Numbers);

impl OfEach for Largest {
    fn add<const D: usize>(&mut self, gradient: Tensor<D>) {
        self.0.push(gradient.max_abs());
    }
}

/// The sum of the squares of each gradient, which is first divided by `scale`, a tensor of one element, if there is one.
#[derive(Default)]
struct SumsOfSquares {
    scale: Option<Tensor<1>>,
    sums: Numbers,
}

impl OfEach for SumsOfSquares {
    fn add<const D: usize>(&mut self, gradient: Tensor<D>) {
        let scaled = match &self.scale {
            None => gradient,
            Some(scale) => {
                let scale = scale.clone().to_device(&gradient.device());
                let dtype = gradient.dtype();
                gradient / scale.cast(dtype).reshape([1; D])
            }
        };
        self.sums.push(scaled.square().sum());
    }
}

/// The norm of all gradients so far. Each is divided by its largest absolute value before it is squared.
struct ScaledNorm(Result<f64, ExecutionError>);

impl OfEach for ScaledNorm {
    fn add<const D: usize>(&mut self, gradient: Tensor<D>) {
        let norm = |gradient: Tensor<D>| {
            let largest = number(gradient.clone().max_abs())?;
            if largest == 0.0 || !largest.is_finite() {
                return Ok(largest);
            }
            let squares = gradient.div_scalar(largest).square();
            Ok(largest * number(squares.sum())?.sqrt())
        };
        if let Ok(before) = self.0 {
            self.0 = norm(gradient).map(|norm| before.hypot(norm));
        }
    }
}
