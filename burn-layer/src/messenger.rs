//! [`Messenger`]: tells a device that the scope of a stream changes.

use crate::scopes::CHANGE;
use burn_ir::CustomOpIr;
use burn_remote::CustomOpClient;
use burn_std::id::StreamId;
use core::time::Duration;
use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    thread,
};

/// How long a thread waits until a device that it uses is told. After that, its next ops may overtake the change.
const USED: Duration = Duration::from_secs(10);

/// How long a thread waits for a device of which it is not known to have used it.
const UNUSED: Duration = Duration::from_secs(2);

/// How long a thread waits for a device that it uses, when a thread has waited in vain before.
const STUCK: Duration = Duration::from_secs(1);

/// Sends the changes of a device to its queue, those of a stream in their order.
pub(crate) struct Messenger {
    client: Arc<CustomOpClient>,
    /// To the messenger's own thread, if there is one.
    aside: OnceLock<Sender<Change>>,
    /// How far that thread is.
    progress: Arc<Progress>,
}

#[derive(Default)]
struct Progress {
    /// How many changes are still to be sent.
    waiting: AtomicUsize,
    /// Whether a thread has waited for one in vain, since the last one was sent.
    stuck: AtomicBool,
}

struct Change {
    stream: StreamId,
    sent: SyncSender<()>,
}

impl Messenger {
    pub(crate) fn new(client: CustomOpClient) -> Self {
        Self {
            client: Arc::new(client),
            aside: OnceLock::new(),
            progress: Arc::default(),
        }
    }

    /// Whether its own thread has sent everything.
    pub(crate) fn is_idle(&self) -> bool {
        self.progress.waiting.load(Ordering::Acquire) == 0
    }

    /// Sends a change of the stream, by the messenger's own thread, for which the caller should wait. `used`: whether the stream has
    /// used the device. If it has, and the device is the `only` one, nobody else can depend on it: the calling thread sends the change,
    /// and waits while the queue is full.
    pub(crate) fn send(&self, stream: StreamId, used: bool, only: bool) -> Option<Sent> {
        if used && only && self.is_idle() {
            send(&self.client, stream);
            return None;
        }
        let progress = self.progress.clone();
        progress.waiting.fetch_add(1, Ordering::AcqRel);
        let begin = || begin(self.client.clone(), progress.clone());
        let aside = self.aside.get_or_init(begin);
        let (sent, done) = sync_channel(1);
        // If the device is gone, so is the thread, and nobody has to be told.
        let _ = aside.send(Change { stream, sent });
        Some(Sent {
            done,
            used,
            progress,
        })
    }
}

fn begin(client: Arc<CustomOpClient>, progress: Arc<Progress>) -> Sender<Change> {
    let (aside, changes) = channel::<Change>();
    thread::spawn(move || {
        for change in changes {
            send(&client, change.stream);
            progress.stuck.store(false, Ordering::Release);
            progress.waiting.fetch_sub(1, Ordering::AcqRel);
            // The sender may have gone on.
            let _ = change.sent.send(());
        }
    });
    aside
}

fn send(client: &CustomOpClient, stream: StreamId) {
    let change = CustomOpIr::new(CHANGE, &[], &[]);
    stream.executes(|| client.register(change));
}

/// A change on its way to the queue of a device.
pub(crate) struct Sent {
    done: Receiver<()>,
    used: bool,
    progress: Arc<Progress>,
}

impl Sent {
    /// Waits until the change is in the queue, but not for ever.
    pub(crate) fn wait(self) {
        let limit = match (self.used, self.progress.stuck.load(Ordering::Acquire)) {
            (true, false) => USED,
            (true, true) => STUCK,
            (false, false) => UNUSED,
            (false, true) => Duration::ZERO,
        };
        if self.done.recv_timeout(limit) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        // Of those that wait in vain, one says so.
        if !self.progress.stuck.swap(true, Ordering::AcqRel) {
            log::warn!(
                "a layered device could not be told of a scope within {limit:?}, because another thread waits for the device: \
                 the next ops on it may not run in the scope that they belong to"
            );
        }
    }
}
