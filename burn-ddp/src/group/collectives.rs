//! The collective calls.

use std::sync::atomic::Ordering;

use super::{ProcessGroup, run::message};
use crate::{CallKind, DdpError, Element, ElementType, ReduceOp};

impl ProcessGroup {
    /// Combines the ranks' data, element by element. All ranks get the result, bitwise identical.
    ///
    /// Sums of `f16` and `bf16` are taken in `f32` and rounded once.
    ///
    /// # Errors
    ///
    /// A fault of the group, or [`DdpError::InvalidArgument`] for the mean of integers.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), DdpError> {
        let bytes = size_of_val(data) as u64;
        let len = data.len();
        self.run(
            (CallKind::AllReduce, op, len, 0),
            T::TYPE,
            |call| call.all_reduce(data, op),
            || (),
        )?;
        let counters = &self.inner.counters;
        counters.bytes_reduced.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Whether `value` is `true` on any rank.
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn all_reduce_any(&self, value: bool) -> Result<bool, DdpError> {
        let mut data = [u8::from(value)];
        self.all_reduce(&mut data, ReduceOp::Max)?;
        Ok(data[0] != 0)
    }

    /// Combines the ranks' data at `root`. The other ranks' data are unchanged.
    ///
    /// # Errors
    ///
    /// A fault of the group, or [`DdpError::InvalidArgument`] for a root that is not a rank or for the mean of integers.
    pub fn reduce<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<(), DdpError> {
        let len = data.len();
        self.run(
            (CallKind::Reduce, op, len, root),
            T::TYPE,
            |call| call.reduce(data, op, root),
            || (),
        )
    }

    /// Copies the data of `root` to all ranks.
    ///
    /// # Errors
    ///
    /// A fault of the group, or [`DdpError::InvalidArgument`] for a root that is not a rank.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), DdpError> {
        let len = data.len();
        self.run(
            (CallKind::Broadcast, ReduceOp::Sum, len, root),
            T::TYPE,
            |call| call.broadcast(data, root),
            || (),
        )
    }

    /// Copies the bytes of `root` to all ranks. The others need not know their number; the bytes they pass are ignored.
    ///
    /// # Errors
    ///
    /// As [`broadcast`](Self::broadcast).
    pub fn broadcast_bytes(&self, bytes: &[u8], root: usize) -> Result<Vec<u8>, DdpError> {
        let mut len = [bytes.len() as u64];
        self.broadcast(&mut len, root)?;
        let mut all = match self.rank() == root {
            true => bytes.to_vec(),
            false => vec![0; len[0] as usize],
        };
        self.broadcast(&mut all, root)?;
        Ok(all)
    }

    /// Concatenates the data of all ranks, in rank order. All ranks pass the same number of elements.
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn all_gather<T: Element>(&self, data: &[T]) -> Result<Vec<T>, DdpError> {
        self.run(
            (CallKind::AllGather, ReduceOp::Sum, data.len(), 0),
            T::TYPE,
            |call| call.all_gather(data),
            || data.to_vec(),
        )
    }

    /// Collects the data of each rank, which may differ in length.
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn all_gather_uneven<T: Element>(&self, data: &[T]) -> Result<Vec<Vec<T>>, DdpError> {
        // The lengths differ between ranks, so they cannot be part of the call.
        self.run(
            (CallKind::AllGatherUneven, ReduceOp::Sum, 0, 0),
            T::TYPE,
            |call| call.all_gather_uneven(data),
            || vec![data.to_vec()],
        )
    }

    /// Collects the bytes of each rank, such as a serialized value.
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, DdpError> {
        self.all_gather_uneven(bytes)
    }

    /// Combines the ranks' data; rank `i` gets part `i` of the result.
    ///
    /// # Errors
    ///
    /// A fault of the group, or [`DdpError::InvalidArgument`] when the number of elements is not a multiple of
    /// the world size, or for the mean of integers.
    pub fn reduce_scatter<T: Element>(&self, data: &[T], op: ReduceOp) -> Result<Vec<T>, DdpError> {
        self.run(
            (CallKind::ReduceScatter, op, data.len(), 0),
            T::TYPE,
            |call| call.reduce_scatter(data, op),
            || data.to_vec(),
        )
    }

    /// Sends part `i` of the data to rank `i`. Returns the parts that this rank receives, in rank order.
    ///
    /// # Errors
    ///
    /// A fault of the group, or [`DdpError::InvalidArgument`] when the number of elements is not a multiple of
    /// the world size.
    pub fn all_to_all<T: Element>(&self, data: &[T]) -> Result<Vec<T>, DdpError> {
        self.run(
            (CallKind::AllToAll, ReduceOp::Sum, data.len(), 0),
            T::TYPE,
            |call| call.all_to_all(data),
            || data.to_vec(),
        )
    }

    /// Waits until all ranks have reached this call.
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn barrier(&self) -> Result<(), DdpError> {
        self.run(
            (CallKind::Barrier, ReduceOp::Sum, 0, 0),
            ElementType::U8,
            |call| call.barrier(),
            || (),
        )
    }

    /// Sends data to one rank, which receives it with [`recv`](Self::recv).
    ///
    /// Returns when the data are on their way. For large data, this is when the other rank receives: two ranks
    /// that both send first wait for each other, and need [`send_recv`](Self::send_recv) instead.
    ///
    /// # Errors
    ///
    /// A fault of the group, or [`DdpError::InvalidArgument`] if `to` is this rank or not a rank.
    pub fn send<T: Element>(&self, data: &[T], to: usize) -> Result<(), DdpError> {
        self.check_peer(to)?;
        let (_turn, call) = self.message_call(T::TYPE, data.len(), to, true)?;
        call.send(data, to)
    }

    /// Receives data that rank `from` sends to this one.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize) -> Result<(), DdpError> {
        self.check_peer(from)?;
        let (_turn, call) = self.message_call(T::TYPE, data.len(), from, false)?;
        call.receive(data, from)
    }

    /// Sends data to one rank while receiving from the same or another rank, like `MPI_Sendrecv`. With it, two
    /// ranks can exchange large data, or all ranks pass data around a ring at once. Its messages are ordinary
    /// ones: the other ranks may also use [`send`](Self::send) and [`recv`](Self::recv).
    ///
    /// ```
    /// use burn_ddp::LocalGroup;
    ///
    /// std::thread::scope(|scope| {
    ///     for group in LocalGroup::new(3) {
    ///         scope.spawn(move || {
    ///             let (rank, ranks) = (group.rank(), group.world_size());
    ///             let mut received = [0];
    ///             let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    ///             group.send_recv(&[rank as i32], next, &mut received, previous).unwrap();
    ///             assert_eq!(received, [previous as i32]);
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub fn send_recv<T: Element>(
        &self,
        data: &[T],
        to: usize,
        into: &mut [T],
        from: usize,
    ) -> Result<(), DdpError> {
        self.check_peer(to)?;
        self.check_peer(from)?;
        let place = self.inner.order.take();
        let mut theirs = None;
        let call = self.call_at(place, |sequences| {
            theirs = Some(message(T::TYPE, sequences.next_from(from), into.len()));
            message(T::TYPE, sequences.next_to(to), data.len())
        })?;
        match call.zip(theirs) {
            Some(((_turn, call), theirs)) => call.send_receive(data, to, into, from, theirs),
            None => Ok(()),
        }
    }
}
