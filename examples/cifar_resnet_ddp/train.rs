//! The training loop. A single step is in `trainer.rs`.

use std::time::{Duration, Instant};

use burn_ddp::ProcessGroup;
use examples::batch::{Batcher, Normalization};
use examples::metrics::Metrics;
use examples::resnet::ResNet;
use examples::schedule::WarmupCosine;

use crate::checkpoint;
use crate::cli::Args;
use crate::device::Compute;
use crate::error::Error;
use crate::evaluate::{Evaluator, HeldOut};
use crate::feed::Feed;
use crate::log::{Log, Step};
use crate::setup::Setup;
use crate::trainer::Trainer;

/// The result of a run.
pub(crate) struct Outcome {
    /// The name of the data set.
    pub(crate) data: String,
    pub(crate) model: ResNet,
    pub(crate) held_out: HeldOut,
    /// The wall time of the loop.
    pub(crate) wall: Duration,
    /// Training images per second over all ranks, not counting the time of evaluation and checkpoints.
    pub(crate) images_per_second: f64,
    pub(crate) ranks: usize,
    pub(crate) bytes_reduced: u64,
    /// The numbers of ops by number format.
    pub(crate) ops: String,
    /// `None` on ranks other than 0.
    pub(crate) metrics: Option<Metrics>,
}

/// Trains according to `args`, from the start or from the checkpoint in `setup`.
pub(crate) fn train(args: &Args, setup: Setup, group: &ProcessGroup) -> Result<Outcome, Error> {
    let mut compute = Compute::new(args, setup.device.clone(), group)?;
    let mut trainer = Trainer::new(args, &setup, &mut compute, group)?;
    let device = &compute.device;
    let Setup {
        data,
        settings,
        steps,
        checkpoints,
        resume,
        ..
    } = setup;
    let batcher = Batcher {
        normalization: Normalization::of(&data.train),
        mirror: data.mirror,
        seed: args.seed,
    };
    let mut feed = Feed::new(args, &data.train, batcher, device, steps, group);
    let evaluator = Evaluator::new(&data.test, batcher, device, group);
    let schedule = WarmupCosine {
        peak: args.lr,
        warmup: args.warmup_epochs.saturating_mul(steps.per_epoch),
        total: steps.total,
    };
    let first = resume.map_or(0, |(checkpoint, _)| checkpoint.step as usize);
    let last = args
        .max_steps
        .unwrap_or(steps.total)
        .clamp(first, steps.total);
    let mut log = None;
    if group.is_main() {
        let dir = args.checkpoint_dir();
        if first == 0 {
            checkpoint::set_aside(&dir).map_err(|source| Error::Output { path: dir, source })?;
        }
        log = Some(Log::new(args, first..last, steps.per_epoch)?);
    }

    let started = Instant::now();
    let mut speed = Speed::default();
    let mut held_out = None;
    for step in first..last {
        let lr = schedule.at(step);
        let step_started = Instant::now();
        let loss = trainer.step(feed.batches(step), lr)?;
        speed.add(steps.images, step_started.elapsed());

        let done = step + 1;
        let ends_epoch = done % steps.per_epoch == 0 || done == last;
        held_out = match ends_epoch {
            true => Some(evaluator.evaluate(&trainer.valid_model()?)?),
            false => None,
        };
        if let Some(log) = &mut log {
            log.step(Step {
                done,
                epoch: step / steps.per_epoch + 1,
                lr,
                loss,
                images_per_second: speed.images_per_second(),
                held_out,
            })?;
        }
        // Always at the end of an epoch, because its accuracy decides which checkpoint is the best.
        let is_due = |every| done % every == 0;
        if ends_epoch || args.checkpoint_every.is_some_and(is_due) {
            let accuracy = held_out.map(|held_out| held_out.accuracy());
            trainer.save(&checkpoints, done, accuracy, &settings)?;
        }
    }
    let held_out = match held_out {
        Some(held_out) => held_out,
        // The run was already complete when it was resumed.
        None => evaluator.evaluate(&trainer.valid_model()?)?,
    };
    Ok(Outcome {
        data: data.name,
        model: trainer.model().clone(),
        held_out,
        wall: started.elapsed(),
        images_per_second: speed.images_per_second(),
        ranks: group.world_size(),
        bytes_reduced: trainer.bytes_reduced(),
        ops: compute.ops(),
        metrics: log.map(Log::finish),
    })
}

/// The number of images trained on, and the time that it took.
#[derive(Default)]
struct Speed {
    images: usize,
    time: Duration,
}

impl Speed {
    fn add(&mut self, images: usize, time: Duration) {
        self.images += images;
        self.time += time;
    }

    /// 0 before the first step.
    fn images_per_second(&self) -> f64 {
        match self.images {
            0 => 0.0,
            images => images as f64 / self.time.as_secs_f64(),
        }
    }
}
