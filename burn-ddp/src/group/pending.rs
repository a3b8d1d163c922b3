//! Calls that run on another thread while the caller goes on.

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, mpsc},
    thread,
};

use burn_std::id::StreamId;

use super::ProcessGroup;
use crate::DdpError;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs asynchronous calls one after the other. It starts with the first call.
#[derive(Default)]
pub(crate) struct Worker {
    jobs: Mutex<Option<mpsc::Sender<Job>>>,
}

impl Worker {
    pub(crate) fn submit<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<R, DdpError> + Send + 'static,
    ) -> Pending<R> {
        self.submit_on(start, job).unwrap_or_else(Pending::failed)
    }

    /// The same, with a function that starts the thread. It is called if there is no thread yet; after a
    /// failure, the next job calls it again.
    fn submit_on<R: Send + 'static>(
        &self,
        start: impl FnOnce() -> io::Result<mpsc::Sender<Job>>,
        job: impl FnOnce() -> Result<R, DdpError> + Send + 'static,
    ) -> Result<Pending<R>, DdpError> {
        let (sender, result) = mpsc::sync_channel(1);
        let job: Job = Box::new(move || {
            // The receiver may have been dropped.
            let _ = sender.send(job());
        });
        let mut jobs = self.jobs.lock().expect("no panic under lock");
        let jobs = match &mut *jobs {
            Some(jobs) => jobs,
            none => none.insert(start().map_err(|error| {
                DdpError::io("starting the thread of asynchronous calls", error)
            })?),
        };
        jobs.send(job)
            .expect("the thread takes jobs for as long as it may get any");
        Ok(Pending { result })
    }
}

impl ProcessGroup {
    /// Makes an asynchronous call on a worker. If the call cannot be submitted, or panics, the job ends, so
    /// that the other ranks do not wait.
    ///
    /// Meanwhile the worker runs on the stream of the calling thread, so that its results belong to that
    /// stream: CubeCL (0.11.3) orders work on a tensor after the stream that created it, and forgets other
    /// streams that have changed it since.
    pub(crate) fn submit_to<R: Send + 'static>(
        &self,
        worker: &Worker,
        call: impl FnOnce() -> Result<R, DdpError> + Send + 'static,
    ) -> Pending<R> {
        self.submit_to_thread(worker, start, call)
    }

    fn submit_to_thread<R: Send + 'static>(
        &self,
        worker: &Worker,
        start: impl FnOnce() -> io::Result<mpsc::Sender<Job>>,
        call: impl FnOnce() -> Result<R, DdpError> + Send + 'static,
    ) -> Pending<R> {
        let (group, stream) = (self.for_a_call(), StreamId::current());
        let call = move || stream.executes(|| group.guarded(call));
        let pending = worker.submit_on(start, call);
        pending.unwrap_or_else(|error| Pending::failed(self.give_up(error)))
    }

    /// Runs the code of an asynchronous call. If it panics, the job ends, so that the other ranks do not wait.
    pub(crate) fn guarded<R>(
        &self,
        code: impl FnOnce() -> Result<R, DdpError>,
    ) -> Result<R, DdpError> {
        catch_unwind(AssertUnwindSafe(code)).unwrap_or_else(|panic| {
            let why = describe(&*panic);
            Err(self.abort(format!("an asynchronous call panicked: {why}")))
        })
    }
}

/// The message of a panic.
pub(crate) fn describe(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("for no reason in words")
}

fn start() -> io::Result<mpsc::Sender<Job>> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let thread = thread::Builder::new().name("ddp-calls".into());
    let run = |job: Job| {
        // Later jobs must still run. `Pending::wait` reports the panic.
        let _ = catch_unwind(AssertUnwindSafe(job));
    };
    thread.spawn(move || jobs.into_iter().for_each(run))?;
    Ok(sender)
}

/// The future result of an asynchronous call.
///
/// Dropping it does not cancel the call.
#[derive(Debug)]
#[must_use = "an asynchronous call is only known to have worked when it was waited for"]
pub struct Pending<R> {
    result: mpsc::Receiver<Result<R, DdpError>>,
}

impl<R> Pending<R> {
    fn failed(error: DdpError) -> Self {
        let (sender, result) = mpsc::sync_channel(1);
        sender.send(Err(error)).expect("there is room for one");
        Self { result }
    }

    /// Waits for the call to end.
    ///
    /// # Errors
    ///
    /// The errors of the call.
    pub fn wait(self) -> Result<R, DdpError> {
        self.result.recv().unwrap_or_else(|_| {
            let problem = "an asynchronous call panicked";
            Err(DdpError::InvalidArgument(problem.into()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LocalGroup;

    #[test]
    fn a_call_that_panics_ends_the_job_and_later_jobs_still_run() {
        let groups = LocalGroup::new(2);
        let panicking = groups[0].submit_call(|_| -> Result<(), DdpError> { panic!("on purpose") });
        let fault = panicking.wait().unwrap_err().to_string();
        assert_eq!(
            fault,
            "rank 0 aborted: an asynchronous call panicked: on purpose"
        );
        // The place of the call in the queue is free for the next call.
        for group in &groups {
            assert_eq!(group.barrier().unwrap_err().to_string(), fault);
        }

        let worker = Worker::default();
        let pending = worker.submit(|| -> Result<(), DdpError> { panic!("on purpose") });
        assert!(pending.wait().unwrap_err().to_string().contains("panicked"));
        assert_eq!(worker.submit(|| Ok(7)).wait().unwrap(), 7);
    }

    #[test]
    fn results_are_of_the_stream_of_the_thread_that_asked() {
        let group = LocalGroup::new(1).remove(0);
        let worker = Worker::default();
        let ask = || {
            let call = || Ok((StreamId::current(), thread::current().id()));
            let (stream, thread) = group.submit_to(&worker, call).wait().unwrap();
            assert_ne!(thread, thread::current().id());
            assert_eq!(stream, StreamId::current());
            stream
        };
        let other = thread::scope(|scope| scope.spawn(ask).join().unwrap());
        assert_ne!(ask(), other);
    }

    #[test]
    fn a_thread_that_cannot_start_ends_the_job() {
        let groups = LocalGroup::new(2);
        let worker = Worker::default();
        let none = || Err(io::Error::other("too many threads"));
        let pending = groups[0].submit_to_thread(&worker, none, || Ok(()));
        let fault = pending.wait().unwrap_err().to_string();
        let expected =
            "rank 0 aborted: starting the thread of asynchronous calls: too many threads";
        assert_eq!(fault, expected);
        assert_eq!(groups[1].barrier().unwrap_err().to_string(), expected);
        // The next job tries again to start the thread.
        assert_eq!(worker.submit(|| Ok(7)).wait().unwrap(), 7);
    }
}
