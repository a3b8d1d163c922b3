//! [`Lease`]: a layered device for as long as it is needed.

use crate::service::{Service, runtime};
use burn::tensor::Device;
use core::{fmt, time::Duration};

/// A layered device that ends when it is no longer needed: when the lease and the last of the
/// device's tensors are dropped. Its layers are dropped with it; its port and its threads are kept for
/// the next device.
///
/// A [`Device`] is only a name and does not keep the layered device alive. Using one after the device ended panics, as with a
/// remote device whose server is gone, or reaches the next device. So keep the lease for as long as the name is used. A model
/// that was initialized on the device but not used yet has only the name and no tensors.
///
/// Configure ([`Device::configure`]) the device underneath, not this one, which may have served another lease before and would
/// then refuse to be configured.
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
    /// A lease on `served`, which the program uses as `device`.
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

    /// The device, which from now on lives as long as the process.
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

/// Waits until the last tensor is dropped, then lets the service go.
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
