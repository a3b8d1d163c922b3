//! Drives an NCCL call from its start to its end, within a time limit: nothing that NCCL does may hold up a rank
//! forever.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::plan::Move;
use crate::{DdpError, collective::Collective, transport::Deadline};

/// An NCCL communicator. None of these functions waits, except that `abort` may take a while. Errors are NCCL's messages.
pub(super) trait Communicator {
    /// Hands calls to NCCL, as one group.
    fn enqueue(&mut self, moves: &[Move]) -> Result<(), String>;

    /// Whether NCCL has accepted all calls that it was handed (`ncclCommGetAsyncError`).
    fn accepted(&mut self) -> Result<bool, String>;

    /// Whether the device has completed all calls that NCCL was handed.
    fn finished(&mut self) -> Result<bool, String>;

    /// Stops all calls in progress. No other function is called afterwards.
    fn abort(&mut self);
}

/// Why a call failed. The communicator has been aborted.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The group has a fault.
    Fault(DdpError),
    /// The time is over.
    Late,
    /// NCCL failed.
    Failed(String),
}

impl Trouble {
    /// Fails the group because of trouble in a call that waits for the ranks of `waited_for`. Returns the group's fault.
    pub(super) fn fault(self, call: &Collective<'_>, waited_for: &[usize]) -> DdpError {
        let fault = match self {
            Self::Fault(fault) => return fault,
            Self::Late => {
                let (ranks, why) = call.transport.blame(&call.call, waited_for);
                DdpError::Timeout {
                    ranks,
                    call: call.call,
                    after: call.deadline.after,
                    why: format!("{why}; NCCL was at work"),
                }
            }
            Self::Failed(problem) => DdpError::NcclFailed {
                rank: call.transport.number(call.rank),
                call: call.call,
                problem,
            },
        };
        call.transport.fail(fault)
    }
}

/// Makes calls and waits until the device has done them. `fault` is polled meanwhile for a fault of the group.
pub(super) fn drive(
    communicator: &mut impl Communicator,
    moves: &[Move],
    deadline: Deadline,
    fault: impl Fn() -> Option<DdpError>,
) -> Result<(), Trouble> {
    let mut attempt = || {
        communicator.enqueue(moves).map_err(Trouble::Failed)?;
        wait(deadline, &fault, || communicator.accepted())?;
        wait(deadline, &fault, || {
            // A peer's trouble shows in the communicator's state, while the kernels spin.
            communicator.accepted()?;
            communicator.finished()
        })
    };
    let result = attempt();
    end(communicator, result, fault)
}

/// Waits until a new communicator has met its peers.
pub(super) fn meet(
    communicator: &mut impl Communicator,
    deadline: Deadline,
    fault: impl Fn() -> Option<DdpError>,
) -> Result<(), Trouble> {
    let result = wait(deadline, &fault, || communicator.accepted());
    end(communicator, result, fault)
}

/// How long to wait until the control plane reports a rank's death that NCCL may have noticed first.
const HEARSAY: Duration = Duration::from_millis(300);

/// Aborts the communicator if there was trouble. If NCCL failed because a rank is gone, it does not say which. The control
/// plane soon will.
fn end(
    communicator: &mut impl Communicator,
    result: Result<(), Trouble>,
    fault: impl Fn() -> Option<DdpError>,
) -> Result<(), Trouble> {
    let Err(trouble) = result else {
        return Ok(());
    };
    communicator.abort();
    let Trouble::Failed(problem) = trouble else {
        return Err(trouble);
    };
    let start = Instant::now();
    loop {
        if let Some(fault) = fault() {
            return Err(Trouble::Fault(fault));
        }
        if start.elapsed() > HEARSAY {
            return Err(Trouble::Failed(problem));
        }
        thread::sleep(NAP);
    }
}

/// How long a wait spins before it sleeps. Most calls are over by then.
const AWAKE: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);

fn wait(
    deadline: Deadline,
    fault: impl Fn() -> Option<DdpError>,
    mut done: impl FnMut() -> Result<bool, String>,
) -> Result<(), Trouble> {
    let start = Instant::now();
    loop {
        if done().map_err(Trouble::Failed)? {
            return Ok(());
        }
        if let Some(fault) = fault() {
            return Err(Trouble::Fault(fault));
        }
        if deadline.left().is_none() {
            return Err(Trouble::Late);
        }
        match start.elapsed() < AWAKE {
            true => thread::yield_now(),
            false => thread::sleep(NAP),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        Call, CallKind, ElementType, ReduceOp,
        transport::{Incoming, Outgoing, Transport},
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
    fn who_is_to_blame_for_being_late_the_control_plane_knows() {
        let call = Collective {
            transport: &Knowing(2),
            rank: 0,
            world_size: 4,
            call: Call {
                sequence: 7,
                kind: CallKind::AllReduce,
                dtype: ElementType::F32,
                op: ReduceOp::Sum,
                len: 1,
                root: 0,
                by_nccl: true,
                flaw: None,
            },
            deadline: seconds(60),
        };
        let fault = Trouble::Late.fault(&call, &[1, 2, 3]);
        let DdpError::Timeout { ranks, why, .. } = &fault else {
            panic!("{fault}");
        };
        assert_eq!(ranks, &[2]);
        assert!(
            why.contains("no sign of life") && why.contains("NCCL"),
            "{why}"
        );
        let fault = Trouble::Failed("unhandled cuda error".into()).fault(&call, &[1, 2, 3]);
        assert!(
            matches!(fault, DdpError::NcclFailed { rank: 0, .. }),
            "{fault}"
        );
    }

    /// A communicator that must be polled several times before it has accepted and done its calls.
    #[derive(Default)]
    struct Fake {
        takes: usize,
        works: usize,
        refuses: bool,
        breaks_after: Option<usize>,
        looks: usize,
        log: Vec<&'static str>,
    }

    impl Communicator for Fake {
        fn enqueue(&mut self, moves: &[Move]) -> Result<(), String> {
            assert_eq!(moves.len(), 1);
            self.log.push("enqueue");
            match self.refuses {
                true => Err("invalid usage".into()),
                false => Ok(()),
            }
        }

        fn accepted(&mut self) -> Result<bool, String> {
            self.looks += 1;
            match self.breaks_after {
                Some(looks) if self.looks > looks => Err("remote process exited".into()),
                _ => Ok(self.looks > self.takes),
            }
        }

        fn finished(&mut self) -> Result<bool, String> {
            assert!(
                self.looks > self.takes,
                "the device is asked once NCCL has taken all in"
            );
            self.works = self.works.saturating_sub(1);
            Ok(self.works == 0)
        }

        fn abort(&mut self) {
            self.log.push("abort");
        }
    }

    const MOVES: [Move; 1] = [Move::AllGather {
        from: 8,
        into: 16,
        count: 1,
    }];

    fn seconds(seconds: u64) -> Deadline {
        Deadline::after(Duration::from_secs(seconds))
    }

    #[test]
    fn it_waits_for_nccl_and_then_for_the_device() {
        let mut fake = Fake {
            takes: 3,
            works: 40,
            ..Fake::default()
        };
        drive(&mut fake, &MOVES, seconds(60), || None).unwrap();
        assert_eq!((fake.works, &fake.log[..]), (0, &["enqueue"][..]));
    }

    #[test]
    fn a_device_that_never_ends_is_late_and_aborted() {
        let short = Deadline::after(Duration::from_millis(20));
        let mut fake = Fake {
            works: usize::MAX,
            ..Fake::default()
        };
        assert!(matches!(
            drive(&mut fake, &MOVES, short, || None),
            Err(Trouble::Late)
        ));
        assert_eq!(fake.log, ["enqueue", "abort"]);

        let short = Deadline::after(Duration::from_millis(20));
        let mut fake = Fake {
            takes: usize::MAX,
            ..Fake::default()
        };
        assert!(matches!(
            meet(&mut fake, short, || None),
            Err(Trouble::Late)
        ));
        assert_eq!(fake.log, ["abort"]);
    }

    #[test]
    fn failures_say_what_nccl_says() {
        let refused = Fake {
            refuses: true,
            ..Fake::default()
        };
        let broken = Fake {
            works: usize::MAX,
            breaks_after: Some(5),
            ..Fake::default()
        };
        for (mut fake, text) in [
            (refused, "invalid usage"),
            (broken, "remote process exited"),
        ] {
            let result = drive(&mut fake, &MOVES, seconds(60), || None);
            assert!(matches!(result, Err(Trouble::Failed(problem)) if problem == text));
            assert_eq!(fake.log, ["enqueue", "abort"]);
        }
    }

    #[test]
    fn a_rank_that_nccl_loses_is_named_by_the_control_plane() {
        let mut fake = Fake {
            works: usize::MAX,
            breaks_after: Some(5),
            ..Fake::default()
        };
        let start = Instant::now();
        let died = || {
            let late = start.elapsed() > Duration::from_millis(30);
            late.then_some(DdpError::RankDied { rank: 3 })
        };
        let result = drive(&mut fake, &MOVES, seconds(60), died);
        assert!(matches!(
            result,
            Err(Trouble::Fault(DdpError::RankDied { rank: 3 }))
        ));
        assert_eq!(fake.log, ["enqueue", "abort"]);
    }

    #[test]
    fn a_fault_of_the_group_ends_the_wait() {
        let mut fake = Fake {
            works: usize::MAX,
            ..Fake::default()
        };
        let died = || Some(DdpError::RankDied { rank: 3 });
        let result = drive(&mut fake, &MOVES, seconds(60), died);
        assert!(matches!(
            result,
            Err(Trouble::Fault(DdpError::RankDied { rank: 3 }))
        ));
        assert_eq!(fake.log, ["enqueue", "abort"]);

        let mut fake = Fake {
            takes: usize::MAX,
            ..Fake::default()
        };
        assert!(matches!(
            meet(&mut fake, seconds(60), died),
            Err(Trouble::Fault(_))
        ));
        assert_eq!(fake.log, ["abort"]);
    }
}
