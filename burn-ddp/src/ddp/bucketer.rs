//! Gradients are averaged in buckets, so that each message is large, and each bucket as soon as it
//! is full, so that it travels while the next is being filled.

use std::time::{Duration, Instant};

use burn::tensor::DType;

use super::values::{PendingValues, Values};
use crate::{DdpError, ProcessGroup};

/// A 16-bit type in which `f32` gradients travel. They are summed in `f32` and rounded once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Half precision: 11 bits of precision, values up to 65,504.
    F16,
    /// Brain floats: 8 bits of precision, the range of `f32`.
    BF16,
}

impl Compression {
    /// The type in which gradients of a type travel.
    pub(super) fn carried(this: Option<Self>, dtype: DType) -> DType {
        match (dtype, this) {
            (DType::F32, Some(compression)) => compression.dtype(),
            (dtype, _) => dtype,
        }
    }

    fn dtype(self) -> DType {
        match self {
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
        }
    }
}

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

/// One bucket: the gradients in it, one after the other, then a flag for each that says whether
/// this rank has it.
struct Bucket {
    /// Each gradient's slot, and where it starts.
    members: Vec<(usize, usize)>,
    len: usize,
    dtype: DType,
    values: Option<Values>,
    missing: usize,
    pending: Option<PendingValues>,
}

/// Averages gradients over the ranks, bucket by bucket.
///
/// It does not matter where gradients come from, nor in which order: each is handed over with
/// [`submit`](Self::submit) when it is ready, buckets are sent when full and in their fixed order
/// (the same on all ranks), and [`finish`](Self::finish) gives the averages back. A gradient that this
/// rank does not have counts as zero.
pub struct Bucketer {
    group: ProcessGroup,
    slots: Vec<Slot>,
    buckets: Vec<Bucket>,
    /// The bucket of each slot, and the position in it.
    places: Vec<(usize, usize)>,
    launched: usize,
    waited: Duration,
}

impl Bucketer {
    /// Lays out buckets for gradients that are expected in the order of `slots`.
    ///
    /// The group is used from a thread of its own: give it a [duplicate](ProcessGroup::duplicate)
    /// when anything else communicates meanwhile.
    pub fn new(
        group: ProcessGroup,
        slots: Vec<Slot>,
        sizes: BucketSizes,
        compression: Option<Compression>,
    ) -> Self {
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut places = Vec::with_capacity(slots.len());
        for (index, slot) in slots.iter().enumerate() {
            let dtype = Compression::carried(compression, slot.dtype);
            let limit = match buckets.len() {
                0 | 1 => sizes.first,
                _ => sizes.others,
            };
            let fits = |bucket: &Bucket| {
                bucket.dtype == dtype && (bucket.len + slot.len) * dtype.size() <= limit
            };
            if !buckets.last().is_some_and(fits) {
                buckets.push(Bucket {
                    members: Vec::new(),
                    len: 0,
                    dtype,
                    values: None,
                    missing: 0,
                    pending: None,
                });
            }
            let number = buckets.len() - 1;
            let bucket = &mut buckets[number];
            places.push((number, bucket.members.len()));
            bucket.members.push((index, bucket.len));
            bucket.len += slot.len;
        }
        for bucket in &mut buckets {
            bucket.missing = bucket.members.len();
        }
        Self {
            group,
            slots,
            buckets,
            places,
            launched: 0,
            waited: Duration::ZERO,
        }
    }

    /// The number of buckets.
    pub fn len(&self) -> usize {
        self.buckets.len()
    }

    /// Whether there is nothing to average.
    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// The bytes that one round of averaging gives to the group.
    pub fn bytes(&self) -> usize {
        let bytes = |bucket: &Bucket| (bucket.len + bucket.members.len()) * bucket.dtype.size();
        self.buckets.iter().map(bytes).sum()
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
    /// [`DdpError::InvalidArgument`] when the gradient has another length or type than the slot, or was
    /// already submitted.
    pub fn submit(&mut self, slot: usize, gradient: Option<Values>) -> Result<(), DdpError> {
        let expected = self.slots[slot];
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
        if bucket.missing == 0 {
            return Err(DdpError::InvalidArgument(format!(
                "gradient {slot} was submitted twice"
            )));
        }
        if bucket.values.is_none() {
            let len = bucket.len + bucket.members.len();
            bucket.values = Some(Values::zeros(len, bucket.dtype)?);
        }
        if let (Some(values), Some(gradient)) = (&mut bucket.values, &gradient) {
            values.put(bucket.members[position].1, gradient);
            values.set(bucket.len + position, 1.0);
        }
        bucket.missing -= 1;
        while let Some(bucket) = self.buckets.get_mut(self.launched)
            && bucket.missing == 0
        {
            let values = bucket.values.take();
            bucket.pending = values.map(|values| values.average(&self.group));
            self.launched += 1;
        }
        Ok(())
    }

    /// Waits for all averages, and gets ready for the next round. A gradient that no rank has is
    /// `None`.
    ///
    /// # Errors
    ///
    /// A fault of the group, or [`DdpError::InvalidArgument`] when a slot was not submitted.
    pub fn finish(&mut self) -> Result<Vec<Option<Values>>, DdpError> {
        let start = Instant::now();
        let complete = self.launched == self.buckets.len();
        self.launched = 0;
        let mut averages = vec![None; self.slots.len()];
        for bucket in &mut self.buckets {
            bucket.missing = bucket.members.len();
            bucket.values = None;
            let Some(pending) = bucket.pending.take() else {
                continue;
            };
            let values = pending.wait()?;
            for (position, (slot, at)) in bucket.members.iter().enumerate() {
                if values.is_positive(bucket.len + position) {
                    averages[*slot] = Some(values.slice(*at, self.slots[*slot].len));
                }
            }
        }
        self.waited += start.elapsed();
        match complete {
            true => Ok(averages),
            false => Err(DdpError::InvalidArgument(
                "some gradients were not submitted".into(),
            )),
        }
    }
}
