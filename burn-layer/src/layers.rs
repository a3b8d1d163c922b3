//! [`Layers`]: putting layers over a device.

use crate::{
    Layer, LayerError, Lease, Op,
    custom_op::Handlers,
    service::{self, Service},
    under,
};
use burn::tensor::Device;
use burn_backend::DeviceSettings;
#[cfg(feature = "cubecl")]
use burn_cubecl::Cube;
use burn_dispatch::DispatchDevice;
#[cfg(feature = "flex")]
use burn_flex::Flex;
use burn_ir::BackendIr;
use burn_router::CustomOpHandler;
use std::any::Any;

/// Layers over a Burn device, the first one innermost.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_layer::{Layer, Layers};
///
/// #[derive(Debug)]
/// struct Nothing;
/// impl Layer for Nothing {}
///
/// let device = Layers::on(Device::flex()).layer(Nothing).serve()?;
/// let x = Tensor::<1>::from_floats([0.0, 1.0], &device).neg();
/// assert_eq!(x.into_data().try_to_vec::<f32>().unwrap(), [0.0, -1.0]);
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
#[must_use = "layers do nothing until they are served"]
#[derive(Debug)]
pub struct Layers {
    base: Base,
    parts: Parts,
}

/// The layers and custom ops to put over a device.
#[derive(Debug, Default)]
struct Parts {
    layers: Vec<Box<dyn Layer>>,
    /// The [`Handlers`] given, each for any backend.
    custom_ops: Vec<Box<dyn Any + Send>>,
}

/// The device that layers are put over.
#[derive(Debug)]
enum Base {
    Burn(Device),
    /// A device of any other backend, and the function that serves layers over it.
    Other(
        Box<dyn Any + Send>,
        fn(Parts, Box<dyn Any + Send>) -> Result<Service, LayerError>,
    ),
}

impl From<Device> for Layers {
    /// No layers yet: [`Layers::on`].
    fn from(device: Device) -> Self {
        Self::on(device)
    }
}

impl Layers {
    /// Begins with `device`: Flex or a CubeCL device. From an autodiff device, the one inside is taken.
    ///
    /// With the feature `signal`, the device has the FFTs of `burn::signal`.
    pub fn on(device: Device) -> Self {
        let layers = Self::over_base(Base::Burn(device));
        #[cfg(all(feature = "signal", feature = "flex"))]
        let layers = layers.custom_ops::<Flex>(crate::fft_ops::<Flex>());
        #[cfg(all(feature = "signal", feature = "cubecl"))]
        let layers = layers.custom_ops::<Cube>(crate::fft_ops::<Cube>());
        layers
    }

    /// Begins with a device of any backend, even one that Burn's [`Device`] does not know.
    ///
    /// ```
    /// use burn::tensor::Tensor;
    /// use burn_flex::{Flex, FlexDevice};
    /// use burn_layer::Layers;
    ///
    /// let device = Layers::over::<Flex>(FlexDevice).serve()?;
    /// let x = Tensor::<1>::from_floats([0.0, 1.0], &device).neg();
    /// assert_eq!(x.into_data().try_to_vec::<f32>().unwrap(), [0.0, -1.0]);
    /// # Ok::<(), burn_layer::LayerError>(())
    /// ```
    pub fn over<B: BackendIr>(device: B::Device) -> Self {
        Self::over_base(Base::Other(Box::new(device), |parts, device| {
            let device = device.downcast().expect("the device is of this backend");
            parts.serve_on::<B>(*device, None)
        }))
    }

    fn over_base(base: Base) -> Self {
        Self {
            base,
            parts: Parts::default(),
        }
    }

    /// Puts `layer` over the layers added so far.
    pub fn layer(mut self, layer: impl Layer) -> Self {
        self.parts.layers.push(Box::new(layer));
        self
    }

    /// Lets the device run custom ops of a backend extension. `B` is the plain backend underneath.
    /// Handlers for another backend than the device's are ignored, so that one program can pass
    /// those of all backends.
    ///
    /// The handlers see plain tensors of `B` in the dtypes that the program sees, so that the
    /// extension's kernels run unchanged, at the precision that the program asked for.
    pub fn custom_ops<B: BackendIr>(
        self,
        ops: impl IntoIterator<Item = (&'static str, CustomOpHandler<B>)>,
    ) -> Self {
        self.handlers(Handlers::<B>::new(ops, None))
    }

    /// The same for custom ops of mixed precision, which take inputs of any float dtype, compute in a wider one where they need
    /// to, and return each result in the dtype of the input that it corresponds to, as Burn's `like` does on a layered device.
    ///
    /// The layers are asked how they would run `like` with the float inputs of the custom op. Where its result would be stored in
    /// another dtype than the program sees, the handlers see all tensors as they are stored, and their results are stored as they
    /// are returned. Otherwise the handlers see the dtypes that the program sees.
    ///
    /// ```
    /// use burn::backend::Flex;
    /// use burn_backend::ops::FloatTensorOps;
    /// use burn_layer::{CustomOpHandler, Layers, Op};
    /// use std::sync::Arc;
    ///
    /// /// `2 x` for any float dtype, named "my::twice".
    /// let twice: CustomOpHandler<Flex> = Arc::new(|handles, call, _device| {
    ///     let ([x], [out]) = call.as_fixed();
    ///     let x = handles.get_float_tensor::<Flex>(x);
    ///     handles.register_float_tensor::<Flex>(&out.id, Flex::float_mul_scalar(x, 2.0.into()));
    /// });
    /// let device = burn::tensor::Device::flex();
    /// let layers = Layers::on(device).custom_ops_like::<Flex>(Op::float_mul_scalar, [("my::twice", twice)]);
    /// # let _ = layers;
    /// ```
    pub fn custom_ops_like<B: BackendIr>(
        self,
        like: Op,
        ops: impl IntoIterator<Item = (&'static str, CustomOpHandler<B>)>,
    ) -> Self {
        self.handlers(Handlers::<B>::new(ops, Some(like)))
    }

    fn handlers<B: BackendIr>(mut self, handlers: Handlers<B>) -> Self {
        self.parts.custom_ops.push(Box::new(handlers));
        self
    }

    /// Serves the layered device in this process, for as long as the process lives. The service
    /// listens on 127.0.0.1 only, on a port that the system chooses, to holders of a random token.
    ///
    /// If [`on`](Layers::on) was given an autodiff device, this returns an autodiff device. Tensors that the program creates
    /// without naming a dtype get the dtypes that the device underneath is [configured](Device::configure) with.
    ///
    /// # Errors
    ///
    /// When the device cannot carry layers, or no loopback socket can be opened.
    pub fn serve(self) -> Result<Device, LayerError> {
        self.lease().map(Lease::keep)
    }

    /// Like [`serve`](Self::serve), but only for as long as the lease or a tensor of the device lives.
    ///
    /// # Errors
    ///
    /// Like [`serve`](Self::serve).
    pub fn lease(self) -> Result<Lease, LayerError> {
        let Self { base, parts } = self;
        match base {
            Base::Burn(device) => {
                let base = device.clone().inner();
                let served = parts.serve_on_burn(&base)?;
                under::remember(served.device(), base);
                let with_autodiff = served.device().with_autodiff_context_from(&device);
                Ok(Lease::new(served, with_autodiff))
            }
            Base::Other(device, serve) => {
                let served = serve(parts, device)?;
                let device = served.device();
                Ok(Lease::new(served, device))
            }
        }
    }
}

impl Parts {
    fn serve_on_burn(self, base: &Device) -> Result<Service, LayerError> {
        let settings = Some(base.settings());
        match base.as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(device) => self.serve_on::<Flex>(*device, settings),
            #[cfg(feature = "cubecl")]
            DispatchDevice::Cube(device) => self.serve_on::<Cube>(device.clone(), settings),
            DispatchDevice::Remote(_) => Err(LayerError::AlreadyServed {
                device: format!("{base:?}"),
            }),
            #[allow(unreachable_patterns)]
            _ => Err(LayerError::UnsupportedDevice {
                device: format!("{base:?}"),
            }),
        }
    }

    /// Serves a layered device whose tensors have the dtypes of `settings` where the program names none.
    fn serve_on<B: BackendIr>(
        self,
        device: B::Device,
        settings: Option<DeviceSettings>,
    ) -> Result<Service, LayerError> {
        let mut handlers = Handlers::<B>::default();
        for ops in self.custom_ops {
            if let Ok(ops) = ops.downcast::<Handlers<B>>() {
                handlers.extend(*ops);
            }
        }
        service::serve::<B>(device, settings, self.layers, handlers)
    }
}
