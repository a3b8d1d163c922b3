//! Calls that run on another thread while the caller goes on.

use std::{
    sync::{Mutex, mpsc},
    thread,
};

use crate::DdpError;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that makes asynchronous calls, one after the other. It starts with the first one.
#[derive(Default)]
pub(crate) struct Worker {
    jobs: Mutex<Option<mpsc::Sender<Job>>>,
}

impl Worker {
    pub(crate) fn submit<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<R, DdpError> + Send + 'static,
    ) -> Pending<R> {
        let (sender, result) = mpsc::sync_channel(1);
        let job: Job = Box::new(move || {
            // Nobody may be waiting for it.
            let _ = sender.send(job());
        });
        let mut jobs = self.jobs.lock().expect("no panic under lock");
        let jobs = jobs.get_or_insert_with(start);
        // A thread that could not be started drops the job, which shows in `Pending::wait`.
        let _ = jobs.send(job);
        Pending { result }
    }
}

fn start() -> mpsc::Sender<Job> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let thread = thread::Builder::new().name("ddp-calls".into());
    let started = thread.spawn(move || jobs.into_iter().for_each(|job| job()));
    if let Err(error) = started {
        log::error!("burn-ddp: no thread for asynchronous calls: {error}");
    }
    sender
}

/// The result of an asynchronous call, once it is there.
///
/// Dropping it does not take the call back.
#[derive(Debug)]
#[must_use = "an asynchronous call is only known to have worked when it was waited for"]
pub struct Pending<R> {
    result: mpsc::Receiver<Result<R, DdpError>>,
}

impl<R> Pending<R> {
    /// Waits for the call to end.
    ///
    /// # Errors
    ///
    /// Those of the call.
    pub fn wait(self) -> Result<R, DdpError> {
        self.result.recv().unwrap_or_else(|_| {
            Err(DdpError::InvalidArgument(
                "the thread for asynchronous calls could not be started".into(),
            ))
        })
    }
}
