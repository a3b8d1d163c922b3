//! The stream on which gradients are averaged.

use std::sync::{Arc, Mutex};

use burn::tensor::Device;
use burn_ddp::{CommHook, DdpConfig, DdpError, GradientBucket, ProcessGroup, ReduceOp, Values};
use burn_std::id::StreamId;

use crate::suite::{net::train_overlapped, ranks::all_succeed};

/// Notes the stream on which buckets are averaged.
#[derive(Debug, Default)]
struct Streams(Arc<Mutex<Vec<StreamId>>>);

impl CommHook for Streams {
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
        self.0.lock().unwrap().push(StreamId::current());
        let mut values = bucket.values;
        values.all_reduce(group, ReduceOp::Mean)?;
        Ok(values)
    }
}

pub(super) fn averaged_on_the_trainers_stream(group: &ProcessGroup) -> Result<(), DdpError> {
    let hook = Streams::default();
    let streams = hook.0.clone();
    let config = DdpConfig::new()
        .bucket_bytes(100)
        .first_bucket_bytes(100)
        .hook(hook);
    train_overlapped(group, config, 12, Device::flex())?;
    let streams = streams.lock().unwrap();
    assert!(streams.len() > 40, "{}", streams.len());
    let own = StreamId::current();
    assert!(streams.iter().all(|stream| *stream == own), "{streams:?}");
    Ok(())
}

/// Another thread submits gradients during backward; CubeCL's tensors are of the stream that makes them.
#[test]
fn averages_are_made_on_the_stream_of_the_thread_that_trains() {
    all_succeed("overlapped stream", 2);
}
