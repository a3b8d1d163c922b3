//! [`Lease`]: a layered device for as long as it is needed.

use crate::service::{Served, runtime};
use burn::tensor::Device;
use core::{fmt, time::Duration};

/// A layered device that goes when it is not needed any more: when the lease is dropped and the
/// last of the device's tensors is. Its session, its threads and its layers go with it.
///
/// A [`Device`] itself is a plain name. Using it after the device went panics, as using any remote
/// device does whose server is gone.
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
    served: Option<Served>,
    device: Device,
}

impl Lease {
    /// A lease on what is served over `base`: with autodiff, if `base` is.
    pub(crate) fn new(served: Served, base: &Device) -> Self {
        Self {
            device: served.device().with_autodiff_context_from(base),
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
            && let Err(served) = served.leave()
            && let Ok(runtime) = runtime()
        {
            runtime.spawn(leave(served));
        }
    }
}

/// Waits for the last tensor.
async fn leave(mut served: Served) {
    let mut pause = Duration::from_millis(1);
    loop {
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(Duration::from_secs(1));
        match tokio::task::spawn_blocking(move || served.leave()).await {
            Ok(Err(still)) => served = still,
            _ => return,
        }
    }
}
