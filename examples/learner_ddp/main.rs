//! burn-train's `Learner` in bf16 on several ranks: a small CIFAR ResNet learns the bundled digits.
//!
//! Besides the model and its data, which are those of any program of burn-train, there are five lines: see `train`. A run that
//! was interrupted goes on from its last epoch.

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use burn::data::{dataloader::batcher, dataset::InMemDataset};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{SgdConfig, momentum::MomentumConfig};
use burn::tensor::Device;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_amp::Autocast;
use burn_ddp::launch::{self, LaunchOptions};
use burn_ddp::{
    DdpConfig, DdpStrategy, DistributedLoader, DistributedSampler, EpochCheckpoints, Overlap,
    ProcessGroup,
};
use clap::Parser;
use examples::batch::{Batch, Batcher, Normalization};
use examples::device::DeviceKind;
use examples::digits;
use examples::images::Images;
use examples::resnet::{ResNet, ResNetConfig};

/// Train a small ResNet on handwritten digits with burn-train's Learner, on several ranks.
#[derive(Debug, Parser)]
#[command(name = "learner_ddp", version, max_term_width = 100)]
struct Args {
    /// Number of ranks to start, unless torchrun, mpirun, Slurm or `burn-ddp run` starts them
    #[arg(long, value_name = "N", default_value = "2")]
    ranks: NonZeroUsize,
    /// Passes over the training images
    #[arg(long, value_name = "N", default_value = "6")]
    epochs: NonZeroUsize,
    /// Channels of the first stage
    #[arg(long, value_name = "N", default_value = "8")]
    width: NonZeroUsize,
    /// Images in a batch, over all ranks
    #[arg(long, value_name = "N", default_value = "64")]
    batch_size: NonZeroUsize,
    /// Where to compute; all but flex need the feature of that name
    #[arg(long, value_enum, default_value_t = DeviceKind::Flex)]
    device: DeviceKind,
    /// Where the log and the checkpoints go
    #[arg(long, value_name = "DIR", default_value = "target/learner_ddp")]
    out: PathBuf,
}

#[derive(Module, Debug)]
struct Classifier {
    network: ResNet,
}

impl InferenceStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, Batch { images, labels }: Batch) -> ClassificationOutput {
        let logits = self.network.forward(images);
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        let loss = loss.forward(logits.clone(), labels.clone());
        ClassificationOutput::new(loss, logits, labels)
    }
}

impl TrainStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

/// Makes batches of the images with some numbers.
#[derive(Clone)]
struct Digits {
    images: Arc<Images>,
    batcher: Batcher,
}

impl batcher::Batcher<usize, Batch> for Digits {
    fn batch(&self, numbers: Vec<usize>, device: &Device) -> Batch {
        self.batcher.eval(&self.images, &numbers, device)
    }
}

/// A loader that gives this rank its share of the images.
fn loader(
    args: &Args,
    group: &ProcessGroup,
    digits: Digits,
    sampler: DistributedSampler,
) -> Arc<DistributedLoader<usize, Batch>> {
    let numbers = InMemDataset::new((0..digits.images.len()).collect());
    let loader = DistributedLoader::new(numbers, digits, sampler);
    Arc::new(loader.batch_size(args.batch_size.get().div_ceil(group.world_size())))
}

/// What each rank runs.
fn train(args: &Args, group: &ProcessGroup) -> Result<(), Box<dyn Error>> {
    // 1. A device on which ops run in bf16, and gradients are averaged while backward runs.
    let overlap = Overlap::new(group, DdpConfig::new())?;
    let layers = Autocast::bf16().layers(args.device.open(group)?)?;
    let device = overlap.serve(layers)?.autodiff();

    // 2. Each rank's share of the data.
    let split = digits::bundled();
    let batcher = Batcher {
        normalization: Normalization::of(&split.train),
        mirror: split.mirror,
        seed: 0,
    };
    let (rank, ranks) = (group.rank(), group.world_size());
    let digits = |images| Digits {
        images: Arc::new(images),
        batcher,
    };
    let (images, held_out) = (digits(split.train), digits(split.test));
    let sampler = DistributedSampler::new(images.images.len(), rank, ranks).shuffle(true);
    let steps = sampler
        .len()
        .div_ceil(args.batch_size.get().div_ceil(ranks))
        * args.epochs.get();
    let evaluation = DistributedSampler::evaluation(held_out.images.len(), rank, ranks);

    // 3. Checkpoints that are whole whenever the program is killed.
    let checkpoints = EpochCheckpoints::open(args.out.join("checkpoint"), group)?;
    let training = SupervisedTraining::new(
        &args.out,
        loader(args, group, images, sampler),
        loader(args, group, held_out, evaluation),
    )
    .metrics((AccuracyMetric::new(), LossMetric::new()))
    .with_custom_checkpointers(
        checkpoints.model(),
        checkpoints.optimizer(),
        checkpoints.scheduler(),
    )
    .num_epochs(args.epochs.get())
    .summary();
    let training = match checkpoints.last() {
        Some(epoch) => training.checkpoint(epoch),
        None => training,
    };

    // 4. Statistics of the batches of all ranks.
    let network = ResNetConfig::new(8, args.width.get()).init(&device);
    let network = network.with_sync_batch_norm(&group.duplicate()?);
    let momentum = MomentumConfig::new().with_momentum(0.9);
    let learner = Learner::new(
        Classifier { network },
        SgdConfig::new().with_momentum(Some(momentum)).init(),
        CosineAnnealingLrSchedulerConfig::new(0.1, steps).init()?,
    );

    // 5. Instead of `training.launch(learner)`.
    let result = DdpStrategy::new(group, device)
        .overlap(overlap)
        .launch(training, learner);
    match result.error {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    launch::run(args.ranks.get(), LaunchOptions::new(), |group| {
        train(&args, &group)
    })
}
