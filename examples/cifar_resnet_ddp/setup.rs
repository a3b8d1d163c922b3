//! Checks everything that can be wrong before the first step: data, device, options, checkpoint.

use std::path::Path;

use burn::tensor::Device;
use burn_ddp::{Best, Checkpoint, Checkpoints, ProcessGroup};
use examples::digits;
use examples::images::{Split, read_cifar10};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{self, State};
use crate::cli::{Args, Precision};
use crate::error::Error;

/// Everything from which a run starts.
pub(crate) struct Setup {
    pub(crate) data: Split,
    pub(crate) device: Device,
    pub(crate) settings: Settings,
    pub(crate) steps: Steps,
    pub(crate) checkpoints: Checkpoints,
    /// The checkpoint to resume from, and its state.
    pub(crate) resume: Option<(Checkpoint, State)>,
}

/// The numbers of images and steps of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    /// The number of images in a step, over all ranks and accumulated batches.
    pub(crate) images: usize,
    pub(crate) per_epoch: usize,
    pub(crate) total: usize,
}

/// The settings that determine the course of a run. A checkpoint can only be resumed with the same settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// The name and checksum of the images, not their path.
    pub(crate) data: String,
    pub(crate) depth: usize,
    pub(crate) width: usize,
    pub(crate) no_sync_bn: bool,
    pub(crate) precision: Precision,
    pub(crate) epochs: usize,
    pub(crate) lr: f64,
    pub(crate) warmup_epochs: usize,
    pub(crate) weight_decay: f64,
    pub(crate) seed: u64,
    pub(crate) images_per_step: usize,
    /// The number of images that a normalization sees at a time.
    pub(crate) images_per_norm: usize,
}

impl Setup {
    /// Checks and opens everything for a run on `ranks` ranks. All ranks of `group` call this. The launcher calls it with a group
    /// of its own, to find out whether the ranks can be started.
    pub(crate) fn new(args: &Args, ranks: usize, group: &ProcessGroup) -> Result<Self, Error> {
        let device = args.device.open(group)?;
        let data = match &args.data {
            Some(dir) => read_cifar10(dir)?,
            None => digits::bundled(),
        };
        let steps = Steps::new(args, ranks, data.train.len())?;
        let settings = Settings::new(args, ranks, &data, steps.images);
        std::fs::create_dir_all(&args.out).map_err(|source| Error::Output {
            path: args.out.clone(),
            source,
        })?;
        let dir = args.checkpoint_dir();
        if args.resume && !dir.is_dir() {
            return Err(Error::NothingToResume(dir));
        }
        let checkpoints = Checkpoints::new(dir, group).map_err(Error::Checkpoint)?;
        let checkpoints = checkpoints.keep_last(2).keep_best(Best::Highest);
        let resume = match args.resume {
            true => resume(&checkpoints, &settings)?,
            false => None,
        };
        Ok(Self {
            data,
            device,
            settings,
            steps,
            checkpoints,
            resume,
        })
    }
}

/// The newest checkpoint. `None` if the run to resume was killed before its first checkpoint.
fn resume(
    checkpoints: &Checkpoints,
    settings: &Settings,
) -> Result<Option<(Checkpoint, State)>, Error> {
    let Some(checkpoint) = checkpoints.latest().map_err(Error::Checkpoint)? else {
        return Ok(None);
    };
    let state = checkpoint::state(&checkpoint)?;
    settings.check_same(&state.settings, &checkpoint.folder)?;
    Ok(Some((checkpoint, state)))
}

impl Steps {
    fn new(args: &Args, ranks: usize, train_images: usize) -> Result<Self, Error> {
        // A number that saturates is too large anyway.
        let images = args
            .batch_size
            .saturating_mul(ranks)
            .saturating_mul(args.accumulate);
        // The rest of an epoch that does not fill a step is left out. By the shuffle, these are other images in each epoch.
        let per_epoch = train_images / images;
        if per_epoch == 0 {
            return Err(Error::BatchTooLarge {
                images,
                ranks,
                train_images,
            });
        }
        Ok(Self {
            images,
            per_epoch,
            total: per_epoch.saturating_mul(args.epochs),
        })
    }
}

impl Settings {
    fn new(args: &Args, ranks: usize, data: &Split, images_per_step: usize) -> Self {
        Self {
            data: format!("{}, checksum {:08x}", data.name, data.checksum()),
            depth: args.depth,
            width: args.width,
            no_sync_bn: args.no_sync_bn,
            precision: args.precision,
            epochs: args.epochs,
            lr: args.lr,
            warmup_epochs: args.warmup_epochs,
            weight_decay: args.weight_decay,
            seed: args.seed,
            images_per_step,
            images_per_norm: match args.no_sync_bn {
                true => args.batch_size,
                false => args.batch_size * ranks,
            },
        }
    }

    /// Checks that the settings of a checkpoint are the same. The error names the first one that differs.
    fn check_same(&self, checkpoint: &Self, path: &Path) -> Result<(), Error> {
        let fields = |settings: &Self| match serde_json::to_value(settings) {
            Ok(serde_json::Value::Object(fields)) => fields,
            _ => unreachable!("settings are an object of plain values"),
        };
        let (ours, theirs) = (fields(self), fields(checkpoint));
        match ours
            .iter()
            .find(|(name, value)| theirs.get(*name) != Some(value))
        {
            None => Ok(()),
            Some((name, value)) => Err(Error::OtherSettings {
                path: path.to_owned(),
                name: name.replace('_', "-"),
                checkpoint: theirs.get(name).cloned().unwrap_or_default(),
                run: value.clone(),
            }),
        }
    }
}
