//! Fills buckets in the order in which backward makes gradients.

use std::{
    fmt::{self, Debug},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use burn::tensor::DType;
use burn_backend::distributed::ReduceOperation;
use burn_layer::{FloatView, Reduced};

use super::{
    BucketTimes, DdpConfig, GradientBucket, Timeline,
    averager::Averager,
    gradient::{Gradient, location, unreadable},
};
use crate::{DdpError, ProcessGroup, ReduceOp, TensorOp};

/// Takes gradients in as they come, and averages them bucket by bucket.
pub(super) struct Reducer {
    averager: Averager,
    config: DdpConfig,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The buckets that are being filled, one of each type, in the order in which they were begun.
    open: Vec<Open>,
    /// The buckets of this pass, or of the last when none has begun since.
    sent: Vec<Sent>,
    /// Gradients taken in since anyone asked.
    submitted: usize,
    began: Option<Instant>,
    ended: Option<Instant>,
    waited: Duration,
}

/// A bucket that is being filled.
struct Open {
    gradients: Vec<Gradient>,
    len: usize,
    dtype: DType,
    averages: Arc<Averages>,
}

/// A bucket on its way.
struct Sent {
    averages: Arc<Averages>,
    bytes: usize,
    launched: Instant,
    finished: Arc<OnceLock<Instant>>,
}

/// The averages of a bucket, once someone has waited for them.
#[derive(Default)]
struct Averages {
    sent: AtomicBool,
    pending: Mutex<Option<Wait>>,
    bucket: OnceLock<Result<Gradient, DdpError>>,
}

/// Waits for the averages of a bucket.
type Wait = Box<dyn FnOnce() -> Result<Gradient, DdpError> + Send>;

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
            state: Mutex::default(),
        }
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

    pub(super) fn waited(&self) -> Duration {
        self.state().waited
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under lock")
    }

    /// Puts a gradient in the open bucket; sends the bucket when it is full.
    pub(super) fn submit(this: &Arc<Self>, tensor: FloatView<'_>, op: ReduceOperation) -> Reduced {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        let gradient = this.take(tensor);
        let gradient = match gradient {
            Ok(gradient) => gradient,
            Err(error) => {
                // The other ranks must not wait for it; `Ddp` reports it.
                this.group().abort(error.to_string());
                return unreadable(shape, dtype);
            }
        };
        if this.group().world_size() == 1 || op != ReduceOperation::Mean {
            // `Ddp` asks for means; anything else is not ours.
            return gradient.unchanged(shape, dtype);
        }
        let len = gradient.len();
        let mut state = this.state();
        if state.open.is_empty() && state.ended.is_some() || state.began.is_none() {
            state.began = Some(Instant::now());
            state.ended = None;
            state.sent.clear();
        }
        state.submitted += 1;
        let sizes = this.config.sizes();
        let limit = match state.sent.is_empty() {
            true => sizes.first,
            false => sizes.others,
        };
        let mut position = state.open.iter().position(|open| open.dtype == dtype);
        if let Some(at) = position
            && (state.open[at].len + len) * dtype.size() > limit
        {
            let open = state.open.remove(at);
            this.send(&mut state, open);
            position = None;
        }
        let position = position.unwrap_or(state.open.len());
        if position == state.open.len() {
            state.open.push(Open {
                gradients: Vec::new(),
                len: 0,
                dtype,
                averages: Arc::default(),
            });
        }
        let open = &mut state.open[position];
        let (at, averages) = (open.len, open.averages.clone());
        open.len += len;
        let zeros = gradient.zeros();
        // The gradient may outlive the reducer, which has waited for the averages by then.
        let reducer = Arc::downgrade(this);
        let reduced = gradient.deferred(shape, dtype, move || {
            if let Some(reducer) = reducer.upgrade() {
                reducer.hurry(&averages);
            }
            // A fault is for `finish` to report, before anyone uses what is returned here.
            averages
                .wait()
                .map_or_else(|_| zeros(), |bucket| bucket.slice(at, len))
        });
        open.gradients.push(gradient);
        if open.len * dtype.size() >= limit {
            let open = state.open.remove(position);
            this.send(&mut state, open);
        }
        reduced
    }

    /// A gradient on its way to a bucket: it stays on its device where the group uses NCCL and the hook
    /// is one that NCCL can stand in for.
    fn take(&self, tensor: FloatView<'_>) -> Result<Gradient, DdpError> {
        let stays = match self.group().world_size() {
            1 => false,
            _ => {
                let by_nccl = self.group().stays(&location(tensor))?;
                by_nccl && self.config.hook.plain(tensor.dtype()).is_some()
            }
        };
        Gradient::of_view(tensor, stays)
    }

    /// Sends what is left: backward has ended.
    pub(super) fn end(&self) {
        let mut state = self.state();
        self.send_all(&mut state);
        state.ended = Some(Instant::now());
    }

    fn send_all(&self, state: &mut State) {
        for open in std::mem::take(&mut state.open) {
            self.send(state, open);
        }
    }

    fn send(&self, state: &mut State, open: Open) {
        let finished = Arc::new(OnceLock::new());
        state.sent.push(Sent {
            averages: open.averages.clone(),
            bytes: open.len * open.dtype.size(),
            launched: Instant::now(),
            finished: finished.clone(),
        });
        let index = state.sent.len() - 1;
        let lens = open.gradients.iter().map(Gradient::len).collect();
        let then = move || {
            finished.get_or_init(Instant::now);
        };
        let wait: Wait = match Gradient::join(open.gradients, open.dtype) {
            Gradient::Host(values) => {
                let bucket = GradientBucket {
                    index,
                    values,
                    lens,
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

    /// Sends what there is if a bucket is needed before backward has ended.
    fn hurry(&self, averages: &Averages) {
        if !averages.sent.load(Ordering::SeqCst) {
            self.send_all(&mut self.state());
        }
    }

    /// Waits for the averages of all buckets.
    pub(super) fn finish(&self) -> Result<usize, DdpError> {
        let start = Instant::now();
        let mut submitted = 0;
        let sent: Vec<Arc<Averages>> = {
            let mut state = self.state();
            std::mem::swap(&mut submitted, &mut state.submitted);
            state
                .sent
                .iter()
                .map(|sent| sent.averages.clone())
                .collect()
        };
        let result = sent
            .iter()
            .try_for_each(|averages| averages.wait().map(drop));
        self.state().waited += start.elapsed();
        // A gradient that could not be read has aborted the group.
        result.and_then(|()| self.group().fault().map_or(Ok(submitted), Err))
    }
}

/// What a layer gives back when nobody averages any more.
pub(super) fn unchanged(tensor: FloatView<'_>) -> Reduced {
    let (shape, dtype) = (tensor.shape(), tensor.dtype());
    match Gradient::of_view(tensor, false) {
        Ok(gradient) => gradient.unchanged(shape, dtype),
        Err(_) => unreadable(shape, dtype),
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
