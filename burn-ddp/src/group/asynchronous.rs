//! The collective calls on a thread of the group, while the caller goes on.
//!
//! Each is the call of the same name, made in the order in which it was submitted: asynchronous calls and
//! others share one queue. They take their data, and give back what the others leave in them.

use std::sync::MutexGuard;

use super::{Pending, ProcessGroup};
use crate::{DdpError, Element, ReduceOp};

impl ProcessGroup {
    /// For as long as a place is taken and its job handed over: the group's thread makes calls in the order in which it
    /// got them, and would wait for ever for a place that is behind it.
    pub(super) fn submitting(&self) -> MutexGuard<'_, ()> {
        let submitting = self.inner.submitting.lock();
        submitting.expect("no panic under lock")
    }

    /// Makes one call on the group's thread, at the place in the queue that is next now.
    pub(super) fn submit_call<R: Send + 'static>(
        &self,
        call: impl FnOnce(&Self) -> Result<R, DdpError> + Send + 'static,
    ) -> Pending<R> {
        let group = self.clone();
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
    /// Those of the call come from [`Pending::wait`], as they do from every asynchronous call.
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

    /// Starts a [`barrier`](Self::barrier) and returns at once: what comes of it tells that all ranks have
    /// come here.
    pub fn barrier_async(&self) -> Pending<()> {
        self.submit_call(|group| group.barrier())
    }

    /// Starts a [`send`](Self::send) and returns at once. Later calls wait until the data are on their way,
    /// which large data only are when the other rank receives: where two ranks have something for each
    /// other, [`send_recv`](Self::send_recv) is the call.
    pub fn send_async<T: Element>(&self, data: Vec<T>, to: usize) -> Pending<()> {
        self.submit_call(move |group| group.send(&data, to))
    }

    /// Starts a [`recv`](Self::recv) of as many elements as `data` has, which do not matter, and returns
    /// at once.
    pub fn recv_async<T: Element>(&self, mut data: Vec<T>, from: usize) -> Pending<Vec<T>> {
        self.submit_call(move |group| group.recv(&mut data, from).map(|()| data))
    }

    /// Starts a [`send_recv`](Self::send_recv) and returns at once; it gives back `into`.
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
