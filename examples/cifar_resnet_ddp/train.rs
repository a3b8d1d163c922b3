//! The training loop.

use std::time::{Duration, Instant};

use burn::module::{Module, ParamGroup};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use examples::batch::{Batcher, Normalization};
use examples::metrics::{Metrics, Row};
use examples::progress::{Progress, StepStatus};
use examples::resnet::ResNet;
use examples::schedule::WarmupCosine;
use rand::SeedableRng;
use rand::seq::SliceRandom;

use crate::cli::Args;
use crate::error::Error;
use crate::evaluate::{HeldOut, evaluate};
use crate::ranks::Ranks;
use crate::setup::{Setup, State};

/// What came of a run.
pub(crate) struct Outcome {
    pub(crate) model: ResNet,
    pub(crate) held_out: HeldOut,
    /// Wall time, of this process.
    pub(crate) wall: Duration,
    /// Training images per second over all ranks, evaluation and checkpoints not counted.
    pub(crate) images_per_second: f64,
    pub(crate) metrics: Option<Metrics>,
}

/// Trains as `args` say, from the start or from the checkpoint in `setup`.
pub(crate) fn train(args: &Args, setup: Setup, ranks: &Ranks) -> Result<Outcome, Error> {
    let first_step = setup.first_step();
    let Setup {
        data,
        device,
        settings,
        steps,
        checkpoints,
        resume,
    } = setup;
    let is_main = ranks.rank() == 0;
    let device = device.autodiff();
    device.seed(args.seed);
    let mut model = args.network().init(&device);
    let mut optimizer = sgd(args.weight_decay);
    if let Some((checkpoint, _)) = &resume {
        (model, optimizer) = checkpoint.load(model, optimizer)?;
    }

    let batcher = Batcher {
        normalization: Normalization::of(&data.train),
        mirror: data.mirror,
        seed: args.seed,
    };
    let loss = CrossEntropyLossConfig::new().init(&device);
    let schedule = WarmupCosine {
        peak: args.lr,
        warmup: args.warmup_epochs * steps.per_epoch,
        total: steps.total,
    };
    let last_step = args
        .max_steps
        .map_or(steps.total, |most| most.min(steps.total));
    let checkpoint_every = args.checkpoint_every.unwrap_or(steps.per_epoch);

    let mut metrics = None;
    let mut progress = Progress::quiet();
    if is_main {
        metrics = Some(Metrics::create(&args.out.join("metrics.csv"), first_step)?);
        if !args.quiet {
            progress = Progress::new(last_step, first_step);
        }
    }

    let started = Instant::now();
    let mut training = Duration::ZERO;
    let mut held_out = None;
    let mut epoch_loss = Mean::default();
    let mut order = Vec::new();
    for step in first_step..last_step {
        let step_started = Instant::now();
        let epoch = step / steps.per_epoch;
        let step_in_epoch = step % steps.per_epoch;
        if order.is_empty() || step_in_epoch == 0 {
            order = (0..data.train.len()).collect();
            order.shuffle(&mut rand_chacha::ChaCha8Rng::seed_from_u64(
                args.seed + epoch as u64,
            ));
        }
        let mine = args.batch_size * args.accumulate;
        let mine = &order[step_in_epoch * mine..(step_in_epoch + 1) * mine];

        let mut gradients = GradientsAccumulator::new();
        let mut losses = Vec::new();
        for indices in mine.chunks(args.batch_size) {
            let batch = batcher.train(&data.train, indices, epoch, &device);
            let loss =
                loss.forward(model.forward(batch.images), batch.labels) / args.accumulate as f64;
            losses.push(loss.clone().detach());
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            gradients.accumulate(&model, grads);
        }
        let lr = schedule.at(step);
        model = optimizer.step(lr, model, gradients.grads());
        let step_loss: f64 = losses
            .into_iter()
            .map(|loss| f64::from(loss.into_scalar::<f32>()))
            .sum();
        let [step_loss] = ranks
            .sum([step_loss])?
            .map(|sum| sum / ranks.count() as f64);
        epoch_loss.add(step_loss);
        training += step_started.elapsed();

        let done = step + 1;
        let images_per_second =
            ((done - first_step) * steps.images) as f64 / training.as_secs_f64();
        progress.step(StepStatus {
            step: done,
            loss: step_loss,
            lr,
            images_per_second,
        });
        let ends_epoch = done % steps.per_epoch == 0 || done == last_step;
        if ends_epoch {
            held_out = Some(evaluate(
                &model.valid(),
                &data.test,
                &batcher,
                &device,
                ranks,
            )?);
        }
        if let (Some(held_out), true) = (&held_out, ends_epoch) {
            progress.line(&format!(
                "epoch {:>3} of {}  loss {:.4}  held out: loss {:.4}, accuracy {:.2} %",
                epoch + 1,
                args.epochs,
                epoch_loss.take(),
                held_out.loss,
                100.0 * held_out.accuracy()
            ));
        }
        if let Some(metrics) = &mut metrics {
            metrics.push(Row {
                step: done,
                epoch: epoch + 1,
                lr,
                loss: step_loss,
                images_per_second,
                seconds: started.elapsed().as_secs_f64(),
                held_out_loss: held_out
                    .filter(|_| ends_epoch)
                    .map(|held_out| held_out.loss),
                held_out_accuracy: held_out
                    .filter(|_| ends_epoch)
                    .map(|held_out| held_out.accuracy()),
            })?;
            if done % checkpoint_every == 0 || done == last_step {
                let state = State {
                    settings: settings.clone(),
                    step: done,
                };
                checkpoints.save(done, &model, &optimizer, &state)?;
            }
        }
    }
    progress.finish();
    let held_out = match held_out {
        Some(held_out) => held_out,
        None => evaluate(&model.valid(), &data.test, &batcher, &device, ranks)?,
    };
    Ok(Outcome {
        model,
        held_out,
        wall: started.elapsed(),
        images_per_second: ((last_step.max(first_step) - first_step) * steps.images) as f64
            / training.as_secs_f64(),
        metrics,
    })
}

/// SGD with momentum. Norms and biases are not decayed (Goyal et al. 2017, section 5.3).
fn sgd(weight_decay: f64) -> ModuleOptimizer {
    let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.0);
    let sgd = SgdConfig::new().with_momentum(Some(momentum));
    let decayed = sgd
        .clone()
        .with_weight_decay(Some(WeightDecayConfig::new(weight_decay as f32)));
    let undecayed = ParamGroup::from_any_predicates(vec!["gamma", "beta", "bias"]);
    ModuleOptimizer::from(decayed.build()).with_group(undecayed, sgd.build(), None)
}

/// A running mean.
#[derive(Default)]
struct Mean {
    sum: f64,
    count: usize,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    /// The mean so far, from which a new one begins.
    fn take(&mut self) -> f64 {
        let Self { sum, count } = std::mem::take(self);
        sum / count as f64
    }
}
