//! The training loop. What a step does is in `trainer.rs`.

use std::time::{Duration, Instant};

use burn::module::Module;
use burn_ddp::ProcessGroup;
use examples::batch::{Batcher, Normalization};
use examples::metrics::Metrics;
use examples::resnet::ResNet;
use examples::schedule::WarmupCosine;

use crate::cli::Args;
use crate::error::Error;
use crate::evaluate::{HeldOut, evaluate};
use crate::feed::Feed;
use crate::log::{Log, Step};
use crate::setup::{Setup, State};
use crate::trainer::Trainer;

/// What came of a run.
pub(crate) struct Outcome {
    /// What the images are called.
    pub(crate) data: String,
    pub(crate) model: ResNet,
    pub(crate) held_out: HeldOut,
    /// Wall time from the first step (or that after the checkpoint) to the last evaluation.
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
    let device = setup.device.clone().autodiff();
    let mut trainer = Trainer::new(args, &setup, &device, group)?;
    let Setup {
        data,
        settings,
        steps,
        checkpoints,
        resume,
        ..
    } = setup;
    let first = resume.map_or(0, |(checkpoint, _)| checkpoint.step);
    let last = args
        .max_steps
        .map_or(steps.total, |most| most.min(steps.total))
        .max(first);

    let normalization = Normalization::of(&data.train);
    let batcher = Batcher {
        normalization,
        mirror: data.mirror,
        seed: args.seed,
    };
    let mut feed = Feed::new(args, &data.train, batcher, &device, steps, group);
    let warmup = args.warmup_epochs * steps.per_epoch;
    let schedule = WarmupCosine {
        peak: args.lr,
        warmup,
        total: steps.total,
    };
    let evaluate = |model: &ResNet| {
        evaluate(
            &model.valid(),
            &data.test,
            &batcher,
            &device.clone().inner(),
            group,
        )
    };

    let mut log = None;
    if group.rank() == 0 {
        if first == 0 {
            checkpoints.set_aside()?;
        }
        log = Some(Log::new(args, first, last)?);
    }
    let checkpoint_every = args.checkpoint_every.unwrap_or(steps.per_epoch);
    let started = Instant::now();
    let mut training = Duration::ZERO;
    let images_per_second = |steps_done: usize, training: Duration| {
        if steps_done == 0 {
            0.0
        } else {
            (steps_done * steps.images) as f64 / training.as_secs_f64()
        }
    };
    let mut held_out = None;
    for step in first..last {
        let step_started = Instant::now();
        let lr = schedule.at(step);
        let loss = trainer.step(feed.batches(step), lr)?;
        training += step_started.elapsed();

        let done = step + 1;
        let ends_epoch = done % steps.per_epoch == 0 || done == last;
        held_out = if ends_epoch {
            Some(evaluate(&trainer.model)?)
        } else {
            None
        };
        let Some(log) = &mut log else { continue };
        log.step(Step {
            done,
            epoch: step / steps.per_epoch + 1,
            lr,
            loss,
            images_per_second: images_per_second(done - first, training),
            held_out,
        })?;
        if done % checkpoint_every == 0 || done == last {
            let state = State {
                settings: settings.clone(),
                step: done,
            };
            checkpoints
                .save(done, &trainer.model, &trainer.optimizer, &state)
                .map_err(Error::Save)?;
        }
    }
    let held_out = match held_out {
        Some(held_out) => held_out,
        // Resumed at its end.
        None => evaluate(&trainer.model)?,
    };
    Ok(Outcome {
        data: data.name,
        model: trainer.model,
        held_out,
        wall: started.elapsed(),
        images_per_second: images_per_second(last - first, training),
        ranks: group.world_size(),
        bytes_reduced: group.stats().bytes_reduced,
        ops: String::new(),
        metrics: log.map(Log::finish),
    })
}
