//! The loopback service: a backend of this process as a Burn [`Device`].
//!
//! Burn's set of backends is closed; what it leaves open is `burn-remote`'s `BackendServer`, which
//! serves any [`BackendIr`]. So a layered backend is served over a socket of 127.0.0.1, to this
//! process alone: the port is the system's choice and the token is random.

use crate::{LayerError, custom_op::Handlers};
use burn::{remote::RemoteHost, tensor::Device};
use burn_ir::BackendIr;
use burn_remote::server::{BackendServer, TokenAuthorizer, WebSocketTransport};
use std::{
    net::{Ipv4Addr, TcpListener},
    sync::OnceLock,
};
use tokio::runtime::{Builder, Runtime};

/// The threads that move frames for every layered device. The ops themselves run on a thread of
/// their device.
fn runtime() -> Result<&'static Runtime, LayerError> {
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

/// Serve `device` of backend `B` in this process.
pub(crate) fn serve<B: BackendIr>(
    device: B::Device,
    custom_ops: Handlers<B>,
) -> Result<Device, LayerError> {
    let runtime = runtime()?;
    let bind = |source| LayerError::Bind { source };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(bind)?;
    let address = listener.local_addr().map_err(bind)?;

    let token = token();
    let authorizer = TokenAuthorizer::new(token.as_str()).expect("the token is not empty");
    // Not `serve`, which would install a log subscriber and signal handlers of its own.
    let serving = BackendServer::<B>::new([device])
        .with_authorizer(authorizer)
        .with_custom_ops(custom_ops.into_registry())
        .serve_async(WebSocketTransport::from_listener(listener));
    runtime.spawn(async move {
        if let Err(error) = serving.await {
            log::error!("the layered device on {address} stopped: {error}");
        }
    });

    let host = RemoteHost::websocket(&format!("ws://{address}")).with_credential(token);
    Device::remote_options(&host)
        .init()
        .map_err(|source| LayerError::Connect { source })
}

/// 256 random bits.
fn token() -> String {
    let bytes: [u8; 32] = rand::random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
