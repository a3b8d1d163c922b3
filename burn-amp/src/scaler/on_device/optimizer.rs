//! [`DeviceOptimizer`]: optimizers that the device can tell to skip a step.

use burn::{
    grad_clipping::GradientClipping,
    lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    module::{Module, ParamGroup},
    optim::{GradientsParams, ModuleOptimizer, Optimizer, OptimizerRecord},
};

/// An optimizer that skips its step if all elements of the gradient are NaN: the parameter and the
/// state, including step counters, keep their values, without the host knowing.
///
/// Implement it for your own optimizers that do so. Everything that a skipped step must
/// not change has to be a tensor in the state, because a number on the host cannot follow the device.
///
/// ```
/// use burn::{optim::{LearningRate, Optimizer}, tensor::{Device, Tensor}};
/// use burn_amp::{DeviceOptimizer, SkipsNan};
///
/// /// Steps by the sign of the gradient.
/// #[derive(Clone)]
/// struct Signs;
///
/// impl Optimizer for Signs {
///     type State<const D: usize> = ();
///
///     fn step<const D: usize>(
///         &self,
///         lr: LearningRate,
///         tensor: Tensor<D>,
///         grad: Tensor<D>,
///         _state: Option<()>,
///     ) -> (Tensor<D>, Option<()>) {
///         let skip = grad.clone().is_nan();
///         let moved = tensor.clone() - grad.sign().mul_scalar(lr);
///         (moved.mask_where(skip, tensor), None)
///     }
///
///     fn to_device<const D: usize>(_state: (), _device: &Device) {}
/// }
///
/// impl SkipsNan for Signs {}
///
/// let optim = DeviceOptimizer::from(Signs);
/// # let _ = optim;
/// ```
pub trait SkipsNan: Optimizer {}

/// A [`ModuleOptimizer`] that consists only of optimizers that [skip NaN](SkipsNan), for
/// [`DeviceLossScaler`](super::DeviceLossScaler).
///
/// ```
/// use burn::{grad_clipping::GradientClipping, module::ParamGroup};
/// use burn_amp::{DeviceAdamConfig, DeviceOptimizer, DeviceSgdConfig};
///
/// let optim = DeviceOptimizer::from(DeviceAdamConfig::new().build())
///     .with_grad_clipping(GradientClipping::Norm(1.0))
///     .with_group(ParamGroup::from_predicate("head"), DeviceSgdConfig::new().build(), None);
/// assert!(optim.as_ref().has_gradient_clipping());
/// ```
///
/// Burn's own optimizers do not skip NaN, and the compiler refuses them:
///
/// ```compile_fail,E0277
/// use burn::optim::AdamConfig;
/// use burn_amp::DeviceOptimizer;
///
/// let optim = DeviceOptimizer::from(AdamConfig::new().build());
/// ```
#[derive(Clone)]
pub struct DeviceOptimizer(ModuleOptimizer);

impl<O: SkipsNan> From<O> for DeviceOptimizer {
    fn from(optimizer: O) -> Self {
        Self(optimizer.into())
    }
}

impl AsRef<ModuleOptimizer> for DeviceOptimizer {
    fn as_ref(&self) -> &ModuleOptimizer {
        &self.0
    }
}

impl DeviceOptimizer {
    /// Like [`ModuleOptimizer::with_grad_clipping`]. Clips the unscaled gradients.
    pub fn with_grad_clipping(self, clipping: GradientClipping) -> Self {
        Self(self.0.with_grad_clipping(clipping))
    }

    /// Like [`ModuleOptimizer::with_group`].
    pub fn with_group<O: SkipsNan>(
        self,
        group: ParamGroup,
        optimizer: O,
        clipping: Option<GradientClipping>,
    ) -> Self {
        Self(self.0.with_group(group, optimizer, clipping))
    }

    /// Like [`ModuleOptimizer::load_record`]. To save a record, use the [`ModuleOptimizer`] that [`as_ref`](AsRef::as_ref)
    /// returns.
    pub fn load_record(self, record: OptimizerRecord) -> Self {
        Self(self.0.load_record(record))
    }

    pub(super) fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        module: M,
        grads: GradientsParams,
    ) -> M {
        self.0.step(lr, module, grads)
    }
}
