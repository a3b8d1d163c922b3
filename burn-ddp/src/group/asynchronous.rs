//! Asynchronous collective calls, which run on a thread of the group while the caller goes on.
//!
//! Each does the same as the synchronous call of its name. Asynchronous and synchronous calls share one queue
//! and run in the order in which they were submitted. They take ownership of their data, and return them where
//! the synchronous call changes a slice in place.

use std::sync::MutexGuard;

use super::{Pending, ProcessGroup};
use crate::{DdpError, Element, ReduceOp};

impl ProcessGroup {
    /// A lock to hold while taking a place and handing over its job. The group's thread runs jobs in the order
    /// in which it gets them, so a job that arrived before one with an earlier place would block it.
    pub(super) fn submitting(&self) -> MutexGuard<'_, ()> {
        let submitting = self.inner.submitting.lock();
        submitting.expect("no panic under lock")
    }

    /// Makes one call on the group's thread, at the next place in the queue.
    pub(super) fn submit_call<R: Send + 'static>(
        &self,
        call: impl FnOnce(&Self) -> Result<R, DdpError> + Send + 'static,
    ) -> Pending<R> {
        let group = self.for_a_call();
        let _submitting = self.submitting();
        let place = self.inner.order.take();
        self.submit_to(&self.inner.worker, move || {
            place.reserve_for(|| call(&group))
        })
    }

    /// Starts an [`all_reduce`](Self::all_reduce) and returns at once.
    ///
    /// ```
    /// use burn_ddp::{LocalGroup, ReduceOp};
    ///
    /// std::thread::scope(|scope| {
    ///     for group in LocalGroup::new(2) {
    ///         scope.spawn(move || {
    ///             let sum = group.all_reduce_async(vec![1.0f32; 4], ReduceOp::Sum);
    ///             // ... other work ...
    ///             assert_eq!(sum.wait().unwrap(), [2.0; 4]);
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of the call are returned by [`Pending::wait`], for this and every asynchronous call.
    pub fn all_reduce_async<T: Element>(&self, mut data: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.submit_call(move |group| group.all_reduce(&mut data, op).map(|()| data))
    }

    /// Starts a [`reduce`](Self::reduce) and returns at once.
    pub fn reduce_async<T: Element>(
        &self,
        mut data: Vec<T>,
        op: ReduceOp,
        root: usize,
    ) -> Pending<Vec<T>> {
        self.submit_call(move |group| group.reduce(&mut data, op, root).map(|()| data))
    }

    /// Starts a [`broadcast`](Self::broadcast) and returns at once.
    pub fn broadcast_async<T: Element>(&self, mut data: Vec<T>, root: usize) -> Pending<Vec<T>> {
        self.submit_call(move |group| group.broadcast(&mut data, root).map(|()| data))
    }

    /// Starts an [`all_gather`](Self::all_gather) and returns at once.
    pub fn all_gather_async<T: Element>(&self, data: Vec<T>) -> Pending<Vec<T>> {
        self.submit_call(move |group| group.all_gather(&data))
    }

    /// Starts an [`all_gather_uneven`](Self::all_gather_uneven) and returns at once.
    pub fn all_gather_uneven_async<T: Element>(&self, data: Vec<T>) -> Pending<Vec<Vec<T>>> {
        self.submit_call(move |group| group.all_gather_uneven(&data))
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter) and returns at once.
    pub fn reduce_scatter_async<T: Element>(&self, data: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.submit_call(move |group| group.reduce_scatter(&data, op))
    }

    /// Starts an [`all_to_all`](Self::all_to_all) and returns at once.
    pub fn all_to_all_async<T: Element>(&self, data: Vec<T>) -> Pending<Vec<T>> {
        self.submit_call(move |group| group.all_to_all(&data))
    }

    /// Starts a [`barrier`](Self::barrier) and returns at once. [`Pending::wait`] returns when all ranks have reached it.
    pub fn barrier_async(&self) -> Pending<()> {
        self.submit_call(|group| group.barrier())
    }

    /// Starts a [`send`](Self::send) and returns at once. Later calls wait until the data are on their way, which for large
    /// data is when the other rank receives them. If two ranks have data for each other, use [`send_recv`](Self::send_recv).
    pub fn send_async<T: Element>(&self, data: Vec<T>, to: usize) -> Pending<()> {
        self.submit_call(move |group| group.send(&data, to))
    }

    /// Starts a [`recv`](Self::recv) of as many elements as `data` has (their values do not matter) and returns at once.
    pub fn recv_async<T: Element>(&self, mut data: Vec<T>, from: usize) -> Pending<Vec<T>> {
        self.submit_call(move |group| group.recv(&mut data, from).map(|()| data))
    }

    /// Starts a [`send_recv`](Self::send_recv) and returns at once. The result is `into` with the received data.
    pub fn send_recv_async<T: Element>(
        &self,
        data: Vec<T>,
        to: usize,
        mut into: Vec<T>,
        from: usize,
    ) -> Pending<Vec<T>> {
        self.submit_call(move |group| group.send_recv(&data, to, &mut into, from).map(|()| into))
    }
}
