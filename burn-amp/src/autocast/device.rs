//! [`Autocast`]: a device that runs each op in the dtype that suits it.

#[cfg(feature = "fp8")]
use super::fp8::Fp8;
use super::{
    AutocastLayer, AutocastReport, NanGuard, Policy,
    fp8::{self, Fp8Settings},
    reduction::Reduction,
    report::Counters,
};
use burn::tensor::{DType, Device};
use burn_backend::DeviceSettings;
use burn_layer::{LayerError, Layers, Lease};
use parking_lot::Mutex;
use std::{
    ops::Deref,
    sync::{Arc, Once},
};

/// Mixed precision for an unmodified Burn program: a device on which each op runs in the dtype that
/// suits it.
///
/// The program sees f32 everywhere. Parameters, their gradients (if the loss has one element), optimizer state and records are
/// also stored in f32. In between, matrix products and convolutions run in bf16 or fp16, and ops that need the precision run in
/// f32, by the rules of the [`Policy`].
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
    pub(super) settings: Settings,
    guard: Option<NanGuard>,
}

/// What an autocast device computes by. Devices with equal settings over one plain device do the same.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    pub(super) policy: Policy,
    pub(super) fp8: Option<Fp8Settings>,
    recompute: bool,
    reduced: bool,
}

/// A device that [`Autocast::device`] has created, with what it was created from.
struct Made {
    settings: Settings,
    plain: Device,
    /// The settings of the plain device at that time.
    plain_settings: DeviceSettings,
    autocast: Device,
}

static DEVICES: Mutex<Vec<Made>> = Mutex::new(Vec::new());

impl Autocast {
    /// Autocast with a policy of your own.
    pub fn new(policy: Policy) -> Self {
        Self {
            settings: Settings {
                policy,
                fp8: None,
                recompute: true,
                reduced: false,
            },
            guard: None,
        }
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

    /// Has `guard` check the result of every op.
    pub fn nan_guard(mut self, guard: &NanGuard) -> Self {
        self.guard = Some(guard.clone());
        self
    }

    /// Whether backward recomputes cheap results instead of keeping them from forward on: results of elementwise ops on
    /// activations, such as the parts of a softmax or a norm. On by default. It runs the same ops on the same values, so results
    /// are the same, and bit-identical if the backend does not fuse ops. Mostly because of this, a step in 16 bits takes little
    /// more than half the memory of one in f32, at the cost of a few more elementwise ops. [`Device::gradient_checkpointing`]
    /// does the same for more ops, and also in f32.
    ///
    /// What gradient checkpointing runs a second time in backward follows the policy of the device, even where a
    /// [region](crate::autocast()) ran it at first. So do the gradients of weights that are used transposed: they are made neither in
    /// fp8 nor by a region's policy. If a matmul's last factor is computed again, the gradient of its first one is stored in f32,
    /// because that may be a parameter.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor, activation::softmax};
    /// use burn_amp::Autocast;
    ///
    /// let recomputed = |autocast: Autocast| {
    ///     let lease = autocast.lease(Device::flex())?;
    ///     let device = lease.device().autodiff();
    ///     let x = Tensor::<2>::random([64, 64], Distribution::Default, &device).require_grad();
    ///     softmax(x.clone().matmul(x), 1).square().sum().backward();
    ///     device.sync().expect("the device answers");
    ///     Ok::<_, burn_layer::LayerError>(lease.report().recomputed)
    /// };
    /// assert!(recomputed(Autocast::bf16())? > 0);
    /// assert_eq!(recomputed(Autocast::bf16().recompute(false))?, 0);
    /// # Ok::<(), burn_layer::LayerError>(())
    /// ```
    pub fn recompute(mut self, recompute: bool) -> Self {
        self.settings.recompute = recompute;
        self
    }

    /// Whether convolutions may add up their products in 16 bits, as PyTorch's `allow_bf16_reduced_precision_reduction` does for
    /// matrix products. Off by default, so they are added in f32, as PyTorch's kernels do it.
    ///
    /// Flex does so in any case, and so do CubeCL's kernels for tensor cores, which take dense convolutions on CUDA and ROCm (if
    /// Burn's tuner does not find another kernel faster, as it may for small ones). For others (with groups, transposed, on GPUs without
    /// tensor cores for the dtype, such as bf16 on a T4, or on wgpu and the CPU) CubeCL's kernels (burn-cubecl 0.22.1) add in the dtype
    /// of their inputs. In bf16 a sum of equal numbers stops growing at 256 of them, so that the gradient of a depthwise filter is
    /// wrong by half for 4,096 positions. A convolution that would add up more than 16 products in this way is computed in f32, and
    /// its result is stored as the policy says. That takes casts, and is no faster than in f32.
    ///
    /// ```
    /// use burn_amp::Autocast;
    ///
    /// // As fast as it goes, however wrong:
    /// let autocast = Autocast::bf16().reduced_precision_reduction(true);
    /// # let _ = autocast;
    /// ```
    pub fn reduced_precision_reduction(mut self, allow: bool) -> Self {
        self.settings.reduced = allow;
        self
    }

    /// The autocast device over `device`, which lives as long as the process. `device` may be any Flex or CubeCL device; from an
    /// autodiff device you get an autodiff device. As with Burn's own devices, the same policy over the same device gives the
    /// same device, except with a [guard](Self::nan_guard) or after an op has panicked on it. Because of that check, a call for
    /// a device that exists waits until its work is done: call once and keep the device.
    ///
    /// It is not [`Device::default`]: create tensors on it, and pass it to data loaders with `DataLoaderBuilder::set_device`
    /// (burn-train's `Learner` does that by itself). Tensors of other devices do not mix with its own: Burn panics with "input
    /// tensor `rhs` is on the wrong backend".
    ///
    /// # Errors
    ///
    /// When the device cannot compute in the policy's low dtype (the error lists the dtypes that it
    /// can), or cannot carry a layer.
    pub fn device(self, device: Device) -> Result<Device, LayerError> {
        if self.guard.is_some() {
            return self.with_report(device).map(|autocast| autocast.device);
        }
        let settings = self.settings.clone();
        let plain = device.clone().inner();
        let plain_settings = plain.settings();
        let devices = || DEVICES.lock();
        let same = |made: &Made| {
            made.settings == settings
                && made.plain == plain
                && made.plain_settings == plain_settings
        };
        let find = |devices: &[Made]| {
            devices
                .iter()
                .find(|made| same(made))
                .map(|made| made.autocast.clone())
        };
        // Drops a device whose session has ended because an op panicked and the program went on. Meanwhile nothing is locked, so
        // that others need not wait for this device.
        let found = find(&devices());
        if let Some(found) = found
            && found.sync().is_err()
        {
            devices().retain(|made| made.autocast != found);
        }
        let mut devices = devices();
        let autocast = match find(&devices) {
            Some(found) => found,
            None => {
                let autocast = self.with_report(plain.clone())?.device;
                devices.push(Made {
                    settings,
                    plain,
                    plain_settings,
                    autocast: autocast.clone(),
                });
                autocast
            }
        };
        Ok(autocast.with_autodiff_context_from(&device))
    }

    /// A new device, which lives as long as the process, with a handle that reports
    /// [what ran in which precision](AutocastReport).
    ///
    /// # Errors
    ///
    /// Like [`device`](Self::device).
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
        let (layers, layer) = self.stack(device)?;
        Ok(layer.on(layers.serve()?))
    }

    /// A new device, which ends when the lease and the device's last tensor are dropped.
    ///
    /// # Errors
    ///
    /// Like [`device`](Self::device).
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_amp::Autocast;
    ///
    /// let autocast = Autocast::bf16().lease(Device::flex())?;
    /// Tensor::<1>::ones([4], &autocast.device()).exp().into_data();
    /// println!("{}", autocast.report());
    /// # Ok::<(), burn_layer::LayerError>(())
    /// ```
    pub fn lease(self, device: Device) -> Result<AutocastLease, LayerError> {
        let (layers, layer) = self.stack(device)?;
        let lease = layers.lease()?;
        Ok(AutocastLease {
            autocast: layer.on(lease.device()),
            _lease: lease,
        })
    }

    /// The device before it is served, so that layers and custom ops of other crates can be added over autocast, such as
    /// burn-ddp's overlapped averaging and `SyncBatchNorm`.
    ///
    /// # Errors
    ///
    /// Like [`device`](Self::device).
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_amp::{Autocast, NanGuard};
    ///
    /// let guard = NanGuard::new(); // any layer
    /// let device = Autocast::bf16().layers(Device::flex())?.layer(guard.clone()).serve()?.autodiff();
    /// Tensor::<1>::from_floats([-1.0], &device).log().into_data();
    /// assert!(guard.first().is_some());
    /// # Ok::<(), burn_amp::LayerError>(())
    /// ```
    pub fn layers(self, device: Device) -> Result<Layers, LayerError> {
        self.stack(device).map(|(layers, _)| layers)
    }

    fn stack(mut self, device: Device) -> Result<(Layers, AutocastLayer), LayerError> {
        let guard = self.guard.take();
        let layer = self.layer(&device)?;
        let layers = fp8::with_fp8_ops(Layers::on(device).layer(layer.clone()));
        let layers = match guard {
            Some(guard) => layers.layer(guard),
            None => layers,
        };
        Ok((layers, layer))
    }

    /// The layer alone, to [stack](Layers) with others over `device` in an order of your own, or to serve with custom ops of a
    /// backend extension. Custom ops see plain tensors in the dtype that the program sees. A [guard](Self::nan_guard) is a
    /// separate layer: put it over this one. A guard given to this autocast is ignored here, and the log says so.
    ///
    /// # Errors
    ///
    /// When the device cannot compute in the policy's low dtype.
    ///
    /// ```
    /// use burn::{remote::CustomOpClient, tensor::{DType, Device, Tensor}};
    /// use burn_amp::{Autocast, CustomOpHandler, Layers};
    /// use burn_backend::{TensorMetadata, ops::FloatTensorOps};
    /// use burn_flex::Flex;
    /// use burn_ir::{CustomOpIr, OperationOutput, TensorIr};
    /// use std::sync::Arc;
    ///
    /// // How Flex runs the op `my::cube`:
    /// let cube: CustomOpHandler<Flex> = Arc::new(|handles, ir, _device| {
    ///     let x = handles.get_float_tensor::<Flex>(&ir.inputs[0]);
    ///     assert_eq!(x.dtype(), DType::F32);
    ///     let cube = Flex::float_mul(Flex::float_mul(x.clone(), x.clone()), x);
    ///     handles.register_float_tensor::<Flex>(&ir.outputs[0].id, cube);
    /// });
    /// let plain = Device::flex();
    /// let device = Layers::on(plain.clone())
    ///     .layer(Autocast::bf16().layer(&plain)?)
    ///     .custom_ops::<Flex>([("my::cube", cube)])
    ///     .serve()?;
    ///
    /// // How a program on the device calls it:
    /// let x = Tensor::<1>::from_floats([1.5, 2.0], &device);
    /// let burn_dispatch::DispatchDevice::Remote(remote) = device.as_dispatch() else {
    ///     unreachable!("autocast devices are remote devices")
    /// };
    /// let client = CustomOpClient::new(remote);
    /// let x = x.try_into_primitive::<burn::backend::Remote>().unwrap();
    /// let out = TensorIr::uninit(client.create_empty_handle(), [2].into(), DType::F32);
    /// let call = CustomOpIr::new("my::cube", &[x.into_ir()], &[out]);
    /// let out = Tensor::<1>::from_primitive::<burn::backend::Remote>(client.register(call).output());
    /// assert_eq!(out.into_data().try_to_vec::<f32>().unwrap(), [3.375, 8.0]);
    /// # Ok::<(), burn_amp::LayerError>(())
    /// ```
    pub fn layer(self, device: &Device) -> Result<AutocastLayer, LayerError> {
        if self.guard.is_some() {
            log::warn!(
                "Autocast::nan_guard changes nothing for Autocast::layer: put the guard over the layer, \
                 Layers::on(device).layer(autocast).layer(guard)"
            );
        }
        let settings = self.settings;
        let low = DType::from(settings.policy.low_dtype());
        let mut supported = vec![DType::F64, DType::F32, DType::F16, DType::BF16];
        supported.retain(|dtype| device.supports_dtype(*dtype));
        if !supported.contains(&low) {
            return Err(LayerError::UnsupportedDType {
                device: format!("{device:?}"),
                wanted: format!("{low:?}"),
                supported: supported.iter().map(|d| format!("{d:?}")).collect(),
            });
        }
        Ok(AutocastLayer {
            policy: Arc::new(settings.policy),
            fp8: settings.fp8.map(|fp8| Arc::new(fp8.into())),
            supported,
            reduction: match settings.reduced {
                true => Reduction::Full,
                false => Reduction::on(device),
            },
            recompute: settings.recompute,
            counters: Arc::default(),
            not_in_fp8: Arc::new(Once::new()),
        })
    }
}

/// An autocast device and its counters.
#[derive(Clone, Debug)]
pub struct AutocastDevice {
    /// The device.
    pub device: Device,
    pub(super) counters: Arc<Counters>,
    #[cfg(feature = "fp8")]
    pub(super) fp8: Option<Arc<Fp8>>,
}

impl AutocastDevice {
    /// What ran in which precision so far.
    pub fn report(&self) -> AutocastReport {
        self.counters.report()
    }
}

/// A temporary autocast device. It ends, and frees what it holds, when this lease and the device's last tensor are dropped. The
/// next device reuses its threads.
#[derive(Debug)]
#[must_use = "the device goes when its lease is dropped"]
pub struct AutocastLease {
    autocast: AutocastDevice,
    _lease: Lease,
}

impl AutocastLease {
    /// The device.
    pub fn device(&self) -> Device {
        self.autocast.device.clone()
    }
}

impl Deref for AutocastLease {
    type Target = AutocastDevice;

    fn deref(&self) -> &AutocastDevice {
        &self.autocast
    }
}
