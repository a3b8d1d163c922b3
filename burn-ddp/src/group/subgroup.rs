//! Communicators created from another one, with all or some of its ranks.

use std::sync::atomic::Ordering;

use super::{ProcessGroup, Settings};
use crate::{
    Call, CallKind, DdpError, ElementType, Flaw, ReduceOp,
    collective::Collective,
    transport::{Deadline, Incoming, Outgoing, Transport},
};

impl ProcessGroup {
    /// An independent communicator of the same ranks, like `MPI_Comm_dup`: it has its own connections, so that
    /// another thread can use it at the same time. All ranks call this together. Each rank must create its
    /// communicators from one thread at a time.
    ///
    /// # Errors
    ///
    /// Those of every collective call.
    pub fn duplicate(&self) -> Result<Self, DdpError> {
        let inner = &self.inner;
        let everyone: Vec<usize> = (0..inner.world_size).collect();
        let transport = self.run(
            (CallKind::Duplicate, ReduceOp::Max, 1, 0),
            ElementType::U32,
            |call| {
                let id = self.agree_on_number(&call)?;
                Ok(call.transport.duplicate(id, &everyone, call.deadline))
            },
            || {
                let id = inner
                    .settings
                    .next_communicator
                    .fetch_add(1, Ordering::SeqCst);
                let deadline = Deadline::after(self.timeout);
                inner.transport.duplicate(id, &everyone, deadline)
            },
        )??;
        Ok(self.with_transport(transport, inner.rank, inner.world_size))
    }

    /// A communicator of some of the ranks, with its own connections, like PyTorch's `new_group`. `ranks` are
    /// ranks of this communicator; the first in the list becomes rank 0 of the new one, and so on. All ranks
    /// call this together with the same list; ranks that are not in it get `None`.
    ///
    /// Subgroups of subgroups work. A fault ends the whole job, and its error names ranks as
    /// [`init`](Self::init) numbered them.
    ///
    /// ```
    /// use burn_ddp::{LocalGroup, ReduceOp};
    ///
    /// std::thread::scope(|scope| {
    ///     for group in LocalGroup::new(4) {
    ///         scope.spawn(move || {
    ///             // Two machines of two ranks each.
    ///             let first = group.subgroup(&[0, 1]).unwrap();
    ///             let second = group.subgroup(&[2, 3]).unwrap();
    ///             let machine = first.or(second).unwrap();
    ///             let mut data = [group.rank() as f32];
    ///             machine.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    ///             assert_eq!(data, [if group.rank() < 2 { 1.0 } else { 5.0 }]);
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    ///
    /// [`DdpError::InvalidArgument`] when the list is empty, names a rank twice, or names one that does not exist. Or a
    /// fault of the group: [`DdpError::Diverged`] if the ranks' lists differ, or only another rank's list is invalid.
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<Self>, DdpError> {
        self.check_list(ranks)
            .map_err(|(flaw, error)| self.refuse(CallKind::Subgroup, flaw, error))?;
        let inner = &self.inner;
        if inner.world_size == 1 {
            return self.duplicate().map(Some);
        }
        let place = ranks.iter().position(|rank| *rank == inner.rank);
        let list: Vec<u8> = ranks
            .iter()
            .flat_map(|rank| (*rank as u64).to_le_bytes())
            .collect();
        let checksum = crc32fast::hash(&list) as usize;
        let transport = self.run(
            (CallKind::Subgroup, ReduceOp::Max, ranks.len(), checksum),
            ElementType::U32,
            |call| {
                let id = self.agree_on_number(&call)?;
                if place.is_none() {
                    return Ok(None);
                }
                let inner = call.transport.duplicate(id, ranks, call.deadline)?;
                let ranks = ranks.to_vec();
                Ok(Some(Box::new(Subset { inner, ranks }) as Box<dyn Transport>))
            },
            || None,
        )?;
        let place = place.zip(transport);
        Ok(place.map(|(rank, transport)| self.with_transport(transport, rank, ranks.len())))
    }

    /// Checks that each rank in the list exists and is listed once.
    fn check_list(&self, ranks: &[usize]) -> Result<(), (Flaw, DdpError)> {
        let invalid = |flaw, problem: String| Err((flaw, DdpError::InvalidArgument(problem)));
        if ranks.is_empty() {
            let problem = "a subgroup of no ranks; name at least one".into();
            return invalid(Flaw::NoRanks, problem);
        }
        for (position, rank) in ranks.iter().enumerate() {
            self.check_rank(*rank)
                .map_err(|error| (Flaw::UnknownRank, error))?;
            if ranks[..position].contains(rank) {
                let problem = format!("a subgroup with rank {rank} twice");
                return invalid(Flaw::RankTwice, problem);
            }
        }
        Ok(())
    }

    /// An id for a new communicator that none of the participating ranks has used yet.
    ///
    /// Ranks that created subgroups without each other have counted differently, so the highest count decides.
    fn agree_on_number(&self, call: &Collective<'_>) -> Result<u32, DdpError> {
        let next = &self.inner.settings.next_communicator;
        let mut number = [next.load(Ordering::SeqCst)];
        call.all_reduce(&mut number, ReduceOp::Max)?;
        next.fetch_max(number[0] + 1, Ordering::SeqCst);
        Ok(number[0])
    }

    fn with_transport(
        &self,
        transport: Box<dyn Transport>,
        rank: usize,
        world_size: usize,
    ) -> Self {
        let settings = Settings {
            timeout: self.timeout,
            ..self.inner.settings.clone()
        };
        Self::with_numbers(
            transport,
            rank,
            world_size,
            self.inner.job_rank,
            self.inner.local_rank,
            settings,
        )
    }
}

/// A transport between some of the ranks, which numbers them from 0.
struct Subset {
    inner: Box<dyn Transport>,
    /// The numbers of these ranks in `inner`.
    ranks: Vec<usize>,
}

impl Subset {
    fn numbers(&self, members: &[usize]) -> Vec<usize> {
        members.iter().map(|member| self.ranks[*member]).collect()
    }
}

impl Transport for Subset {
    fn exchange(
        &self,
        call: &Call,
        mut outgoing: Vec<Outgoing<'_>>,
        mut incoming: Vec<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<(), DdpError> {
        for outgoing in &mut outgoing {
            outgoing.peer = self.ranks[outgoing.peer];
        }
        for incoming in &mut incoming {
            incoming.peer = self.ranks[incoming.peer];
        }
        self.inner.exchange(call, outgoing, incoming, deadline)
    }

    fn duplicate(
        &self,
        id: u32,
        members: &[usize],
        deadline: Deadline,
    ) -> Result<Box<dyn Transport>, DdpError> {
        Ok(Box::new(Self {
            inner: self.inner.duplicate(id, &self.numbers(members), deadline)?,
            ranks: self.ranks.clone(),
        }))
    }

    fn blame(&self, call: &Call, waited_for: &[usize]) -> (Vec<usize>, String) {
        self.inner.blame(call, &self.numbers(waited_for))
    }

    fn silent(&self, call: &Call, waited_for: &[usize], deadline: Deadline) -> Option<DdpError> {
        let waited_for = self.numbers(waited_for);
        self.inner.silent(call, &waited_for, deadline)
    }

    fn number(&self, member: usize) -> usize {
        self.inner.number(self.ranks[member])
    }

    fn fail(&self, fault: DdpError) -> DdpError {
        self.inner.fail(fault)
    }

    fn fault(&self) -> Option<DdpError> {
        self.inner.fault()
    }
}
