//! Two ranks on two threads.

use burn_ddp::ProcessGroup;
use std::{
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
};

/// A second rank, on a thread of its own, that does its part of a job whenever the first rank does.
///
/// ```
/// use benches::Partner;
///
/// let (there, here) = std::sync::mpsc::channel();
/// let partner = Partner::new(move || there.send(1).unwrap());
/// partner.join_in(|| assert_eq!(here.recv(), Ok(1)));
/// ```
pub struct Partner {
    start: SyncSender<()>,
    finished: Receiver<()>,
}

impl Partner {
    /// A rank whose part is `work`.
    pub fn new(work: impl FnMut() + Send + 'static) -> Self {
        Self::with(move || work)
    }

    /// A rank whose part is the closure that `make` returns. `make` runs on the rank's thread.
    pub fn with<W: FnMut()>(make: impl FnOnce() -> W + Send + 'static) -> Self {
        let (start, started) = sync_channel::<()>(0);
        let (done, finished) = sync_channel(0);
        thread::spawn(move || {
            let mut work = make();
            while started.recv().is_ok() {
                work();
                if done.send(()).is_err() {
                    break;
                }
            }
        });
        Self { start, finished }
    }

    /// Runs `work` while the partner does its part. Returns when both are done.
    ///
    /// # Panics
    /// If the partner panicked.
    pub fn join_in(&self, work: impl FnOnce()) {
        self.start.send(()).expect("the partner is there");
        work();
        self.finished.recv().expect("the partner is there");
    }
}

/// Two ranks with TCP between them.
///
/// ```
/// let [first, second] = benches::tcp_groups();
/// assert_eq!((first.rank(), second.rank(), first.world_size()), (0, 1, 2));
/// ```
pub fn tcp_groups() -> [ProcessGroup; 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("file://{}", folder.path().join("master").display());
    thread::scope(|scope| {
        let second = scope.spawn(|| ProcessGroup::connect(&url, 1, 2).expect("rank 1 connects"));
        let first = ProcessGroup::connect(&url, 0, 2).expect("rank 0 connects");
        [first, second.join().expect("rank 1")]
    })
}
