//! The loopback service: layered devices of this process as Burn [`Device`]s.
//!
//! Burn's set of backends is closed. What it leaves open is `burn-remote`'s `BackendServer`, which
//! serves any [`BackendIr`]. So a layered backend is served over a socket on 127.0.0.1, to this
//! process alone: the system chooses the port, and the token is random.
//!
//! When a device is [given back](crate::Lease), the next one over the same device underneath takes
//! over its service, with its port, its session and its threads. So creating and dropping devices leaves
//! behind no more services than the devices that were alive at the same time needed. (CubeCL's
//! `DeviceHandle::shutdown` is meant to end the session with the device. But `burn-remote` 0.22.1 ends a
//! session in the destructor of a thread-local, where Tokio refuses to run, and the process aborts.)

use crate::{
    Layer, LayerError, Layered, LayeredDevice,
    channels::fuses_ops,
    custom_op::Handlers,
    frames,
    layer_set::{LayerSet, Stack},
    scopes, whole,
};
use burn::{remote::RemoteHost, tensor::Device};
use burn_backend::{DeviceId, DeviceOps, DeviceSettings};
use burn_ir::BackendIr;
use burn_remote::server::{BackendServer, TokenAuthorizer, WebSocketTransport};
use burn_std::device::Device as _;
use parking_lot::{Mutex, MutexGuard};
use std::{
    any::TypeId,
    collections::VecDeque,
    net::{Ipv4Addr, TcpListener},
    sync::{Arc, OnceLock},
};
use tokio::runtime::{Builder, Runtime};

/// What a service keeps when another device takes it over: the backend and the device underneath, the
/// dtypes of tensors that are created without naming one, and the names of the custom ops.
type Kind = (TypeId, DeviceId, Option<DeviceSettings>, Vec<String>);

/// The services that no device uses, the longest unused first.
static VACANT: Mutex<VecDeque<Service>> = Mutex::new(VecDeque::new());

fn vacant() -> MutexGuard<'static, VecDeque<Service>> {
    VACANT.lock()
}

/// The threads that move frames for every layered device. The ops themselves run on a thread of
/// their device.
pub(crate) fn runtime() -> Result<&'static Runtime, LayerError> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("burn-layer")
        .enable_all()
        .build()
        .map_err(|source| LayerError::Runtime { source })?;
    Ok(RUNTIME.get_or_init(|| runtime))
}

/// A server of one device.
pub(crate) struct Service {
    kind: Kind,
    device: Device,
    layers: Arc<LayerSet>,
}

/// Serves `layers` over `base` in this process.
pub(crate) fn serve<B: BackendIr>(
    base: B::Device,
    settings: Option<DeviceSettings>,
    layers: Vec<Box<dyn Layer>>,
    custom_ops: Handlers<B>,
) -> Result<Service, LayerError> {
    let names = custom_ops.names();
    let kind = (TypeId::of::<B>(), base.to_id(), settings, names);
    let service = match Service::unused(&kind) {
        Some(service) => service,
        None => Service::start::<B>(base, kind)?,
    };
    service.layers.put_on(Stack {
        layers,
        custom_ops: Some(Box::new(custom_ops.lift())),
    });
    scopes::tell(&service.device, &service.layers);
    Ok(service)
}

impl Service {
    /// Takes a service of that kind that no device uses, if there is one.
    fn unused(kind: &Kind) -> Option<Self> {
        loop {
            let service = {
                let mut vacant = vacant();
                let place = vacant.iter().position(|it| it.kind == *kind)?;
                vacant.remove(place)?
            };
            // Skips a service whose session broke because a program went on using a device that was gone.
            if service.device.sync().is_ok() {
                return Some(service);
            }
        }
    }

    fn start<B: BackendIr>(base: B::Device, kind: Kind) -> Result<Self, LayerError> {
        frames::configure();
        whole::tell();
        let runtime = runtime()?;
        let bind = |source| LayerError::Bind { source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;

        let device = LayeredDevice::new(base, []);
        let layers = device.layer().clone();
        let (.., settings, custom_ops) = &kind;
        if let Some(settings) = settings {
            layers.defaults.get_or_init(|| *settings);
        }
        if fuses_ops::<B>(device.base()) {
            layers.set_fused();
        }
        if B::name(device.base()).contains("cuda") {
            layers.set_on_cuda();
        }
        #[cfg(feature = "cubecl")]
        add_mechanisms::<B>(&layers, device.base());
        let token = token();
        let authorizer = TokenAuthorizer::new(token.as_str()).expect("the token is not empty");
        // Not `serve`, which would install a log subscriber and signal handlers of its own.
        let serving = BackendServer::<Layered<B>>::new([device])
            .with_authorizer(authorizer)
            .with_custom_ops(Handlers::<B>::by_device(custom_ops.clone()))
            .serve_async(WebSocketTransport::from_listener(listener));
        runtime.spawn(async move {
            if let Err(error) = serving.await {
                log::error!("the layered device on {address} stopped: {error}");
            }
        });

        let host = RemoteHost::websocket(&format!("ws://{address}")).with_credential(token);
        let device = Device::remote_options(&host)
            .init()
            .map_err(|source| LayerError::Connect { source })?;
        Ok(Self {
            kind,
            device,
            layers,
        })
    }

    pub(crate) fn device(&self) -> Device {
        self.device.clone()
    }

    /// Takes the layers off and leaves the service to the next device. If tensors of its device still live, returns the
    /// service instead.
    pub(crate) fn leave(self) -> Option<Self> {
        // Syncs first, because drops of tensors may still be on their way.
        let works = self.device.sync().is_ok();
        if works && (self.layers.tensors() > 0 || !scopes::is_told(&self.layers)) {
            return Some(self);
        }
        scopes::tell_no_more(&self.layers);
        self.layers.take_off();
        // A service that the program has configured is not used again.
        if self.device.settings() == self.device.as_dispatch().defaults() {
            vacant().push_back(self);
        }
        None
    }
}

/// Adds the kernels and libraries that the backend underneath can do with.
#[cfg(feature = "cubecl")]
fn add_mechanisms<B: BackendIr>(layers: &LayerSet, device: &B::Device) {
    let mechanisms = &layers.mechanisms;
    if let Some(multiply) = crate::cublaslt::multiplies_on::<B>(device) {
        mechanisms.add(multiply);
    }
    if let Some(convolutions) = crate::cudnn::convolves_on::<B>(device) {
        mechanisms.add(convolutions);
    }
    if let Some(softmaxes) = crate::softmax::softmaxes_on::<B>(device) {
        mechanisms.add(softmaxes);
    }
    if let Some(layer_norms) = crate::layer_norm::layer_norms_on::<B>(device) {
        mechanisms.add(layer_norms);
    }
    if let Some(batch_norms) = crate::batch_norm::batch_norms_on::<B>(device) {
        mechanisms.add(batch_norms);
    }
    if let Some(rotations) = crate::rotation::rotations_on::<B>(device) {
        mechanisms.add(rotations);
    }
}

/// 256 random bits.
fn token() -> String {
    let bytes: [u8; 32] = rand::random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
