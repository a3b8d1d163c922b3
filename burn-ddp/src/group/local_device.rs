//! [`ProcessGroup::local_device`]: which of a machine's devices is a rank's own.

use burn::tensor::{Device, DeviceType};

use crate::{DdpError, ProcessGroup};

impl ProcessGroup {
    /// The device of a kind that belongs to this rank, as `torch.device("cuda", local_rank)` does in PyTorch: the ranks of a
    /// machine take its GPUs in turn, by their [local rank](Self::local_rank). Where there are fewer GPUs than ranks, as on a
    /// machine whose launcher shows each rank only its own GPU (`srun --gpus-per-task=1`), they begin again with the first one.
    ///
    /// ```
    /// use burn::tensor::{Device, DeviceType};
    /// use burn_ddp::ProcessGroup;
    ///
    /// let group = ProcessGroup::init_or_single()?;
    /// // On GPUs: DeviceType::Cuda, with the feature `cuda`.
    /// let device = group.local_device(DeviceType::Flex)?.autodiff();
    /// assert_eq!(device.inner(), Device::flex());
    /// # Ok::<(), burn_ddp::DdpError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`DdpError::NoDevice`] when this process sees no device of this kind.
    pub fn local_device(&self, kind: DeviceType) -> Result<Device, DdpError> {
        let device = own(&Device::enumerate(kind.clone()), self.local_rank());
        device.ok_or_else(|| DdpError::NoDevice {
            kind: format!("{kind:?}"),
        })
    }
}

fn own(devices: &[Device], local_rank: usize) -> Option<Device> {
    let own = local_rank.checked_rem(devices.len())?;
    Some(devices[own].clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_devices_in_turn() {
        let serve = |_| burn_layer::Layers::on(Device::flex()).serve().unwrap();
        let devices: Vec<Device> = (0..3).map(serve).collect();
        for (local_rank, expected) in [0, 1, 2, 0, 1].into_iter().enumerate() {
            assert_eq!(own(&devices, local_rank).as_ref(), Some(&devices[expected]));
        }
        assert_eq!(own(&devices[..1], 7).as_ref(), Some(&devices[0]));
        assert_eq!(own(&[], 0), None);
    }

    #[test]
    fn the_device_is_of_the_kind_that_is_asked_for() {
        let group = ProcessGroup::builder().local_rank(3);
        let group = group.connect("env://", 0, 1).unwrap();
        let device = group.local_device(DeviceType::Flex).unwrap();
        assert_eq!(device, Device::flex());
    }
}
