//! The training loop. What one step does is in `trainer.rs`.

use std::time::{Duration, Instant};

use burn_ddp::ProcessGroup;
use examples::batch::{Batcher, Normalization};
use examples::checkpoint::Checkpoints;
use examples::metrics::Metrics;
use examples::resnet::ResNet;
use examples::schedule::WarmupCosine;

use crate::cli::Args;
use crate::device::Compute;
use crate::error::Error;
use crate::evaluate::{Evaluator, HeldOut};
use crate::feed::Feed;
use crate::log::{Log, Step};
use crate::setup::{Settings, Setup, State};
use crate::trainer::Trainer;

/// What came of a run.
pub(crate) struct Outcome {
    /// What the images are called.
    pub(crate) data: String,
    pub(crate) model: ResNet,
    pub(crate) held_out: HeldOut,
    /// Wall time of the loop.
    pub(crate) wall: Duration,
    /// Training images per second over all ranks, evaluation and checkpoints not counted.
    pub(crate) images_per_second: f64,
    pub(crate) ranks: usize,
    pub(crate) bytes_reduced: u64,
    /// Ops by the number format they ran in.
    pub(crate) ops: String,
    /// On rank 0.
    pub(crate) metrics: Option<Metrics>,
}

/// Trains as `args` say, from the start or from the checkpoint in `setup`.
pub(crate) fn train(args: &Args, setup: Setup, group: &ProcessGroup) -> Result<Outcome, Error> {
    let compute = Compute::new(setup.device.clone(), args.precision)?;
    let device = &compute.device;
    let mut trainer = Trainer::new(args, &setup, device, group)?;
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
        warmup: args.warmup_epochs * steps.per_epoch,
        total: steps.total,
    };
    let first = resume.map_or(0, |(checkpoint, _)| checkpoint.step);
    let last = args
        .max_steps
        .unwrap_or(steps.total)
        .clamp(first, steps.total);
    let mut main = match group.is_main() {
        true => Some(Main::new(
            args,
            settings,
            checkpoints,
            steps.per_epoch,
            first,
            last,
        )?),
        false => None,
    };

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
        if let Some(main) = &mut main {
            let epoch = step / steps.per_epoch + 1;
            let images_per_second = speed.images_per_second();
            main.log.step(Step {
                done,
                epoch,
                lr,
                loss,
                images_per_second,
                held_out,
            })?;
            main.save(done, &trainer)?;
        }
    }
    let held_out = match held_out {
        Some(held_out) => held_out,
        // Resumed at its end.
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
        metrics: main.map(|main| main.log.finish()),
    })
}

/// What rank 0 does besides: it logs and writes checkpoints.
struct Main {
    log: Log,
    settings: Settings,
    checkpoints: Checkpoints,
    checkpoint_every: usize,
    last: usize,
}

impl Main {
    fn new(
        args: &Args,
        settings: Settings,
        checkpoints: Checkpoints,
        steps_per_epoch: usize,
        first: usize,
        last: usize,
    ) -> Result<Self, Error> {
        if first == 0 {
            checkpoints.set_aside()?;
        }
        Ok(Self {
            log: Log::new(args, first, last)?,
            settings,
            checkpoints,
            checkpoint_every: args.checkpoint_every.unwrap_or(steps_per_epoch),
            last,
        })
    }

    /// Writes a checkpoint where one is due.
    fn save(&self, done: usize, trainer: &Trainer) -> Result<(), Error> {
        if done % self.checkpoint_every != 0 && done != self.last {
            return Ok(());
        }
        let state = State {
            settings: self.settings.clone(),
            step: done,
            scaler: trainer.scaler_state(),
        };
        self.checkpoints
            .save(done, trainer.model(), trainer.optimizer(), &state)
            .map_err(Error::Save)
    }
}

/// Images trained on, and the time it took.
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
