//! Gradients are averaged in buckets, so that each message is large, and each bucket as soon as it
//! is full, so that it travels while the next is being filled.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use burn::tensor::DType;

use super::{CommHook, GradientBucket, Values, averager::Averager, presence::Presence};
use crate::{CallKind, DdpError, Flaw, Pending, ProcessGroup};

/// What one gradient looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its number of elements.
    pub len: usize,
    /// Its type.
    pub dtype: DType,
}

/// Sizes of buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSizes {
    /// Bytes of the first bucket: small, so that communication starts early.
    pub first: usize,
    /// Bytes of the others.
    pub others: usize,
}

/// One bucket: some gradients, one after the other.
struct Bucket {
    /// Each gradient's slot, and where it starts.
    members: Vec<(usize, usize)>,
    len: usize,
    dtype: DType,
    values: Option<Values>,
    missing: usize,
    pending: Option<Pending<Values>>,
}

/// Which slots go into each bucket: of each type as many as fit, in their order. A bucket comes before
/// those that are full later.
pub(super) fn layout(slots: &[Slot], sizes: BucketSizes) -> Vec<Vec<usize>> {
    let mut full: Vec<Vec<usize>> = Vec::new();
    // One of each type.
    let mut open: Vec<(Vec<usize>, usize)> = Vec::new();
    for (index, slot) in slots.iter().enumerate() {
        let size = slot.len * slot.dtype.size();
        let same = |(members, _): &(Vec<usize>, usize)| slots[members[0]].dtype == slot.dtype;
        let mut bucket = match open.iter().position(same) {
            None => (Vec::new(), 0),
            Some(at) => open.remove(at),
        };
        let limit = match full.is_empty() {
            true => sizes.first,
            false => sizes.others,
        };
        if !bucket.0.is_empty() && bucket.1 + size > limit {
            full.push(bucket.0);
            bucket = (Vec::new(), 0);
        }
        bucket.0.push(index);
        bucket.1 += size;
        open.push(bucket);
    }
    full.extend(open.into_iter().map(|(members, _)| members));
    full.sort_by_key(|members| members.last().copied());
    full
}

/// Averages gradients over the ranks, bucket by bucket.
///
/// It does not matter where gradients come from, nor in which order: each is handed over with
/// [`submit`](Self::submit) when it is ready, buckets are sent when full and in their fixed order
/// (the same on all ranks), and [`finish`](Self::finish) gives the averages back. A gradient that this
/// rank does not have counts as zero.
pub struct Bucketer {
    averager: Averager,
    slots: Vec<Slot>,
    buckets: Vec<Bucket>,
    /// The bucket of each slot, and the position in it.
    places: Vec<(usize, usize)>,
    launched: usize,
    /// For each slot that was submitted, whether this rank has its gradient.
    present: Vec<Option<bool>>,
    /// For each slot, whether any rank has.
    anywhere: Option<Pending<Vec<u8>>>,
    presence: Presence,
    waited: Duration,
}

impl Bucketer {
    /// Lays out buckets for gradients that are expected in the order of `slots`.
    ///
    /// The group is used from a thread of its own: give it a [duplicate](ProcessGroup::duplicate)
    /// when anything else communicates meanwhile. `hook` averages each bucket.
    pub fn new(
        group: ProcessGroup,
        slots: Vec<Slot>,
        sizes: BucketSizes,
        hook: Arc<dyn CommHook>,
    ) -> Self {
        let mut places = vec![(0, 0); slots.len()];
        let buckets: Vec<Bucket> = layout(&slots, sizes)
            .into_iter()
            .enumerate()
            .map(|(number, members)| {
                let mut len = 0;
                let mut starts = Vec::with_capacity(members.len());
                for (position, slot) in members.into_iter().enumerate() {
                    places[slot] = (number, position);
                    starts.push((slot, len));
                    len += slots[slot].len;
                }
                Bucket {
                    dtype: slots[starts[0].0].dtype,
                    missing: starts.len(),
                    members: starts,
                    len,
                    values: None,
                    pending: None,
                }
            })
            .collect();
        Self {
            averager: Averager::new(group, hook),
            present: vec![None; slots.len()],
            slots,
            buckets,
            places,
            launched: 0,
            anywhere: None,
            presence: Presence::new(false),
            waited: Duration::ZERO,
        }
    }

    /// Promises that this rank has the same gradients in each round, or none at all: see
    /// [`DdpConfig::static_graph`](super::DdpConfig::static_graph).
    #[must_use]
    pub fn static_graph(mut self, static_graph: bool) -> Self {
        self.presence = Presence::new(static_graph);
        self
    }

    /// The number of buckets.
    pub fn len(&self) -> usize {
        self.buckets.len()
    }

    /// Whether there is nothing to average.
    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// The bytes of the gradients of one round, before any compression.
    pub fn bytes(&self) -> usize {
        let bytes = |bucket: &Bucket| bucket.len * bucket.dtype.size();
        self.buckets.iter().map(bytes).sum()
    }

    /// The bytes given to all-reduces so far.
    pub(super) fn bytes_reduced(&self) -> u64 {
        self.averager.group.stats().bytes_reduced
    }

    /// The time spent in [`finish`](Self::finish) so far, waiting for averages.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Hands over the gradient of a slot, or says that this rank has none. Sends every bucket that
    /// is full and whose turn it is.
    ///
    /// # Errors
    ///
    /// [`DdpError::InvalidArgument`] when there is no such slot, or the gradient has another length or type, or
    /// was already submitted; [`DdpError::Aborted`], on all ranks, when a static graph was promised and the last
    /// gradient shows that it is none.
    pub fn submit(&mut self, slot: usize, gradient: Option<Values>) -> Result<(), DdpError> {
        let Some(&expected) = self.slots.get(slot) else {
            return Err(DdpError::InvalidArgument(format!(
                "gradient {slot}; expected a slot below {}",
                self.slots.len()
            )));
        };
        if let Some(gradient) = &gradient
            && (gradient.len(), gradient.dtype()) != (expected.len, expected.dtype)
        {
            return Err(DdpError::InvalidArgument(format!(
                "gradient {slot} has {} elements of type {:?}; expected {} of type {:?}",
                gradient.len(),
                gradient.dtype(),
                expected.len,
                expected.dtype
            )));
        }
        let (number, position) = self.places[slot];
        let bucket = &mut self.buckets[number];
        if self.present[slot].is_some() {
            return Err(DdpError::InvalidArgument(format!(
                "gradient {slot} was submitted twice"
            )));
        }
        if bucket.values.is_none() {
            bucket.values = Some(Values::zeros(bucket.len, bucket.dtype)?);
        }
        if let (Some(values), Some(gradient)) = (&mut bucket.values, &gradient) {
            values.put(bucket.members[position].1, gradient);
        }
        self.present[slot] = Some(gradient.is_some());
        bucket.missing -= 1;
        while let Some(bucket) = self.buckets.get_mut(self.launched)
            && bucket.missing == 0
            && let Some(values) = bucket.values.take()
        {
            let lens = bucket.members.iter().map(|(slot, _)| self.slots[*slot].len);
            let full = GradientBucket {
                index: self.launched,
                values,
                lens: lens.collect(),
            };
            bucket.pending = Some(self.averager.start(full, || ()));
            self.launched += 1;
        }
        if self.launched == self.buckets.len() {
            let present = self.present.iter().map(|it| u8::from(*it == Some(true)));
            let present: Vec<u8> = present.collect();
            let told = self.presence.ask(&self.averager.group, &present)?;
            self.anywhere = told.map(|flags| self.averager.start_any(flags));
        }
        Ok(())
    }

    /// Waits for all averages, and gets ready for the next round. A gradient that no rank has is
    /// `None`.
    ///
    /// # Errors
    ///
    /// A fault of the group, or [`DdpError::InvalidArgument`] when a slot was not submitted: ranks that submitted
    /// all then get [`DdpError::Diverged`].
    pub fn finish(&mut self) -> Result<Vec<Option<Values>>, DdpError> {
        let start = Instant::now();
        let complete = self.launched == self.buckets.len();
        self.launched = 0;
        self.present.fill(None);
        // Ready for the next round, whatever comes of this one.
        let sent: Vec<Option<Pending<Values>>> = self
            .buckets
            .iter_mut()
            .map(|bucket| {
                bucket.missing = bucket.members.len();
                bucket.values = None;
                bucket.pending.take()
            })
            .collect();
        let told = self.anywhere.take().map(Pending::wait).transpose()?;
        let anywhere = self.presence.told(told);
        let mut averages = vec![None; self.slots.len()];
        for (bucket, pending) in self.buckets.iter().zip(sent) {
            let Some(pending) = pending else {
                continue;
            };
            let values = pending.wait()?;
            for (slot, at) in &bucket.members {
                if anywhere.get(*slot) == Some(&1) {
                    averages[*slot] = Some(values.slice(*at, self.slots[*slot].len));
                }
            }
        }
        self.waited += start.elapsed();
        match complete {
            true => Ok(averages),
            false => {
                let error = DdpError::InvalidArgument("some gradients were not submitted".into());
                let group = &self.averager.group;
                Err(group.refuse(CallKind::AllReduce, Flaw::GradientsMissing, error))
            }
        }
    }
}
