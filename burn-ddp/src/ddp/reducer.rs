//! Fills buckets in the order in which backward makes gradients.

use std::{
    fmt::{self, Debug},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use burn::tensor::{DType, Shape, TensorData};
use burn_backend::distributed::ReduceOperation;
use burn_layer::{FloatView, Reduced};

use super::{BucketTimes, DdpConfig, GradientBucket, Timeline, Values, averager::Averager};
use crate::{DdpError, Pending, ProcessGroup};

/// Takes gradients in as they come, and averages them bucket by bucket.
pub(super) struct Reducer {
    averager: Averager,
    config: DdpConfig,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    open: Option<Open>,
    /// The buckets of this pass, or of the last when none has begun since.
    sent: Vec<Sent>,
    /// Gradients taken in since anyone asked.
    submitted: usize,
    began: Option<Instant>,
    ended: Option<Instant>,
    waited: Duration,
}

/// The bucket that is being filled.
struct Open {
    values: Vec<Values>,
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
    pending: Mutex<Option<Pending<Values>>>,
    values: OnceLock<Result<Values, DdpError>>,
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
        let read = tensor
            .read()
            .map_err(|error| DdpError::Device(error.to_string()));
        let data = match read.and_then(Values::from_data) {
            Ok(values) => values,
            Err(error) => {
                // The other ranks must not wait for it; `Ddp` reports it.
                this.group().abort(error.to_string());
                return Reduced::Ready(TensorData::full_dtype(shape, 0.0, dtype));
            }
        };
        if this.group().world_size() == 1 || op != ReduceOperation::Mean {
            // `Ddp` asks for means; anything else is not ours.
            return Reduced::Ready(data.into_data(shape, dtype));
        }
        let len = data.len();
        let mut state = this.state();
        if state.open.is_none() && state.ended.is_some() || state.began.is_none() {
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
        let fits = |open: &Open| open.dtype == dtype && (open.len + len) * dtype.size() <= limit;
        if state.open.as_ref().is_some_and(|open| !fits(open)) {
            this.close(&mut state);
        }
        let open = state.open.get_or_insert_with(|| Open {
            values: Vec::new(),
            len: 0,
            dtype,
            averages: Arc::default(),
        });
        let (at, averages) = (open.len, open.averages.clone());
        open.len += len;
        open.values.push(data);
        if open.len * dtype.size() >= limit {
            this.close(&mut state);
        }
        drop(state);
        let this = this.clone();
        Reduced::Deferred(Arc::new(move || {
            this.wait(&averages, at, shape.clone(), dtype)
        }))
    }

    /// Sends the last bucket: backward has ended.
    pub(super) fn end(&self) {
        let mut state = self.state();
        self.close(&mut state);
        state.ended = Some(Instant::now());
    }

    /// Sends the open bucket.
    fn close(&self, state: &mut State) {
        let Some(open) = state.open.take() else {
            return;
        };
        let finished = Arc::new(OnceLock::new());
        state.sent.push(Sent {
            averages: open.averages.clone(),
            bytes: open.len * open.dtype.size(),
            launched: Instant::now(),
            finished: finished.clone(),
        });
        let mut values = Values::zeros(open.len, open.dtype).expect("gradients are floats");
        let mut at = 0;
        for gradient in &open.values {
            values.put(at, gradient);
            at += gradient.len();
        }
        let bucket = GradientBucket {
            index: state.sent.len() - 1,
            values,
            lens: open.values.iter().map(Values::len).collect(),
        };
        let pending = self.averager.start(bucket, move || {
            finished.get_or_init(Instant::now);
        });
        *open.averages.pending() = Some(pending);
        open.averages.sent.store(true, Ordering::SeqCst);
    }

    /// The average of the gradient at a place of a bucket.
    fn wait(&self, averages: &Averages, at: usize, shape: Shape, dtype: DType) -> TensorData {
        if !averages.sent.load(Ordering::SeqCst) {
            // Needed before backward ended.
            self.close(&mut self.state());
        }
        match averages.wait() {
            Ok(values) => values
                .slice(at, shape.num_elements())
                .into_data(shape, dtype),
            // A fault is for `finish` to report, before anyone uses what is returned here.
            Err(_) => TensorData::full_dtype(shape, 0.0, dtype),
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

impl Averages {
    fn pending(&self) -> MutexGuard<'_, Option<Pending<Values>>> {
        self.pending.lock().expect("no panic under lock")
    }

    fn wait(&self) -> Result<&Values, DdpError> {
        let values = self.values.get_or_init(|| {
            let pending = self.pending().take();
            pending.map_or_else(
                || Err(DdpError::InvalidArgument("a bucket was never sent".into())),
                Pending::wait,
            )
        });
        values.as_ref().map_err(Clone::clone)
    }
}
