//! Averages that are there while backward still runs.

use std::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use burn::{
    module::{Module, Param},
    optim::GradientsParams,
    tensor::{Device, Tensor},
};
use burn_backend::{DeviceId, distributed::ReduceOperation};
use burn_ddp::{
    Average, CommHook, Ddp, DdpConfig, DdpError, GradientBucket, Overlap, ProcessGroup, Values,
};
use burn_layer::{FloatView, Layer, Layers, Reduced};

use crate::suite::ranks::all_succeed;

const PARAMETERS: usize = 5;

#[derive(Module, Debug)]
struct Chain {
    parameters: Vec<Param<Tensor<1>>>,
}

/// How many buckets have been averaged.
#[derive(Clone, Debug, Default)]
struct Averaged(Arc<(Mutex<usize>, Condvar)>);

impl CommHook for Averaged {
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
        let averages = Average.average(group, bucket)?;
        *self.0.0.lock().unwrap() += 1;
        self.0.1.notify_all();
        Ok(averages)
    }
}

/// Holds each gradient of backward back until those before it have been averaged, and counts them.
#[derive(Debug)]
struct Gate(Averaged, Arc<AtomicUsize>);

impl Layer for Gate {
    fn all_reduce(
        &self,
        _tensor: FloatView<'_>,
        _op: ReduceOperation,
        _devices: &[DeviceId],
    ) -> Option<Reduced> {
        let before = self.1.load(Ordering::SeqCst);
        let Averaged(averaged) = &self.0;
        let averages = averaged.0.lock().unwrap();
        // For ever, if they wait for the end of backward.
        let limit = Duration::from_secs(20);
        let waited = averaged
            .1
            .wait_timeout_while(averages, limit, |it| *it < before);
        if !waited.unwrap().1.timed_out() {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
        None
    }
}

/// Backward makes a gradient when those before it have been averaged.
pub(crate) fn when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    // Each gradient fills a bucket.
    let (averaged, passed) = (Averaged::default(), Arc::new(AtomicUsize::new(0)));
    let config = DdpConfig::new().bucket_bytes(4).first_bucket_bytes(4);
    let overlap = Overlap::new(group, config.hook(averaged.clone()))?;
    let layers = Layers::on(Device::flex()).layer(overlap.layer());
    let layers = layers.layer(Gate(averaged, passed.clone()));
    let device = layers.serve().unwrap().autodiff();
    let parameter = |_| Param::from_tensor(Tensor::<1>::ones([3], &device));
    let model = Chain {
        parameters: (0..PARAMETERS).map(parameter).collect(),
    };
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    let factors = model.parameters.iter().map(Param::val);
    let loss = factors.reduce(|product, it| product * it).unwrap().sum();
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    ddp.reduce_gradients(gradients, &model)?;
    assert_eq!(passed.load(Ordering::SeqCst), PARAMETERS);
    let timeline = ddp.timeline().unwrap();
    assert_eq!(timeline.buckets.len(), PARAMETERS);
    // Of the last two, it may be noted late.
    for bucket in &timeline.buckets[..PARAMETERS - 2] {
        let finished = bucket.finished.unwrap();
        assert!(finished < timeline.backward_end, "{timeline:?}");
    }
    assert!(timeline.hidden() > 0.0, "{timeline:?}");
    Ok(())
}

#[test]
fn averages_are_there_before_the_end_of_backward() {
    all_succeed("overlapped early", 2);
}
