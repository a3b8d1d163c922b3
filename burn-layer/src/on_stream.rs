//! Futures that run on the stream on which they were created.

use burn_std::id::StreamId;
use core::future::{Future, poll_fn};

/// Wraps `future` so that it is polled on the stream of the calling thread, whichever thread polls it.
///
/// A backend may do nothing before the first poll: CubeCL submits readbacks, and the kernels that make a tensor contiguous for
/// them, at that point. The service polls on a thread of its own, whose stream does not wait for the work on the program's
/// stream.
pub(crate) fn on_this_stream<F: Future>(future: F) -> impl Future<Output = F::Output> + use<F> {
    let stream = StreamId::current();
    let mut future = Box::pin(future);
    poll_fn(move |context| stream.executes(|| future.as_mut().poll(context)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_std::future::block_on;
    use std::thread;

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
}
