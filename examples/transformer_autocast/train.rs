//! One training, in one precision.

use std::fmt;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData, TensorReadError};
use burn_amp::recipe::{CurrentScaling, DelayedScaling};
use burn_amp::{Autocast, Fp8Error, LayerError, LossScalerConfig, LossScalerError};
use burn_ddp::ProcessGroup;
use examples::batch::{Batch, Batcher, Normalization};
use examples::device::DeviceError;
use examples::images::{Images, Split};
use examples::progress::{Progress, StepStatus};
use examples::schedule::WarmupCosine;
use examples::transformer::{Transformer, TransformerConfig};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::cli::{Args, Precision};

/// Why a run fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error(transparent)]
    LossScaler(#[from] LossScalerError),
    #[error(transparent)]
    Fp8(#[from] Fp8Error),
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device could not execute an op, for instance because it ran out of memory.
    #[error("the device failed: {0}")]
    Read(#[from] TensorReadError),
}

/// What all trainings share.
pub(crate) struct Training<'a> {
    args: &'a Args,
    data: &'a Split,
    batcher: Batcher,
    schedule: WarmupCosine,
}

/// The result of a training.
pub(crate) struct Outcome {
    /// The mean loss over the steps of the last epoch.
    pub(crate) loss: f64,
    /// The fraction of the held-out images that is classified correctly, 0 to 1.
    pub(crate) accuracy: f64,
    /// The number of steps that were skipped because gradients overflowed in fp16.
    pub(crate) skipped: u64,
    pub(crate) wall: Duration,
}

impl<'a> Training<'a> {
    pub(crate) fn new(args: &'a Args, data: &'a Split) -> Self {
        let total = args.epochs * steps_per_epoch(args, data);
        Self {
            args,
            data,
            batcher: Batcher {
                normalization: Normalization::of(&data.train),
                mirror: data.mirror,
                seed: 0,
            },
            schedule: WarmupCosine {
                peak: args.lr,
                warmup: total / 10,
                total,
            },
        }
    }

    /// The number of steps of a training.
    pub(crate) fn steps(&self) -> usize {
        let total = self.schedule.total;
        self.args.max_steps.map_or(total, |max| max.min(total))
    }

    /// Trains in `precision`, with the weights and batches of `seed`. `number` is the number of the training for
    /// `progress`.
    pub(crate) fn run(
        &self,
        precision: Precision,
        seed: u64,
        number: usize,
        progress: &mut Progress,
    ) -> Result<Outcome, Error> {
        let started = Instant::now();
        let autocast = match precision {
            Precision::F32 => None,
            Precision::Bf16 => Some(Autocast::bf16()),
            Precision::Fp16 => Some(Autocast::fp16()),
            Precision::Fp8 => Some(Autocast::fp8(CurrentScaling::new())?),
            Precision::Fp8Delayed => Some(Autocast::fp8(DelayedScaling::new())?),
        };
        // The training has a device of its own, which is removed at its end.
        let plain = self.args.device.open(&ProcessGroup::single())?;
        let lease = match autocast {
            Some(autocast) => Some(autocast.lease(plain.clone())?),
            None => None,
        };
        let device = lease.as_ref().map_or(plain, |lease| lease.device());
        let device = device.autodiff();
        let scaled = precision == Precision::Fp16;
        let mut scaler = LossScalerConfig::new().with_enabled(scaled).init()?;

        device.seed(seed);
        let Args { layers, width, .. } = *self.args;
        let mut model = TransformerConfig::new(layers, width).init(&device);
        let mut optimizer = AdamConfig::new().init();
        let criterion = CrossEntropyLossConfig::new().init(&device);
        // All images fit on the device, so that a step only sends their indices.
        let train = self.all(&self.data.train, &device);
        let mut order = ChaCha8Rng::seed_from_u64(seed);
        let mut indices: Vec<i32> = (0..self.data.train.len() as i32).collect();
        let per_epoch = steps_per_epoch(self.args, self.data);
        let batch_size = usize::from(self.args.batch_size);

        let mut losses = Vec::new();
        for step in 0..self.steps() {
            let in_epoch = step % per_epoch;
            if in_epoch == 0 {
                indices.shuffle(&mut order);
                losses.clear();
            }
            let batch = select(&train, &indices[in_epoch * batch_size..][..batch_size]);
            let lr = self.schedule.at(step);
            let logits = model.forward(batch.images);
            let loss = criterion.forward(logits, batch.labels);
            losses.push(f64::from(loss.clone().try_into_scalar::<f32>()?));
            let grads = scaler.scale(loss).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            // The scaler counts skipped steps.
            (model, _) = scaler.step(&mut optimizer, lr, model, grads);
            let images = ((step + 1) * batch_size) as f64;
            progress.step(StepStatus {
                step: number * self.steps() + step + 1,
                loss: losses[losses.len() - 1],
                lr,
                images_per_second: images / started.elapsed().as_secs_f64(),
            });
        }
        let test = self.all(&self.data.test, &device.inner());
        let accuracy = accuracy(&model.valid(), test)?;
        Ok(Outcome {
            loss: losses.iter().sum::<f64>() / losses.len() as f64,
            accuracy,
            skipped: scaler.state().skipped,
            wall: started.elapsed(),
        })
    }

    /// All of `images` as one batch on the device.
    fn all(&self, images: &Images, device: &Device) -> Batch {
        let indices: Vec<usize> = (0..images.len()).collect();
        self.batcher.eval(images, &indices, device)
    }
}

/// The images at `indices`.
fn select(all: &Batch, indices: &[i32]) -> Batch {
    let indices = TensorData::new(indices.to_vec(), [indices.len()]);
    let indices = Tensor::<1, Int>::from_data(indices, &all.images.device());
    Batch {
        images: all.images.clone().select(0, indices.clone()),
        labels: all.labels.clone().select(0, indices),
    }
}

/// The fraction of the images that `model` classifies correctly, 0 to 1.
fn accuracy(model: &Transformer, images: Batch) -> Result<f64, Error> {
    let count = images.labels.dims()[0];
    let classes = model.forward(images.images).argmax(1).squeeze_dim::<1>(1);
    let right = classes.equal(images.labels).int().sum();
    Ok(right.try_into_scalar::<i64>()? as f64 / count as f64)
}

/// The number of whole batches in an epoch.
fn steps_per_epoch(args: &Args, data: &Split) -> usize {
    data.train.len() / usize::from(args.batch_size)
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "loss {:.4}, held-out accuracy {:.2} %, {:.1} s",
            self.loss,
            100.0 * self.accuracy,
            self.wall.as_secs_f64()
        )
    }
}
