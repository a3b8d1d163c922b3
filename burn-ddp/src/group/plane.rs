//! How tensors travel. All ranks agree on it together, before the first tensor.

#[cfg(feature = "nccl")]
use std::sync::Arc;

use burn::{backend::Backend as BurnBackend, tensor::Device};

use super::ProcessGroup;
#[cfg(feature = "nccl")]
use crate::nccl::{Link, cuda_ordinal, offer, open};
use crate::{
    Backend, CallKind, DdpError, ElementType, NcclError, ReduceOp,
    backend::{Choice, Offer, choose},
    collective::Collective,
};

/// The way in which a communicator's tensors travel.
#[derive(Clone)]
pub(crate) enum Plane {
    Host,
    #[cfg(feature = "nccl")]
    Nccl(Arc<Link>),
}

/// Where a tensor is: which CUDA device, if any, and the device's name for errors.
#[derive(Clone, Debug)]
pub(crate) struct Location {
    /// The number of the CUDA device, if the tensor is on one.
    #[cfg(feature = "nccl")]
    pub(crate) cuda: Option<usize>,
    name: String,
}

impl Location {
    pub(crate) fn of_device(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        let name = format!("{device:?}");
        match device.as_dispatch() {
            #[cfg(feature = "nccl")]
            burn::backend::DispatchDevice::Cube(device) => Self::new(device, name),
            device => Self::new(device, name),
        }
    }

    pub(crate) fn of_primitives<B: BurnBackend>(device: &B::Device) -> Self {
        Self::new(device, format!("{device:?}"))
    }

    /// A place that NCCL cannot reach.
    pub(crate) fn elsewhere(name: &str) -> Self {
        Self::new(&(), name.into())
    }

    /// Whether NCCL may be able to move tensors from there, depending on the group.
    fn may_use_nccl(&self) -> bool {
        #[cfg(feature = "nccl")]
        return self.cuda.is_some();
        #[cfg(not(feature = "nccl"))]
        false
    }

    fn new<T: 'static>(device: &T, name: String) -> Self {
        let _ = device;
        Self {
            #[cfg(feature = "nccl")]
            cuda: cuda_ordinal(device),
            name,
        }
    }
}

impl ProcessGroup {
    /// How the tensors of a device travel in this communicator: [`Backend::Nccl`] or [`Backend::Host`], to one of
    /// which [`Backend::Auto`] has been resolved.
    ///
    /// The first call makes all ranks agree on it, so all of them must call this together, each with its own
    /// device; calls with tensors do this by themselves. The choice is final. In a communicator with NCCL, a
    /// rank's tensors on other devices go through the host.
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use burn_ddp::{Backend, LocalGroup};
    ///
    /// std::thread::scope(|scope| {
    ///     for group in LocalGroup::new(2) {
    ///         scope.spawn(move || {
    ///             let backend = group.tensor_backend(&Device::flex()).unwrap();
    ///             assert_eq!(backend, Backend::Host); // no GPU
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    ///
    /// [`DdpError::Nccl`], on all ranks, if [`Backend::Nccl`] was requested and a rank cannot use it; the error says
    /// which rank and why. [`DdpError::InvalidArgument`] if ranks request different backends. Or a fault of the group.
    pub fn tensor_backend(&self, device: &Device) -> Result<Backend, DdpError> {
        let location = Location::of_device(device);
        Ok(match self.plane(&location)? {
            Plane::Host => Backend::Host,
            #[cfg(feature = "nccl")]
            Plane::Nccl(_) => Backend::Nccl,
        })
    }

    /// Whether NCCL could be used, but for the layers over the device.
    pub(crate) fn hides_gpu(&self, device: &Device) -> bool {
        let under = burn_layer::device_under(device);
        let reachable = under.is_some_and(|under| Location::of_device(&under).may_use_nccl());
        reachable && self.inner.settings.backend == Backend::Auto
    }

    /// How tensors at `location` travel.
    pub(crate) fn plane(&self, location: &Location) -> Result<Plane, DdpError> {
        let mut settled = self.inner.plane.lock().expect("no panic under lock");
        let plane = match &*settled {
            Some(plane) => plane.clone()?,
            None => settled.insert(self.settle(location)).clone()?,
        };
        #[cfg(feature = "nccl")]
        if let Plane::Nccl(link) = &plane
            && location.cuda != Some(link.ordinal())
        {
            return Ok(Plane::Host);
        }
        Ok(plane)
    }

    /// Whether calls leave float tensors at `location` on their device.
    pub(crate) fn stays(&self, location: &Location) -> Result<bool, DdpError> {
        Ok(!matches!(self.plane(location)?, Plane::Host))
    }

    /// The same for a message. Its two ranks alone cannot make all ranks agree: until they have, a tensor that
    /// can only go through the host does so, and for any other tensor the result is `None`.
    pub(super) fn plane_of_message(&self, location: &Location) -> Result<Option<Plane>, DdpError> {
        let settled = self.inner.plane.lock().expect("no panic under lock");
        if settled.is_some() || self.world_size() == 1 {
            drop(settled);
            return self.plane(location).map(Some);
        }
        Ok(match self.inner.settings.backend {
            Backend::Host => Some(Plane::Host),
            Backend::Auto if !location.may_use_nccl() => Some(Plane::Host),
            Backend::Auto | Backend::Nccl => None,
        })
    }

    fn settle(&self, location: &Location) -> Result<Plane, DdpError> {
        self.run(
            (CallKind::Backend, ReduceOp::Sum, 0, 0),
            ElementType::U8,
            |call| self.settle_together(&call, location),
            || Plane::Host,
        )
    }

    fn settle_together(
        &self,
        call: &Collective<'_>,
        location: &Location,
    ) -> Result<Plane, DdpError> {
        let protocol = |rank: usize, error: serde_json::Error| DdpError::Protocol {
            rank: call.transport.number(rank),
            problem: format!("what it says of its backend: {error}"),
        };
        let asked = self.inner.settings.backend;
        let own = Offer {
            asked,
            nccl: match asked {
                Backend::Host => Err(NcclError::NotAsked),
                Backend::Auto | Backend::Nccl => own_nccl(location),
            },
            shares_gpus: std::env::var("NCCL_MULTI_RANK_GPU_ENABLE")
                .is_ok_and(|value| value == "1"),
        };
        let own = serde_json::to_vec(&own).map_err(|error| protocol(call.rank, error))?;
        let offers = call.all_gather_uneven(&own)?;
        let offers: Result<Vec<Offer>, DdpError> = offers
            .iter()
            .enumerate()
            .map(|(rank, text)| {
                let offer = serde_json::from_slice(text).map_err(|error| protocol(rank, error));
                offer.map_err(|fault| call.transport.fail(fault))
            })
            .collect();
        match choose(&offers?, |member| call.transport.number(member))? {
            Choice::Host(why) => {
                if call.rank == 0 {
                    log::info!("burn-ddp: tensors go through the host: {why}");
                }
                Ok(Plane::Host)
            }
            Choice::Nccl => link(call, location),
        }
    }
}

#[cfg(feature = "nccl")]
fn own_nccl(location: &Location) -> Result<(crate::backend::Gpu, crate::NcclVersion), NcclError> {
    let ordinal = location.cuda.ok_or_else(|| NcclError::NotOnCuda {
        device: location.name.clone(),
    })?;
    offer(ordinal)
}

#[cfg(feature = "nccl")]
fn link(call: &Collective<'_>, location: &Location) -> Result<Plane, DdpError> {
    let ordinal = location.cuda.expect("NCCL is chosen where all are on CUDA");
    Ok(Plane::Nccl(Arc::new(open(call, ordinal)?)))
}

#[cfg(not(feature = "nccl"))]
fn own_nccl(location: &Location) -> Result<(crate::backend::Gpu, crate::NcclVersion), NcclError> {
    log::debug!("burn-ddp: tensors on {}, built without NCCL", location.name);
    Err(NcclError::NotCompiledIn)
}

#[cfg(not(feature = "nccl"))]
fn link(_call: &Collective<'_>, _location: &Location) -> Result<Plane, DdpError> {
    unreachable!("NCCL is chosen where all ranks have it")
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_layer::Layers;

    #[test]
    fn layers_hide_a_gpu_if_there_is_one_under_them() {
        let group = ProcessGroup::single();
        let layered = |device| Layers::on(device).serve().unwrap();
        assert!(!group.hides_gpu(&Device::flex()));
        assert!(!group.hides_gpu(&layered(Device::flex())));
        #[cfg(feature = "cuda")]
        match Device::enumerate(burn::tensor::DeviceType::Cuda).is_empty() {
            true => println!("skipped: no CUDA device"),
            false => {
                assert!(!group.hides_gpu(&Device::cuda(0)));
                assert!(group.hides_gpu(&layered(Device::cuda(0))));
            }
        }
    }
}
