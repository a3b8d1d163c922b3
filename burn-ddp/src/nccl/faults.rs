//! What ends an NCCL call from outside: faults of the group, and ranks that send no sign of life.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use crate::{DdpError, collective::Collective, stall::Stall};

/// How often to check for ranks that send no sign of life.
const LOOK: Duration = Duration::from_millis(500);

/// A function that returns the group's fault, if there is one, while NCCL is at work. That a rank sends no sign of life is a
/// fault too.
pub(super) fn faults<'a>(
    call: &'a Collective<'_>,
    waited_for: &'a [usize],
) -> impl Fn() -> Option<DdpError> + 'a {
    let (looked, stall) = (Cell::new(Instant::now()), Stall::new());
    move || {
        let fault = call.transport.fault();
        if fault.is_some() || looked.get().elapsed() < LOOK {
            return fault;
        }
        looked.set(Instant::now());
        let (transport, deadline) = (call.transport, call.deadline);
        let fault = transport.silent(&call.call, waited_for, deadline);
        if fault.is_none() {
            stall.look(transport, &call.call, waited_for, deadline);
        }
        fault
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::thread;

    use super::*;
    use crate::{
        Call, call,
        transport::{Deadline, Incoming, Outgoing, Transport},
    };

    /// A control plane that knows which rank to blame, and has no connections.
    pub(in crate::nccl) struct Knowing(pub(in crate::nccl) usize);

    impl Transport for Knowing {
        fn exchange(
            &self,
            _call: &Call,
            _outgoing: Vec<Outgoing<'_>>,
            _incoming: Vec<Incoming<'_>>,
            _deadline: Deadline,
        ) -> Result<(), DdpError> {
            Ok(())
        }

        fn duplicate(
            &self,
            _id: u32,
            _members: &[usize],
            _deadline: Deadline,
        ) -> Result<Box<dyn Transport>, DdpError> {
            Ok(Box::new(Self(self.0)))
        }

        fn blame(&self, _call: &Call, waited_for: &[usize]) -> (Vec<usize>, String) {
            assert!(waited_for.contains(&self.0));
            (vec![self.0], "no sign of life".into())
        }

        fn silent(&self, _: &Call, waited_for: &[usize], deadline: Deadline) -> Option<DdpError> {
            // A single rank waits for nobody.
            waited_for.first()?;
            assert!(waited_for.contains(&self.0) && deadline.silence < deadline.after);
            Some(DdpError::RankDied { rank: self.0 })
        }

        fn fail(&self, fault: DdpError) -> DdpError {
            fault
        }

        fn fault(&self) -> Option<DdpError> {
            None
        }
    }

    #[test]
    fn a_rank_that_says_nothing_ends_a_patient_call() {
        let patient = Deadline::after(Duration::from_secs(3600));
        let call = Collective {
            transport: &Knowing(2),
            rank: 0,
            world_size: 3,
            call: call::tests::barrier(),
            deadline: patient.with_silence(Duration::from_millis(1)),
        };
        let faults = faults(&call, &[1, 2]);
        // At first it is too early to check for silent ranks: faults are polled far more often.
        assert!(faults().is_none());
        thread::sleep(2 * LOOK);
        let fault = faults().unwrap();
        assert_eq!(fault.to_string(), call.transport.fail(died(2)).to_string());
        assert!(faults().is_none());
    }

    fn died(rank: usize) -> DdpError {
        DdpError::RankDied { rank }
    }
}
