//! Futures that run on the stream on which they were created.

use burn_std::id::StreamId;
use core::future::{Future, poll_fn};
use tokio::runtime::{Handle, RuntimeFlavor};

/// Wraps `future` so that it is polled on the stream of the calling thread, whichever thread polls it.
///
/// A backend may do nothing before the first poll: CubeCL submits readbacks, and the kernels that make a tensor contiguous for
/// them, at that point. The service polls on a thread of its own, whose stream does not wait for the work on the program's
/// stream. That poll may also block until the device has computed what it reads (CubeCL waits for a fence, and may compile
/// kernels before). Meanwhile another thread serves the other devices.
pub(crate) fn on_this_stream<F: Future>(future: F) -> impl Future<Output = F::Output> + use<F> {
    let stream = StreamId::current();
    let mut future = Box::pin(future);
    poll_fn(move |context| let_others_run(|| stream.executes(|| future.as_mut().poll(context))))
}

/// Runs `poll`, which may block; on a thread of a runtime, after its other tasks were given to another thread.
fn let_others_run<R>(poll: impl FnOnce() -> R) -> R {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(poll),
        _ => poll(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_std::future::block_on;
    use std::{sync::mpsc, thread, time::Duration};

    #[test]
    fn every_poll_is_on_the_stream_of_the_maker() {
        let here = StreamId::current();
        let mut polls = 0;
        let future = on_this_stream(poll_fn(move |context| {
            polls += 1;
            assert_eq!(StreamId::current(), here);
            context.waker().wake_by_ref();
            match polls {
                3 => core::task::Poll::Ready(polls),
                _ => core::task::Poll::Pending,
            }
        }));
        let elsewhere = thread::spawn(move || {
            let own = StreamId::current();
            let polls = block_on(future);
            assert_eq!(StreamId::current(), own);
            (polls, own)
        });
        let (polls, own) = elsewhere.join().unwrap();
        assert_eq!(polls, 3);
        assert_ne!(own, here);
    }
    /// One that reads waits for what another one sends, on the runtime with a single worker that serves all devices.
    #[test]
    fn a_poll_that_blocks_holds_nobody_up() {
        let runtime = crate::service::runtime().unwrap();
        let (send, receive) = mpsc::channel();
        let limit = Duration::from_secs(60);
        let (waits, waiting) = mpsc::channel();
        let reads = runtime.spawn(on_this_stream(async move {
            waits.send(()).unwrap();
            receive.recv_timeout(limit)
        }));
        waiting.recv().unwrap();
        runtime.spawn(async move { send.send(7).unwrap() });
        assert_eq!(block_on(reads).unwrap(), Ok(7));
    }
}
