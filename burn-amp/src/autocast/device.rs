//! [`Autocast`]: a device that runs each op in the dtype that suits it.

use super::{AutocastReport, Policy, report::Counters};
use burn::tensor::{DType, Device};
use burn_layer::{Cast, Inputs, Layer, LayerError, Layers, Op, Plan};
use std::sync::Arc;

/// Mixed precision for an unmodified Burn program: a device on which each op runs in the dtype that
/// suits it.
///
/// The program sees f32 everywhere: tensors, parameters, gradients, optimizer state and records are
/// as without autocast. Underneath, matrix products and convolutions run in bf16 or fp16, and what
/// needs the precision runs in f32, by the rules of the [`Policy`].
///
/// ```
/// use burn::{nn::LinearConfig, tensor::{DType, Device, Distribution, Tensor}};
/// use burn_amp::Autocast;
///
/// let device = Autocast::bf16().device(Device::flex())?.autodiff();
/// let linear = LinearConfig::new(8, 4).init(&device); // unmodified Burn code
/// let x = Tensor::<2>::random([2, 8], Distribution::Default, &device);
/// let loss = linear.forward(x).powi_scalar(2).mean();
/// assert_eq!(loss.dtype(), DType::F32);
/// let grads = loss.backward();
/// assert_eq!(linear.weight.grad(&grads).unwrap().dtype(), DType::F32);
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "autocast does nothing until a device is made of it"]
pub struct Autocast {
    policy: Policy,
}

impl Autocast {
    /// Autocast with a policy of your own.
    pub fn new(policy: Policy) -> Self {
        Self { policy }
    }

    /// Autocast to bf16: [`Policy::bf16`].
    pub fn bf16() -> Self {
        Self::new(Policy::bf16())
    }

    /// Autocast to fp16: [`Policy::fp16`]. Small gradients underflow in fp16: scale the loss with a
    /// [`LossScaler`](crate::LossScaler).
    pub fn fp16() -> Self {
        Self::new(Policy::fp16())
    }

    /// The device. Any Flex or CubeCL device will do; an autodiff device gives an autodiff device.
    ///
    /// # Errors
    ///
    /// When the device cannot compute in the policy's low dtype (the error lists the dtypes that it
    /// can), or cannot carry a layer.
    pub fn device(self, device: Device) -> Result<Device, LayerError> {
        self.with_report(device).map(|autocast| autocast.device)
    }

    /// The device, and a handle to read [what ran in which precision](AutocastReport) from.
    ///
    /// # Errors
    ///
    /// As [`device`](Self::device).
    ///
    /// ```
    /// use burn::tensor::{DType, Device, Tensor};
    /// use burn_amp::{Autocast, Op};
    ///
    /// let autocast = Autocast::bf16().with_report(Device::flex())?;
    /// let x = Tensor::<2>::ones([2, 2], &autocast.device);
    /// x.clone().matmul(x).exp().into_data();
    /// let report = autocast.report();
    /// assert_eq!(report.runs_of(Op::float_matmul, DType::BF16), 1);
    /// assert_eq!(report.runs_of(Op::float_exp, DType::F32), 1);
    /// # Ok::<(), burn_layer::LayerError>(())
    /// ```
    pub fn with_report(self, device: Device) -> Result<AutocastDevice, LayerError> {
        let layer = self.layer(&device)?;
        let counters = layer.counters.clone();
        let device = Layers::on(device).layer(layer).serve()?;
        Ok(AutocastDevice { device, counters })
    }

    /// The layer alone, to be [stacked](Layers) with others over `device`.
    ///
    /// # Errors
    ///
    /// When the device cannot compute in the policy's low dtype.
    pub fn layer(self, device: &Device) -> Result<AutocastLayer, LayerError> {
        let low = DType::from(self.policy.low_dtype());
        if !device.supports_dtype(low) {
            let float = [DType::F64, DType::F32, DType::F16, DType::BF16];
            let supported = float
                .into_iter()
                .filter(|dtype| device.supports_dtype(*dtype));
            return Err(LayerError::UnsupportedDType {
                device: format!("{device:?}"),
                wanted: format!("{low:?}"),
                supported: supported.map(|dtype| format!("{dtype:?}")).collect(),
            });
        }
        Ok(AutocastLayer {
            policy: Arc::new(self.policy),
            counters: Arc::default(),
        })
    }
}

/// An autocast device and its counters.
#[derive(Clone, Debug)]
pub struct AutocastDevice {
    /// The device.
    pub device: Device,
    counters: Arc<Counters>,
}

impl AutocastDevice {
    /// What ran in which precision so far.
    pub fn report(&self) -> AutocastReport {
        self.counters.report()
    }
}

/// The layer that autocast puts over a device.
#[derive(Clone, Debug, Default)]
pub struct AutocastLayer {
    policy: Arc<Policy>,
    counters: Arc<Counters>,
}

impl AutocastLayer {
    /// Names the layer's counters with the device that it was served on.
    pub fn on(&self, device: Device) -> AutocastDevice {
        AutocastDevice {
            device,
            counters: self.counters.clone(),
        }
    }
}

impl Layer for AutocastLayer {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        Some(self.policy.plan(op, inputs))
    }

    fn ran(&self, op: Op, dtype: DType) {
        self.counters.ran(op, dtype);
    }

    fn cast(&self, cast: Cast) {
        self.counters.cast(cast);
    }
}
