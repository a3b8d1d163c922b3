//! The transport of a job with one rank: nothing travels, but the job can still be aborted.

use std::sync::{Arc, OnceLock};

use crate::{
    Call, DdpError,
    transport::{Deadline, Incoming, Outgoing, Transport},
};

/// The state that all communicators of the one rank share.
#[derive(Clone, Default)]
pub(super) struct Alone {
    fault: Arc<OnceLock<DdpError>>,
}

impl Transport for Alone {
    fn exchange(
        &self,
        _call: &Call,
        outgoing: Vec<Outgoing<'_>>,
        incoming: Vec<Incoming<'_>>,
        _deadline: Deadline,
    ) -> Result<(), DdpError> {
        assert!(
            outgoing.is_empty() && incoming.is_empty(),
            "there is nobody to talk to"
        );
        Ok(())
    }

    fn duplicate(
        &self,
        _id: u32,
        _members: &[usize],
        _deadline: Deadline,
    ) -> Result<Box<dyn Transport>, DdpError> {
        Ok(Box::new(self.clone()))
    }

    fn blame(&self, _call: &Call, waited_for: &[usize]) -> (Vec<usize>, String) {
        (waited_for.to_vec(), "there is no other rank".into())
    }

    fn fail(&self, fault: DdpError) -> DdpError {
        self.fault.get_or_init(|| fault).clone()
    }

    fn fault(&self) -> Option<DdpError> {
        self.fault.get().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Backend, ProcessGroup, ReduceOp,
        group::{Settings, TIMEOUT},
    };

    /// A job of one rank that asks for NCCL can make all calls without other ranks.
    #[test]
    fn calls_of_one_rank_need_no_other() {
        let settings = Settings::new(TIMEOUT, Backend::Nccl);
        let group = ProcessGroup::new(Box::new(Alone::default()), 0, 1, 0, settings);
        let mut data = [3.0f32, -1.0];
        group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
        group.broadcast(&mut data, 0).unwrap();
        assert_eq!(data, [3.0, -1.0]);
        assert_eq!(group.all_gather_uneven(&data).unwrap(), [data]);
        group.duplicate().unwrap().barrier().unwrap();
        let flex = burn::tensor::Device::flex();
        let found = group.tensor_backend(&flex);
        assert!(matches!(found, Err(DdpError::Nccl { rank: 0, .. })));
    }
}
