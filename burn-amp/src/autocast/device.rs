//! [`Autocast`]: a device that runs each op in the dtype that suits it.

#[cfg(feature = "fp8")]
use super::Fp8Filter;
use super::{
    AutocastReport, NanGuard, Policy,
    fp8::{self, Fp8, Fp8Settings},
    region::{self, Region},
    report::Counters,
};
use burn::tensor::{DType, Device};
#[cfg(feature = "fp8")]
use burn_fp8::{
    Fp8Error,
    recipe::{AmaxReducer, Fp8Recipe},
};
use burn_layer::{Cast, Inputs, Layer, LayerError, Layers, Lease, Op, Plan, Ran, Run};
use std::sync::{Arc, Mutex, Once, PoisonError};

/// Mixed precision for an unmodified Burn program: a device on which each op runs in the dtype that
/// suits it.
///
/// The program sees f32 everywhere, and parameters, their gradients, optimizer state and records are f32 underneath too (the
/// gradient of a loss of one element, that is). Between them, matrix products and convolutions run in bf16 or fp16, and what
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
    fp8: Option<Fp8Settings>,
    guard: Option<NanGuard>,
}

#[cfg(feature = "fp8")]
fn for_nothing(what: &str) {
    log::warn!(
        "Autocast::{what} changes nothing: no layer runs in fp8 here. Begin with Autocast::fp8(recipe)"
    );
}

/// A device that [`Autocast::device`] made.
struct Made {
    policy: Policy,
    fp8: Option<Fp8Settings>,
    plain: Device,
    autocast: Device,
}

static DEVICES: Mutex<Vec<Made>> = Mutex::new(Vec::new());

impl Autocast {
    /// Autocast with a policy of your own.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            fp8: None,
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

    /// The linear layers in fp8, the rest as [`bf16`](Self::bf16). The model stays as it is.
    ///
    /// All three products of a layer run in fp8 and sum in f32: input and weight cast to the recipe's forward format
    /// (e4m3), the gradient of the output to its gradient format (e5m2 if hybrid). The output is stored in bf16, the
    /// gradient of the weight in f32. A cast is kept with its tensor, for the other products and micro-batches that need it.
    /// [`Fp8Filter`] says which layers are taken, [`AutocastReport::fp8_runs`] how many products were.
    ///
    /// Burn 0.22 sends a layer to its device as plain matrix products. So a product counts as a linear layer if its right factor
    /// is one matrix, transposed or not, that is no activation: that did not come of a product, a convolution, an embedding or
    /// another op of a layer. Embeddings tied to the output are weights; keys and values of an attention are none, nor is a matrix
    /// times itself. So is data that the program multiplies by, which looks the same. A weight that was made by
    /// products (orthogonal initialization, a merged LoRA) is one from its first step of an optimizer, or its record, on. Backward
    /// multiplies gradients by what was such a layer's weight or input. An optimizer that multiplies matrices, such as Muon with
    /// the momentum of a record, is best stepped in `autocast(&Policy::bf16(), ..)`.
    ///
    /// - `CurrentScaling`, `RowwiseScaling` and `BlockScaling` need no state and suit any model.
    /// - `DelayedScaling` keeps a layer's histories with its weight, and with what an optimizer's steps make of that: sums,
    ///   differences, multiples, clamps (not L-BFGS's). Histories move when a backward comes to their layer, and not in evaluation
    ///   (of inputs that go with it). Before that, and of a weight that is computed anew in each step, a tensor is scaled by its own amax; so are the
    ///   gradients of several layers of one size on an input that is not trained. A model's record does not have histories:
    ///   [`AutocastDevice::fp8_state`] gives them for a checkpoint.
    ///
    /// On devices without bf16, give another policy for the [`rest`](Self::rest).
    ///
    /// What backward needs is kept as the program computed it, so fp8 saves no memory here. In a data-parallel run the ranks
    /// scale inputs and gradients each by their own, unless delayed scaling [shares](Self::amax_reducer) amaxes; equal weights have
    /// equal scales.
    ///
    /// # Errors
    ///
    /// For a recipe that `burn_fp8::recipe::Fp8Recipe::validate` refuses.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::{Device, Distribution, Tensor}};
    /// use burn_amp::{Autocast, recipe::CurrentScaling};
    ///
    /// let autocast = Autocast::fp8(CurrentScaling::new())?.with_report(Device::flex())?;
    /// let device = autocast.device.clone().autodiff();
    /// let linear = LinearConfig::new(32, 16).init(&device); // unmodified Burn code
    /// let x = Tensor::<2>::random([4, 32], Distribution::Default, &device);
    /// linear.forward(x).sum().backward();
    /// device.sync()?;
    /// assert_eq!(autocast.report().fp8_runs(), 2); // the output and the gradient of the weight
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(feature = "fp8")]
    pub fn fp8(recipe: impl Into<Fp8Recipe>) -> Result<Self, Fp8Error> {
        Ok(Self {
            fp8: Some(Fp8Settings::new(recipe.into())?),
            ..Self::bf16()
        })
    }

    /// The policy of all that does not run in fp8, where it is not to be [`Policy::bf16`]: on a device without bf16. Without
    /// [`Autocast::fp8`] it changes nothing, and the log says so: there [`new`](Self::new) takes the policy.
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use burn_amp::{Autocast, Policy, recipe::CurrentScaling};
    ///
    /// let autocast = Autocast::fp8(CurrentScaling::new())?.rest(Policy::fp16());
    /// let device = autocast.device(Device::flex())?; // or Device::wgpu(..)
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(feature = "fp8")]
    pub fn rest(mut self, policy: Policy) -> Self {
        match self.fp8 {
            Some(_) => self.policy = policy,
            None => for_nothing("rest"),
        }
        self
    }

    /// Which linear layers run in fp8. Without [`Autocast::fp8`] none does, and the log says that the filter is for nothing.
    #[cfg(feature = "fp8")]
    pub fn fp8_filter(mut self, filter: Fp8Filter) -> Self {
        match &mut self.fp8 {
            Some(fp8) => fp8.filter = filter,
            None => for_nothing("fp8_filter"),
        }
        self
    }

    /// Share the scales of `DelayedScaling` over the ranks of a data-parallel run: the largest of all ranks' amaxes enter the
    /// histories. `burn-ddp`'s `ProcessGroup` is such a reducer; give the device a duplicate of its own.
    ///
    /// It is one call a layer and backward pass, on the thread on which the device runs its ops, which waits for the other ranks:
    /// all of them run the same layers in the same order, each with rows in its part of the batch. A pass without a backward, as
    /// in evaluation, makes no call. Scales of the first step are each rank's own, and so are
    /// those of all steps by other recipes. When the reducer fails, or answers with a tensor of another shape or device, the log
    /// says so, each rank goes on by its own amaxes, and [`AutocastDevice::fp8_state`] is an error from then on. Without
    /// [`Autocast::fp8`] the log says that the reducer is for nothing.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
    /// use burn_amp::{Autocast, recipe::{AmaxReducer, DelayedScaling}};
    /// use std::{error::Error, sync::Arc};
    ///
    /// /// Stands for a group, another rank of which saw larger numbers.
    /// #[derive(Debug)]
    /// struct Doubled;
    ///
    /// impl AmaxReducer for Doubled {
    ///     fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
    ///         Ok(amaxes * 2.0)
    ///     }
    /// }
    ///
    /// let autocast = Autocast::fp8(DelayedScaling::new())?.amax_reducer(Arc::new(Doubled));
    /// let device = autocast.device(Device::flex())?.autodiff();
    /// let linear = LinearConfig::new(32, 16).init(&device);
    /// linear.forward(Tensor::<2>::ones([4, 32], &device)).sum().backward();
    /// # Ok::<(), Box<dyn Error>>(())
    /// ```
    #[cfg(feature = "fp8")]
    pub fn amax_reducer(mut self, reducer: Arc<dyn AmaxReducer>) -> Self {
        match &mut self.fp8 {
            Some(fp8) => fp8.share(reducer),
            None => for_nothing("amax_reducer"),
        }
        self
    }

    /// Let `guard` look at everything that is computed.
    pub fn nan_guard(mut self, guard: &NanGuard) -> Self {
        self.guard = Some(guard.clone());
        self
    }

    /// The device, for the life of the process. Any Flex or CubeCL device will do; an autodiff
    /// device gives an autodiff device. As with Burn's own devices, the same policy over the same
    /// device is the same device (unless a [guard](Self::nan_guard) looks on).
    ///
    /// # Errors
    ///
    /// When the device cannot compute in the policy's low dtype (the error lists the dtypes that it
    /// can), or cannot carry a layer.
    pub fn device(self, device: Device) -> Result<Device, LayerError> {
        if self.guard.is_some() {
            return self.with_report(device).map(|autocast| autocast.device);
        }
        let (policy, fp8, plain) = (
            self.policy.clone(),
            self.fp8.clone(),
            device.clone().inner(),
        );
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |made: &&Made| made.policy == policy && made.fp8 == fp8 && made.plain == plain;
        let autocast = match devices.iter().find(same) {
            Some(made) => made.autocast.clone(),
            None => {
                let autocast = self.with_report(plain.clone())?.device;
                devices.push(Made {
                    policy,
                    fp8,
                    plain,
                    autocast: autocast.clone(),
                });
                autocast
            }
        };
        Ok(autocast.with_autodiff_context_from(&device))
    }

    /// A device of its own, for the life of the process, and a handle to read
    /// [what ran in which precision](AutocastReport) from.
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
        let (layers, layer) = self.stack(device)?;
        Ok(layer.on(layers.serve()?))
    }

    /// A device of its own, which goes when the lease and the device's last tensor are dropped.
    ///
    /// # Errors
    ///
    /// As [`device`](Self::device).
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
            lease,
            counters: layer.counters,
            #[cfg(feature = "fp8")]
            fp8: layer.fp8,
        })
    }

    /// The device as it is before it is served, for other layers over autocast and custom ops of other crates:
    /// burn-ddp's overlapped averaging and `SyncBatchNorm`, for instance.
    ///
    /// # Errors
    ///
    /// As [`device`](Self::device).
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

    /// The layer alone, to be [stacked](Layers) with others over `device` in an order of your own, or to be served with
    /// custom ops of a backend extension. Those see plain tensors in the dtype that the program
    /// sees. A [guard](Self::nan_guard) is a layer of its own, to be put over this one; one given to autocast does not look here,
    /// and the log says so.
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
        let low = DType::from(self.policy.low_dtype());
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
            policy: Arc::new(self.policy),
            fp8: self.fp8.map(|fp8| Arc::new(fp8.into())),
            supported,
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
    counters: Arc<Counters>,
    #[cfg(feature = "fp8")]
    pub(super) fp8: Option<Arc<Fp8>>,
}

impl AutocastDevice {
    /// What ran in which precision so far.
    pub fn report(&self) -> AutocastReport {
        self.counters.report()
    }
}

/// An autocast device for as long as it is needed: it goes when this and its last tensor are
/// dropped, with all that it holds, and leaves its threads to the next.
#[derive(Debug)]
#[must_use = "the device goes when its lease is dropped"]
pub struct AutocastLease {
    lease: Lease,
    counters: Arc<Counters>,
    #[cfg(feature = "fp8")]
    pub(super) fp8: Option<Arc<Fp8>>,
}

impl AutocastLease {
    /// The device.
    pub fn device(&self) -> Device {
        self.lease.device()
    }

    /// What ran in which precision so far.
    pub fn report(&self) -> AutocastReport {
        self.counters.report()
    }
}

/// The layer that autocast puts over a device.
#[derive(Clone, Debug)]
pub struct AutocastLayer {
    policy: Arc<Policy>,
    fp8: Option<Arc<Fp8>>,
    /// The float dtypes that the device computes in.
    supported: Vec<DType>,
    counters: Arc<Counters>,
    /// The warning that no layer runs in fp8 after all.
    not_in_fp8: Arc<Once>,
}

impl AutocastLayer {
    /// The layer's counters and its state, named with the device that it was served on.
    pub fn on(&self, device: Device) -> AutocastDevice {
        AutocastDevice {
            device,
            counters: self.counters.clone(),
            #[cfg(feature = "fp8")]
            fp8: self.fp8.clone(),
        }
    }
}

impl Layer for AutocastLayer {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        Some(match inputs.scope() {
            Some(Region::Full) => region::full(inputs),
            Some(Region::Policy(policy)) if self.supported.contains(&policy.low_dtype().into()) => {
                policy.plan(op, inputs)
            }
            _ => {
                let plan = self.policy.plan(op, inputs);
                match &self.fp8 {
                    Some(fp8) if fp8.takes(op, inputs) => {
                        let as_computed = plan.compute.unwrap_or(inputs.nominal);
                        let store = Some(plan.store.unwrap_or(as_computed));
                        // By the policy after all where the backend underneath has no fp8.
                        Plan {
                            own: true,
                            store,
                            ..plan
                        }
                    }
                    _ => plan,
                }
            }
        })
    }

    fn run(&self, run: &Run<'_>) -> Option<Ran> {
        let ran = self.fp8.as_ref()?.run(run);
        match ran {
            Some(_) => self.counters.ran_in_fp8(run.op()),
            None => self.not_in_fp8.call_once(|| {
                log::warn!(
                    "Autocast::fp8: no layer runs in fp8 on this device, whose backend is neither Flex nor CubeCL's; they run \
                     by the policy"
                );
            }),
        }
        ran
    }

    fn ran(&self, op: Op, dtype: DType) {
        self.counters.ran(op, dtype);
    }

    fn cast(&self, cast: Cast) {
        self.counters.cast(cast);
    }

    fn stored(&self, dtype: DType, nominal: DType, elements: usize) {
        self.counters.stored(dtype, nominal, elements);
    }
}
