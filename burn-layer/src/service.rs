//! The loopback service: layered devices of this process as Burn [`Device`]s.
//!
//! Burn's set of backends is closed; what it leaves open is `burn-remote`'s `BackendServer`, which
//! serves any [`BackendIr`]. So layered backends are served over a socket of 127.0.0.1, to this
//! process alone: the port is the system's choice and the token is random.
//!
//! A service has [seats](SEATS) for devices over one base device. A device takes a seat and leaves it
//! when it is [given back](crate::Lease), so that making and dropping devices leaves nothing behind
//! but the service: a port, a thread and a session that every service begins with.

use crate::{
    Layer, LayerError, LayeredDevice,
    custom_op::Handlers,
    layer_set::{LayerSet, Stack},
};
use burn::{remote::RemoteHost, tensor::Device};
use burn_backend::{
    DeviceHandle, DeviceId,
    backend::{DeviceService, ServerUtilitiesHandle},
};
use burn_dispatch::DispatchDevice;
use burn_ir::BackendIr;
use burn_remote::{
    RemoteBackend, RemoteChannel, RemoteDevice,
    server::{
        AuthorizationRequest, BackendServer, PeerAuthorizer, TokenAuthorizer, WebSocketTransport,
    },
};
use burn_router::{BackendRouter, RouterChannel, RouterClientRegistration, register_scoped_client};
use burn_std::device::Device as _;
use std::{
    any::TypeId,
    collections::{HashMap, VecDeque},
    net::{Ipv4Addr, TcpListener},
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::runtime::{Builder, Runtime};

/// How many devices a service has room for. When all are taken, another service begins.
const SEATS: usize = 128;

/// What all devices of a service have in common: the backend and the device underneath, and the
/// names of the custom ops.
type Kind = (TypeId, DeviceId, Vec<String>);

static SERVICES: LazyLock<Mutex<HashMap<Kind, Vec<Arc<Service>>>>> = LazyLock::new(Mutex::default);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

/// A server and its seats.
struct Service {
    remote: Vec<RemoteDevice>,
    seats: Vec<Arc<Seat>>,
    /// Those that nobody has, longest unused first: a device that is used after it was given back
    /// is then refused for as long as can be, and not taken for another.
    vacant: Mutex<VecDeque<usize>>,
}

/// A place for a device in a service.
struct Seat {
    layers: Arc<LayerSet>,
    taken: AtomicBool,
}

/// Serves `layers` over `base` in this process.
pub(crate) fn serve<B: BackendIr>(
    base: B::Device,
    layers: Vec<Box<dyn Layer>>,
    custom_ops: Handlers<B>,
) -> Result<Served, LayerError> {
    let kind = (TypeId::of::<B>(), base.to_id(), custom_ops.names());
    let mut stack = Some(Stack {
        layers,
        custom_ops: Some(Box::new(custom_ops.lift())),
    });
    let mut services = lock(&SERVICES);
    let services = services.entry(kind.clone()).or_default();
    if let Some(served) = services.iter().find_map(|s| s.seat(&mut stack)) {
        return Ok(served);
    }
    let service = Service::start::<B>(base, kind.2)?;
    services.push(service.clone());
    Ok(service.seat(&mut stack).expect("a new service has room"))
}

impl Service {
    fn start<B: BackendIr>(base: B::Device, ops: Vec<String>) -> Result<Arc<Self>, LayerError> {
        let runtime = runtime()?;
        let bind = |source| LayerError::Bind { source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;

        let devices: Vec<_> = (0..SEATS)
            .map(|_| LayeredDevice::new(base.clone(), []))
            .collect();
        let seat = |device: &LayeredDevice<B::Device>| {
            Arc::new(Seat {
                layers: device.layer().clone(),
                taken: AtomicBool::new(false),
            })
        };
        let seats: Vec<_> = devices.iter().map(seat).collect();
        // Clients learn of a server's devices from its first, which nobody is given.
        seats[0].taken.store(true, Ordering::Release);

        let token = token();
        let doorkeeper = Doorkeeper {
            token: TokenAuthorizer::new(token.as_str()).expect("the token is not empty"),
            seats: seats.clone(),
        };
        // Not `serve`, which would install a log subscriber and signal handlers of its own.
        let serving = BackendServer::new(devices)
            .with_authorizer(doorkeeper)
            .with_custom_ops(Handlers::<B>::by_device(ops))
            .serve_async(WebSocketTransport::from_listener(listener));
        runtime.spawn(async move {
            if let Err(error) = serving.await {
                log::error!("the layered devices on {address} stopped: {error}");
            }
        });

        let host = RemoteHost::websocket(&format!("ws://{address}")).with_credential(token);
        let remote = host
            .devices()
            .map_err(|source| LayerError::Connect { source })?;
        let remote = remote.into_vec().into_iter().map(remote_device);
        Ok(Arc::new(Self {
            remote: remote.collect(),
            seats,
            vacant: Mutex::new((1..SEATS).collect()),
        }))
    }
}

impl Service {
    /// Takes a seat for what is in `stack`, if one is vacant.
    fn seat(self: &Arc<Self>, stack: &mut Option<Stack>) -> Option<Served> {
        loop {
            let index = lock(&self.vacant).pop_front()?;
            let remote = &self.remote[index];
            // None where a program went on using a device that it had given back. It keeps the seat.
            let client =
                register_scoped_client::<RemoteChannel>(remote, RemoteChannel::init_client(remote));
            if let Some(client) = client {
                let seat = &self.seats[index];
                seat.layers.replace(stack.take()?);
                seat.taken.store(true, Ordering::Release);
                return Some(Served {
                    service: self.clone(),
                    index,
                    client,
                });
            }
        }
    }
}

/// A device in its seat.
pub(crate) struct Served {
    service: Arc<Service>,
    index: usize,
    client: RouterClientRegistration<RemoteChannel>,
}

impl Served {
    pub(crate) fn device(&self) -> Device {
        Device::new(DispatchDevice::from(self.remote().clone()))
    }

    fn remote(&self) -> &RemoteDevice {
        &self.service.remote[self.index]
    }

    /// Ends the device's session and its threads and gives the seat back, unless tensors of the
    /// device live.
    pub(crate) fn leave(self) -> Result<(), Self> {
        // What the program dropped may still be on its way.
        let sent = self.device().sync();
        if sent.is_ok() && self.service.seats[self.index].layers.tensors() > 0 {
            return Err(self);
        }
        if !owns_clients() {
            return Ok(());
        }
        let Self {
            service,
            index,
            client,
        } = self;
        drop(client);
        DeviceHandle::<Runner>::shutdown(service.remote[index].to_id());
        let seat = &service.seats[index];
        seat.taken.store(false, Ordering::Release);
        seat.layers.replace(Stack::default());
        lock(&service.vacant).push_back(index);
        Ok(())
    }
}

/// Burn's fusion, where it is enabled for remote devices, keeps clients of its own that nobody can
/// take back: then the sessions stay.
fn owns_clients() -> bool {
    TypeId::of::<RemoteBackend>() == TypeId::of::<BackendRouter<RemoteChannel>>()
}

/// Names the threads of a device to CubeCL, which stops all of them whatever runs there.
struct Runner;

impl DeviceService for Runner {
    fn init(_device: DeviceId) -> Self {
        Self
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        Arc::new(())
    }
}

/// Lets in who has the token and asks for a seat that is taken.
struct Doorkeeper {
    token: TokenAuthorizer,
    seats: Vec<Arc<Seat>>,
}

impl PeerAuthorizer for Doorkeeper {
    fn authorize(&self, request: AuthorizationRequest<'_>) -> Result<(), String> {
        let seat = self.seats.get(request.device_index as usize);
        self.token.authorize(request)?;
        match seat {
            Some(seat) if seat.taken.load(Ordering::Acquire) => Ok(()),
            _ => Err("the layered device was given back".into()),
        }
    }
}

fn remote_device(device: Device) -> RemoteDevice {
    match device.as_dispatch() {
        DispatchDevice::Remote(remote) => remote.clone(),
        other => unreachable!("a server's devices are remote, not {other:?}"),
    }
}

/// 256 random bits.
fn token() -> String {
    let bytes: [u8; 32] = rand::random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
