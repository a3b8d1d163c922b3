//! The thread that averages buckets.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use super::{CommHook, GradientBucket, Values};
use crate::{
    DdpError, Pending, ProcessGroup,
    group::{Worker, describe},
};

/// Averages buckets one after the other, while the caller goes on.
pub(super) struct Averager {
    pub(super) group: ProcessGroup,
    hook: Arc<dyn CommHook>,
    /// Separate from the group's own worker, so that a hook may make asynchronous calls.
    worker: Worker,
}

impl Averager {
    pub(super) fn new(group: ProcessGroup, hook: Arc<dyn CommHook>) -> Self {
        Self {
            group,
            hook,
            worker: Worker::default(),
        }
    }

    /// Starts to average a bucket. `then` runs when the averages have been computed.
    pub(super) fn start(
        &self,
        bucket: GradientBucket,
        then: impl FnOnce() + Send + 'static,
    ) -> Pending<Values> {
        let (group, hook) = (self.group.for_a_call(), self.hook.clone());
        self.group.submit_to(&self.worker, move || {
            let values = average(&*hook, &group, bucket);
            let values = values.map_err(|error| group.give_up(error))?;
            then();
            Ok(values)
        })
    }
}

fn average(
    hook: &dyn CommHook,
    group: &ProcessGroup,
    bucket: GradientBucket,
) -> Result<Values, DdpError> {
    let expected = (bucket.values.len(), bucket.values.dtype());
    let result = catch_unwind(AssertUnwindSafe(|| hook.average(group, bucket)));
    let values = result.unwrap_or_else(|panic| {
        let why = describe(&*panic);
        Err(group.abort(format!("the communication hook {hook:?} panicked: {why}")))
    })?;
    match (values.len(), values.dtype()) == expected {
        true => Ok(values),
        false => Err(DdpError::InvalidArgument(format!(
            "the communication hook {hook:?} returned {} values of type {:?}; expected {} of type {:?}",
            values.len(),
            values.dtype(),
            expected.0,
            expected.1
        ))),
    }
}
