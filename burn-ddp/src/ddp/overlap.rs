//! Gradients averaged while backward still runs, on a layered device.
//!
//! Burn's autodiff submits the gradient of a parameter that is marked as distributed the moment it
//! is final, as an all-reduce operation of the device. On a layered device such operations come to the
//! layers, in the order in which they were submitted. That order follows from the graph alone (the tape
//! is run by depth, and within a depth in the order of a traversal; no hash map decides), so that it is
//! the same on all ranks as long as their graphs are. Buckets are therefore filled as gradients come,
//! and need no layout made in advance.

use std::{
    fmt::{self, Debug},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use burn::{
    backend::DispatchDevice,
    module::{Module, ModuleMapper, Param},
    tensor::{DType, Device, Shape, Tensor, TensorData},
};
use burn_backend::{DeviceId, distributed::ReduceOperation};
use burn_layer::{FloatView, Layer, Reduced};

use super::{
    DdpConfig,
    values::{PendingValues, Values},
};
use crate::{DdpError, ProcessGroup};

/// Averages gradients while backward still runs.
///
/// Put its [layer](Self::layer) over a device, and give it to
/// [`Ddp::overlapped`](super::Ddp::overlapped). All ranks must use the same parameters in each step: one
/// that only some ranks use is an error that names it.
///
/// ```
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Tensor}};
/// use burn_ddp::{Ddp, DdpConfig, Overlap, ProcessGroup};
/// use burn_layer::Layers;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?
/// let overlap = Overlap::new(&group, DdpConfig::new())?;
/// let device = Layers::on(Device::flex()).layer(overlap.layer()).serve()?.autodiff();
/// let model = LinearConfig::new(4, 2).init(&device);
/// let mut ddp = Ddp::overlapped(&group, overlap, &model)?;
/// let model = ddp.broadcast_parameters(model)?;
///
/// let loss = model.forward(Tensor::<2>::ones([8, 4], &device)).mean();
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let gradients = ddp.reduce_gradients(gradients, &model)?;
/// # let _ = gradients;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Overlap {
    reducer: Arc<Reducer>,
}

impl Overlap {
    /// Prepares for a group, with connections of its own for the gradients. All ranks call this.
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn new(group: &ProcessGroup, config: DdpConfig) -> Result<Self, DdpError> {
        let reducer = Reducer {
            group: group.duplicate()?,
            config,
            state: Mutex::default(),
        };
        Ok(Self {
            reducer: Arc::new(reducer),
        })
    }

    /// The layer. It goes outermost where there are several: gradients are then averaged in the type
    /// that the program sees.
    pub fn layer(&self) -> OverlapLayer {
        OverlapLayer {
            reducer: self.reducer.clone(),
        }
    }

    /// Waits until the device has run backward and all averages are there. Returns the number of
    /// gradients that were averaged since the last time.
    pub(super) fn finish(&self, device: &Device) -> Result<usize, DdpError> {
        let read = device.sync();
        read.map_err(|error| DdpError::Device(error.to_string()))?;
        self.reducer.finish()
    }

    pub(super) fn group(&self) -> &ProcessGroup {
        &self.reducer.group
    }

    pub(super) fn config(&self) -> &DdpConfig {
        &self.reducer.config
    }

    pub(super) fn bytes_reduced(&self) -> u64 {
        self.reducer.group.stats().bytes_reduced
    }

    /// When the buckets of the last backward pass were sent and came back.
    pub(super) fn timeline(&self) -> Timeline {
        self.reducer.state().timeline()
    }

    pub(super) fn waited(&self) -> Duration {
        self.reducer.state().waited
    }
}

/// The layer that averages gradients over the ranks. See [`Overlap`].
#[derive(Clone, Debug)]
pub struct OverlapLayer {
    reducer: Arc<Reducer>,
}

impl Layer for OverlapLayer {
    fn all_reduce(
        &self,
        tensor: FloatView<'_>,
        op: ReduceOperation,
        _devices: &[DeviceId],
    ) -> Option<Reduced> {
        Some(Reducer::submit(&self.reducer, tensor, op))
    }

    fn sync_collective(&self) -> bool {
        let mut state = self.reducer.state();
        self.reducer.close(&mut state);
        state.ended = Some(Instant::now());
        true
    }
}

/// When a backward pass sent its buckets, and when their averages were there; all times count from the
/// pass's first gradient.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// The buckets, in their order.
    pub buckets: Vec<BucketTimes>,
    /// When the last gradient had been submitted.
    pub backward_end: Duration,
}

/// The times of one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketTimes {
    /// Its size in bytes.
    pub bytes: usize,
    /// When it was full and its all-reduce started, or had to wait for the one before it.
    pub launched: Duration,
    /// When the averages were there, if they are.
    pub finished: Option<Duration>,
}

impl Timeline {
    /// The part of the communication time that backward hid, from 0 to 1.
    pub fn hidden(&self) -> f64 {
        let (mut hidden, mut total) = (0.0, 0.0);
        let mut free = Duration::ZERO;
        for bucket in &self.buckets {
            // One all-reduce at a time: a bucket's own begins when the one before it is done.
            let start = bucket.launched.max(free);
            let end = bucket.finished.unwrap_or(start).max(start);
            total += (end - start).as_secs_f64();
            hidden += self
                .backward_end
                .clamp(start, end)
                .saturating_sub(start)
                .as_secs_f64();
            free = end;
        }
        match total > 0.0 {
            true => hidden / total,
            false => 1.0,
        }
    }
}

struct Reducer {
    group: ProcessGroup,
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
    pending: Mutex<Option<PendingValues>>,
    values: OnceLock<Result<Values, DdpError>>,
}

impl Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("group", &self.group)
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
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under lock")
    }

    /// Puts a gradient in the open bucket; sends the bucket when it is full.
    fn submit(this: &Arc<Self>, tensor: FloatView<'_>, op: ReduceOperation) -> Reduced {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        let read = tensor
            .read()
            .map_err(|error| DdpError::Device(error.to_string()));
        let data = match read.and_then(Values::from_data) {
            Ok(values) => values,
            Err(error) => {
                // The other ranks must not wait for it; `Ddp` reports it.
                this.group.abort(error.to_string());
                return Reduced::Ready(TensorData::full_dtype(shape, 0.0, dtype));
            }
        };
        if this.group.world_size() == 1 || op != ReduceOperation::Mean {
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
        let carried = this.config.carried(dtype);
        let limit = match state.sent.is_empty() {
            true => this.config.first_bucket_bytes,
            false => this.config.bucket_bytes,
        };
        let fits =
            |open: &Open| open.dtype == carried && (open.len + len) * carried.size() <= limit;
        if state.open.as_ref().is_some_and(|open| !fits(open)) {
            this.close(&mut state);
        }
        let open = state.open.get_or_insert_with(|| Open {
            values: Vec::new(),
            len: 0,
            dtype: carried,
            averages: Arc::default(),
        });
        let (at, averages) = (open.len, open.averages.clone());
        open.len += len;
        open.values.push(data);
        if open.len * carried.size() >= limit {
            this.close(&mut state);
        }
        drop(state);
        let this = this.clone();
        Reduced::Deferred(Arc::new(move || {
            this.wait(&averages, at, shape.clone(), dtype)
        }))
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
        let pending = values.average_and(&self.group, move || {
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
    fn finish(&self) -> Result<usize, DdpError> {
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
        result.and_then(|()| self.group.fault().map_or(Ok(submitted), Err))
    }
}

impl Averages {
    fn pending(&self) -> MutexGuard<'_, Option<PendingValues>> {
        self.pending.lock().expect("no panic under lock")
    }

    fn wait(&self) -> Result<&Values, DdpError> {
        let values = self.values.get_or_init(|| {
            let pending = self.pending().take();
            pending.map_or_else(
                || Err(DdpError::InvalidArgument("a bucket was never sent".into())),
                PendingValues::wait,
            )
        });
        values.as_ref().map_err(Clone::clone)
    }
}

/// Whether a device is one that runs layers.
pub(super) fn is_layered(device: &Device) -> bool {
    matches!(
        device.clone().without_autodiff().as_dispatch(),
        DispatchDevice::Remote(_)
    )
}

/// Marks the trained parameters, so that backward submits their gradients.
pub(super) fn mark<M: Module>(model: M) -> M {
    struct Marker;

    impl ModuleMapper for Marker {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let id = param.id;
            match param.is_require_grad() {
                true => param.map(|tensor| tensor.set_distributed(id)),
                false => param,
            }
        }
    }

    model.map(&mut Marker)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_is_the_part_before_the_end_of_backward() {
        let ms = Duration::from_millis;
        let bucket = |launched, finished| BucketTimes {
            bytes: 1,
            launched: ms(launched),
            finished: Some(ms(finished)),
        };
        let timeline = |buckets| Timeline {
            buckets,
            backward_end: ms(100),
        };
        assert_eq!(timeline(vec![]).hidden(), 1.0);
        assert_eq!(timeline(vec![bucket(10, 60)]).hidden(), 1.0);
        assert_eq!(timeline(vec![bucket(100, 120)]).hidden(), 0.0);
        assert_eq!(timeline(vec![bucket(80, 120)]).hidden(), 0.5);
        // The second had to wait for the first.
        assert_eq!(
            timeline(vec![bucket(50, 90), bucket(60, 110)]).hidden(),
            50.0 / 60.0
        );
    }
}
