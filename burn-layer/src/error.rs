//! [`LayerError`].

use burn::remote::ConnectError;

/// Why a layered device could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The device is a remote or layered device already. Layers can only be put on a plain device.
    #[error(
        "{device} is a remote or layered device already; put all layers on the plain device at \
         once: Layers::on(device).layer(a).layer(b).serve()"
    )]
    AlreadyServed {
        /// The device, as Burn prints it.
        device: String,
    },
    /// This build cannot put layers over this kind of device.
    #[error(
        "no layer can be put over {device}: layers go over Flex and the CubeCL devices. Enable the device's feature \
         (flex, cpu, cuda, rocm or wgpu) on the crate that you depend on (burn-amp, burn-ddp or burn-layer), not on burn alone"
    )]
    UnsupportedDevice {
        /// The device, as Burn prints it.
        device: String,
    },
    /// The layer needs a dtype that the device cannot compute in.
    #[error("{device} cannot compute in {wanted}; it can in {}: choose a layer or policy for one of these", supported.join(", "))]
    UnsupportedDType {
        /// The device, as Burn prints it.
        device: String,
        /// The dtype that was asked for.
        wanted: String,
        /// The float dtypes that the device can compute in.
        supported: Vec<String>,
    },
    /// The loopback socket could not be opened.
    #[error("no socket could be opened on 127.0.0.1 for the layered device: {source}")]
    Bind {
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// The thread that serves layered devices could not be started.
    #[error("the thread that serves layered devices could not be started: {source}")]
    Runtime {
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// The device was served but could not be reached.
    #[error("the layered device does not answer on 127.0.0.1: {source}")]
    Connect {
        /// What Burn's client said.
        #[source]
        source: ConnectError,
    },
}
