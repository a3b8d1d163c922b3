//! [`Layers`]: putting layers over a device.

use crate::{Handlers, Layer, LayerError, Layered, LayeredDevice, serve::serve};
use burn::tensor::Device;
#[cfg(feature = "cubecl")]
use burn_cubecl::Cube;
use burn_dispatch::DispatchDevice;
#[cfg(feature = "flex")]
use burn_flex::Flex;
use burn_ir::BackendIr;
use std::any::Any;

/// Layers over a Burn device, the first one innermost.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_layer::{Layer, Layers};
///
/// #[derive(Debug, Default)]
/// struct Nothing;
/// impl Layer for Nothing {}
///
/// let device = Layers::on(Device::flex()).layer(Nothing).serve()?;
/// let x = Tensor::<1>::from_floats([1.0, 2.0], &device).exp();
/// # let _ = x;
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
#[must_use = "layers do nothing until they are served"]
pub struct Layers<S> {
    device: Device,
    stack: S,
    /// The [`Handlers`] given, of whatever backend.
    custom_ops: Vec<Box<dyn Any + Send>>,
}

impl Layers<()> {
    /// Begin with `device`: Flex or a CubeCL device, of an autodiff device the one inside.
    pub fn on(device: Device) -> Self {
        Self {
            device,
            stack: (),
            custom_ops: Vec::new(),
        }
    }
}

impl<S: Stack> Layers<S> {
    /// Put `layer` over what is there.
    pub fn layer<L: Layer>(self, layer: L) -> Layers<(S, L)> {
        Layers {
            device: self.device,
            stack: (self.stack, layer),
            custom_ops: self.custom_ops,
        }
    }

    /// Let the device run custom ops of a backend extension. `B` is the plain backend underneath;
    /// handlers of another backend than the device's are left out, so that one program can give
    /// those of all of them.
    pub fn custom_ops<B: BackendIr>(mut self, ops: impl Into<Handlers<B>>) -> Self {
        self.custom_ops.push(Box::new(ops.into()));
        self
    }

    /// Serve the layered device in this process. The service listens on 127.0.0.1 only, on a port
    /// of the system's choice, to holders of a random token, and lives as long as the process.
    ///
    /// An autodiff device given to [`on`](Layers::on) gives an autodiff device.
    ///
    /// # Errors
    ///
    /// When the device cannot carry layers, or no loopback socket can be opened.
    pub fn serve(self) -> Result<Device, LayerError> {
        let autodiff = self.device.is_autodiff();
        let base = self.device.clone().inner();
        let device = match base.as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(device) => self.serve_on::<Flex>(*device),
            #[cfg(feature = "cubecl")]
            DispatchDevice::Cube(device) => {
                let device = device.clone();
                self.serve_on::<Cube>(device)
            }
            DispatchDevice::Remote(_) => Err(LayerError::AlreadyServed {
                device: format!("{base:?}"),
            }),
            #[allow(unreachable_patterns)]
            _ => Err(LayerError::UnsupportedDevice {
                device: format!("{base:?}"),
            }),
        }?;
        Ok(if autodiff { device.autodiff() } else { device })
    }

    fn serve_on<B: BackendIr>(self, device: B::Device) -> Result<Device, LayerError> {
        let mut handlers = Handlers::<B>::default();
        for ops in self.custom_ops {
            if let Ok(ops) = ops.downcast::<Handlers<B>>() {
                handlers.extend(*ops);
            }
        }
        serve::<S::Backend<B>>(self.stack.device::<B>(device), S::lift(handlers))
    }
}

/// A list of layers: `()` or `(inner layers, layer)`.
pub trait Stack: Send + 'static {
    /// The backend that these layers make of `B`.
    type Backend<B: BackendIr>: BackendIr;

    /// The device that these layers make of `device`.
    fn device<B: BackendIr>(
        self,
        device: B::Device,
    ) -> burn_backend::tensor::Device<Self::Backend<B>>;

    /// The custom ops of `B` on the layered backend.
    fn lift<B: BackendIr>(handlers: Handlers<B>) -> Handlers<Self::Backend<B>>;
}

impl Stack for () {
    type Backend<B: BackendIr> = B;

    fn device<B: BackendIr>(self, device: B::Device) -> B::Device {
        device
    }

    fn lift<B: BackendIr>(handlers: Handlers<B>) -> Handlers<B> {
        handlers
    }
}

impl<S: Stack, L: Layer> Stack for (S, L) {
    type Backend<B: BackendIr> = Layered<L, S::Backend<B>>;

    fn device<B: BackendIr>(
        self,
        device: B::Device,
    ) -> burn_backend::tensor::Device<Self::Backend<B>> {
        LayeredDevice::new(self.0.device::<B>(device), self.1)
    }

    fn lift<B: BackendIr>(handlers: Handlers<B>) -> Handlers<Self::Backend<B>> {
        S::lift(handlers).lift::<L>()
    }
}
