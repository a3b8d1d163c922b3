//! Gradients clipped by the norm of all of them together.

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{FloatDType, Tensor},
};

use crate::{DdpError, widen::widen};

/// PyTorch adds as much to the norm.
const EPSILON: f64 = 1e-6;

/// Scales gradients down so that the Euclidean norm of all of them together is at most `max_norm`
/// (Pascanu et al. 2013), and returns the norm that they had: PyTorch's `clip_grad_norm_`. (Burn's own
/// clipping takes the norm of each gradient by itself.)
///
/// To be called after [`Ddp::reduce_gradients`](crate::Ddp::reduce_gradients): all ranks then have the same
/// gradients, so that each finds the same norm without communication. Clipping before would clip what
/// is not the gradient of the whole batch. It waits for the device once, and for each gradient where the
/// sum of the squares overflows `f32`: finite gradients have a finite norm.
///
/// ```
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Tensor}};
/// use burn_ddp::clip_gradient_norm;
///
/// # fn main() -> Result<(), burn_ddp::DdpError> {
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(4, 1).with_bias(false).init(&device);
/// let loss = model.forward(Tensor::<2>::ones([1, 4], &device)).sum(); // four gradients of 1
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let (gradients, norm) = clip_gradient_norm(gradients, &model, 1.0)?;
/// assert_eq!(norm, 2.0);
/// # let _ = gradients;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`DdpError::Device`] when the norm cannot be read. A norm that is no finite number is no error, and
/// leaves gradients that are none either: look at it, or use a loss scaler, which skips such steps.
///
/// # Panics
///
/// Panics if `max_norm` is not positive.
pub fn clip_gradient_norm<M: Module>(
    gradients: GradientsParams,
    model: &M,
    max_norm: f64,
) -> Result<(GradientsParams, f64), DdpError> {
    assert!(
        max_norm > 0.0,
        "the largest norm, {max_norm}, must be positive"
    );
    let mut squares = Squares {
        gradients: &gradients,
        sums: Vec::new(),
    };
    model.visit(&mut squares);
    if squares.sums.is_empty() {
        return Ok((gradients, 0.0));
    }
    let norm = match number(Tensor::cat(squares.sums, 0).sum())?.sqrt() {
        f64::INFINITY => scaled_norm(&gradients, model)?,
        norm => norm,
    };
    let factor = max_norm / (norm + EPSILON);
    if factor >= 1.0 {
        return Ok((gradients, norm));
    }
    Ok((scale_gradients(gradients, model, factor), norm))
}

/// The gradients multiplied by a factor.
pub(crate) fn scale_gradients<M: Module>(
    gradients: GradientsParams,
    model: &M,
    factor: f64,
) -> GradientsParams {
    let mut scale = Scale { gradients, factor };
    model.visit(&mut scale);
    scale.gradients
}

fn number(tensor: Tensor<1>) -> Result<f64, DdpError> {
    Ok(tensor.try_into_data()?.iter::<f64>().sum())
}

/// Sums the squares of each gradient, in `f32` at least.
struct Squares<'a> {
    gradients: &'a GradientsParams,
    sums: Vec<Tensor<1>>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            let squares = widen(gradient).square();
            self.sums.push(squares.sum().cast(FloatDType::F32));
        }
    }
}

/// The norm where squares overflow: each gradient is divided by its largest number before, as BLAS's
/// `nrm2` does.
fn scaled_norm<M: Module>(gradients: &GradientsParams, model: &M) -> Result<f64, DdpError> {
    struct Norm<'a> {
        gradients: &'a GradientsParams,
        norm: Result<f64, DdpError>,
    }

    impl Norm<'_> {
        fn of<const D: usize>(gradient: Tensor<D>) -> Result<f64, DdpError> {
            let gradient = widen(gradient);
            let largest = number(gradient.clone().abs().max())?;
            if largest == 0.0 || !largest.is_finite() {
                return Ok(largest);
            }
            let squares = gradient.div_scalar(largest).square();
            Ok(largest * number(squares.sum())?.sqrt())
        }
    }

    impl ModuleVisitor for Norm<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let (Ok(norm), Some(gradient)) = (&mut self.norm, self.gradients.get::<D>(param.id))
            {
                let before = *norm;
                self.norm = Self::of(gradient).map(|norm| before.hypot(norm));
            }
        }
    }

    let mut norm = Norm {
        gradients,
        norm: Ok(0.0),
    };
    model.visit(&mut norm);
    norm.norm
}

struct Scale {
    gradients: GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            // In 16 bits, a small factor would be rounded, or be 0.
            let dtype = gradient.dtype();
            let gradient = widen(gradient).mul_scalar(self.factor).cast(dtype);
            self.gradients.register(param.id, gradient);
        }
    }
}
