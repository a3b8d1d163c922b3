//! [`Lease`]: a layered device for as long as it is needed.

use crate::service::{Service, runtime};
use burn::tensor::Device;
use core::{fmt, time::Duration};

/// A layered device that goes when it is not needed any more: when the lease is dropped and the
/// last of the device's tensors is. Its layers and tensors go with it; its port and its threads are
/// the next leased device's.
///
/// A [`Device`] itself is a plain name. One that is used after the device went panics, as one does
/// whose server is gone, or names the next device: keep the lease for as long as the name. A model that was
/// initialized on it and not used yet has names and no tensors.
///
/// Configure ([`Device::configure`]) the device underneath, not this one, which may have been another's and would refuse it.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_layer::{Layer, Layers};
///
/// #[derive(Debug)]
/// struct Nothing;
/// impl Layer for Nothing {}
///
/// let lease = Layers::on(Device::flex()).layer(Nothing).lease()?;
/// let x = Tensor::<1>::from_floats([0.0, 1.0], &lease.device());
/// drop(lease);
/// // The tensor holds the device.
/// assert_eq!(x.neg().into_data().try_to_vec::<f32>().unwrap(), [0.0, -1.0]);
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
#[must_use = "the device goes when its lease is dropped"]
pub struct Lease {
    served: Option<Service>,
    device: Device,
}

impl Lease {
    /// A lease on what is served, as `device`.
    pub(crate) fn new(served: Service, device: Device) -> Self {
        Self {
            device,
            served: Some(served),
        }
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device.clone()
    }

    /// The device, for the life of the process.
    pub(crate) fn keep(mut self) -> Device {
        core::mem::forget(self.served.take());
        self.device()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.device).finish()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(served) = self.served.take()
            && let Some(served) = served.leave()
            && let Ok(runtime) = runtime()
        {
            runtime.spawn(leave(served));
        }
    }
}

/// Waits for the last tensor.
async fn leave(mut served: Service) {
    let mut pause = Duration::from_millis(1);
    loop {
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(Duration::from_secs(1));
        match tokio::task::spawn_blocking(move || served.leave()).await {
            Ok(Some(still)) => served = still,
            _ => return,
        }
    }
}
