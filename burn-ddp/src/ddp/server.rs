//! Burn's gradient server, to which backward submits gradients. One server handles all layered devices of a process, and
//! waits for each of the devices that it was started with; a second backward pass at the same time would wait forever.

use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::{
    Device,
    distributed::{DistributedConfig, DistributedContext, ReduceOperation},
};

use super::agreement::on_all_ranks;
use crate::{DdpError, ProcessGroup};

static TAKEN: AtomicBool = AtomicBool::new(false);

/// The gradient server of this process, reserved for one owner.
#[derive(Debug)]
pub(super) struct GradientServer {
    device: Device,
    /// While this exists, backward submits gradients.
    context: Option<DistributedContext>,
}

impl GradientServer {
    /// Reserves the server of each rank's process for the model's device there. All ranks call this.
    pub(super) fn take(group: &ProcessGroup, device: Device) -> Result<Self, DdpError> {
        let free = !TAKEN.swap(true, Ordering::SeqCst);
        let own = free.then(|| Self {
            device,
            context: None,
        });
        // A rank that went on alone would wait for the others.
        let own = own.ok_or_else(|| {
            "a process has one overlapped Ddp at a time, and this one has another already: drop it \
             first, start a process for each rank, or use Ddp::new, which averages after backward"
                .to_string()
        });
        on_all_ranks(group, own)
    }

    /// Sets whether backward submits gradients from now on.
    pub(super) fn listen(&mut self, listen: bool) {
        match listen {
            false => self.context = None,
            true => {
                let device = &self.device;
                self.context.get_or_insert_with(|| {
                    let config = DistributedConfig {
                        all_reduce_op: ReduceOperation::Mean,
                    };
                    DistributedContext::init(vec![device.clone()], config)
                });
            }
        }
    }
}

impl Drop for GradientServer {
    fn drop(&mut self) {
        self.context = None;
        TAKEN.store(false, Ordering::SeqCst);
    }
}
