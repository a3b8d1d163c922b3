//! Fills buckets in the order in which gradients arrive, and averages each as soon as it is full, so that it
//! travels while the next is being filled.

use std::{
    fmt::{self, Debug},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use burn::tensor::{DType, Shape};
use burn_std::id::StreamId;

use super::{
    BucketTimes, DdpConfig, DdpStats, GradientBucket, Timeline, averager::Averager,
    gradient::Gradient, hook::is_plain, parameters::Signature,
};
use crate::{DdpError, ProcessGroup, ReduceOp, TensorOp};

/// Takes gradients, in the same order on all ranks, and averages them bucket by bucket.
pub(super) struct Reducer {
    averager: Averager,
    config: DdpConfig,
    /// The stream of the thread that trains: the one that last waited for averages.
    stream: Mutex<StreamId>,
    state: Mutex<State>,
    /// Whether gradients stay on the device, if the group uses NCCL.
    stays: AtomicBool,
}

#[derive(Default)]
struct State {
    /// The buckets that are being filled, one for each type, in the order in which they were started.
    open: Vec<Open>,
    /// The buckets sent in this pass, or in the last one if none has begun since.
    sent: Vec<Sent>,
    /// The gradients and passes since the last call of [`taken`](Reducer::taken).
    taken: Taken,
    began: Option<Instant>,
    ended: Option<Instant>,
    waited: Duration,
    /// Whether only some ranks have had a batch since the last step of all. Burn submits the gradient of a parameter in its first
    /// pass alone, so if the parameters were not updated, the ranks would submit different ones.
    uneven: bool,
}

/// What has come to be averaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) gradients: usize,
    /// The number of elements of all these gradients.
    pub(super) elements: usize,
    /// The backward passes from the first gradient on. A pass before it is one of another model. A pass after it may be one over
    /// the same parameters, of which Burn submits no gradients a second time.
    pub(super) passes: usize,
}

/// A bucket that is being filled.
struct Open {
    gradients: Vec<Gradient>,
    shapes: Vec<Shape>,
    len: usize,
    dtype: DType,
    averages: Arc<Averages>,
}

/// A bucket that has been sent.
struct Sent {
    /// `None` once someone has waited for the averages.
    averages: Option<Arc<Averages>>,
    bytes: usize,
    launched: Instant,
    finished: Arc<OnceLock<Instant>>,
}

/// The averages of a bucket, which are set when someone first waits for them.
#[derive(Default)]
struct Averages {
    sent: AtomicBool,
    pending: Mutex<Option<Wait>>,
    bucket: OnceLock<Result<Gradient, DdpError>>,
}

/// Waits for the averages of a bucket.
type Wait = Box<dyn FnOnce() -> Result<Gradient, DdpError> + Send>;

/// Where to find the average of a gradient.
pub(super) struct Place {
    averages: Arc<Averages>,
    at: usize,
    len: usize,
}

impl Place {
    /// Waits for the average.
    pub(super) fn average(&self) -> Result<Gradient, DdpError> {
        Ok(self.averages.wait()?.slice(self.at, self.len))
    }
}

impl Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("group", &self.averager.group)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl State {
    fn timeline(&self) -> Timeline {
        let Some(began) = self.began else {
            return Timeline::default();
        };
        let since = |at: Instant| at.saturating_duration_since(began);
        let times = |sent: &Sent| BucketTimes {
            bytes: sent.bytes,
            launched: since(sent.launched),
            finished: sent.finished.get().copied().map(since),
        };
        Timeline {
            buckets: self.sent.iter().map(times).collect(),
            backward_end: self.ended.map(since).unwrap_or_default(),
        }
    }
}

impl Reducer {
    pub(super) fn new(group: ProcessGroup, config: DdpConfig) -> Self {
        Self {
            averager: Averager::new(group, config.hook.clone()),
            config,
            stream: Mutex::new(StreamId::current()),
            state: Mutex::default(),
            stays: AtomicBool::new(false),
        }
    }

    /// Decides whether the gradients of these parameters stay on the device, if the group uses NCCL.
    pub(super) fn decide_place(&self, trained: &[Signature]) {
        let stays = is_plain(&*self.config.hook, trained);
        self.stays.store(stays, Ordering::SeqCst);
    }

    /// Whether gradients are averaged, or go through a hook that does more than that, if there is one rank.
    pub(super) fn averages(&self) -> bool {
        self.group().world_size() > 1 || !self.stays_on_device()
    }

    pub(super) fn stays_on_device(&self) -> bool {
        self.stays.load(Ordering::SeqCst)
    }

    /// Runs `body` on the stream of the thread that trains, whichever thread takes gradients.
    ///
    /// CubeCL (0.11.3) orders work on a tensor after the stream that created it, and forgets other streams that
    /// have changed it since: if an optimizer writes parameters in place over averages of another stream, a
    /// later reader elsewhere may see stale parameters.
    pub(super) fn on_stream<R>(&self, body: impl FnOnce() -> R) -> R {
        let stream = *self.stream.lock().expect("no panic under lock");
        stream.executes(body)
    }

    pub(super) fn group(&self) -> &ProcessGroup {
        &self.averager.group
    }

    pub(super) fn config(&self) -> &DdpConfig {
        &self.config
    }

    pub(super) fn timeline(&self) -> Timeline {
        self.state().timeline()
    }

    pub(super) fn stats(&self) -> DdpStats {
        let state = self.state();
        DdpStats {
            steps: 0,
            buckets: state.sent.len(),
            bytes_reduced: self.group().stats().bytes_reduced,
            waited: state.waited,
        }
    }

    pub(super) fn set_uneven(&self, uneven: bool) {
        self.state().uneven = uneven;
    }

    pub(super) fn is_uneven(&self) -> bool {
        self.state().uneven
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under lock")
    }

    /// Adds a gradient of some shape to the open bucket of its type. Sends the bucket when it is full.
    pub(super) fn add(&self, gradient: Gradient, shape: Shape) -> Place {
        let (len, dtype) = (gradient.len(), gradient.dtype());
        let mut state = self.state();
        if state.open.is_empty() && state.ended.is_some() || state.began.is_none() {
            state.began = Some(Instant::now());
            state.ended = None;
            state.sent.clear();
        }
        state.taken.gradients += 1;
        state.taken.elements += len;
        let limit = self.config.bucket_limit(state.sent.is_empty());
        let position = state.open.iter().position(|open| open.dtype == dtype);
        let position = position.unwrap_or(state.open.len());
        if position == state.open.len() {
            state.open.push(Open {
                gradients: Vec::new(),
                shapes: Vec::new(),
                len: 0,
                dtype,
                averages: Arc::default(),
            });
        }
        let open = &mut state.open[position];
        let place = Place {
            averages: open.averages.clone(),
            at: open.len,
            len,
        };
        open.len += len;
        open.gradients.push(gradient);
        open.shapes.push(shape);
        if open.len * dtype.size() >= limit {
            let open = state.open.remove(position);
            self.send(&mut state, open);
        }
        place
    }

    /// Sends all open buckets at the end of a backward pass.
    pub(super) fn end(&self) {
        let mut state = self.state();
        if state.taken.gradients == 0 {
            return;
        }
        self.send_all(&mut state);
        state.taken.passes += 1;
        state.ended = Some(Instant::now());
    }

    /// Sends all open buckets if the average of a gradient is needed before the end.
    pub(super) fn hurry(&self, place: &Place) {
        if !place.averages.sent.load(Ordering::SeqCst) {
            self.send_all(&mut self.state());
        }
    }

    fn send_all(&self, state: &mut State) {
        for open in std::mem::take(&mut state.open) {
            self.send(state, open);
        }
    }

    fn send(&self, state: &mut State, open: Open) {
        let finished = Arc::new(OnceLock::new());
        state.sent.push(Sent {
            averages: Some(open.averages.clone()),
            bytes: open.len * open.dtype.size(),
            launched: Instant::now(),
            finished: finished.clone(),
        });
        let index = state.sent.len() - 1;
        let then = move || {
            finished.get_or_init(Instant::now);
        };
        let wait: Wait = match Gradient::join(open.gradients, open.dtype) {
            Gradient::Host(values) => {
                let bucket = GradientBucket {
                    index,
                    values,
                    shapes: open.shapes,
                };
                let pending = self.averager.start(bucket, then);
                Box::new(|| pending.wait().map(Gradient::Host))
            }
            Gradient::Device(bucket) => {
                let carried = self.config.hook.plain(open.dtype);
                let bucket = bucket.cast(carried.expect("the hook was asked before"));
                let mean = TensorOp::AllReduce(ReduceOp::Mean);
                let pending = self.group().collective_then(mean, bucket, then);
                Box::new(move || Ok(Gradient::Device(pending?.wait()?.cast(open.dtype).into())))
            }
        };
        *open.averages.pending() = Some(wait);
        open.averages.sent.store(true, Ordering::SeqCst);
    }

    /// The gradients and passes since the last call.
    pub(super) fn taken(&self) -> Taken {
        std::mem::take(&mut self.state().taken)
    }

    /// Waits for the averages of all buckets.
    pub(super) fn finish(&self) -> Result<(), DdpError> {
        *self.stream.lock().expect("no panic under lock") = StreamId::current();
        let start = Instant::now();
        let sent: Vec<_> = {
            let mut state = self.state();
            let sent = state.sent.iter_mut();
            sent.filter_map(|sent| sent.averages.take()).collect()
        };
        let result = sent
            .iter()
            .try_for_each(|averages| averages.wait().map(drop));
        self.state().waited += start.elapsed();
        // A gradient that could not be read has aborted the group.
        result.and_then(|()| self.group().fault().map_or(Ok(()), Err))
    }
}

impl Averages {
    fn pending(&self) -> MutexGuard<'_, Option<Wait>> {
        self.pending.lock().expect("no panic under lock")
    }

    fn wait(&self) -> Result<&Gradient, DdpError> {
        let bucket = self.bucket.get_or_init(|| {
            let wait = self.pending().take();
            wait.map_or_else(
                || Err(DdpError::InvalidArgument("a bucket was never sent".into())),
                |wait| wait(),
            )
        });
        bucket.as_ref().map_err(Clone::clone)
    }
}
