//! Checkpoints that are whole or not there, whenever the program is killed.
//!
//! A checkpoint is a folder `step-00000120` with the model, the optimizer and whatever else the run needs. It is
//! written beside its place, flushed to the disk and then renamed; what a killed run leaves half-written begins with
//! a dot and is cleared away by the next one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::store::RecordError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// Checkpoints kept; older ones are removed.
const KEPT: usize = 2;
const COMPLETE: &str = "step-";
const PARTIAL: &str = ".step-";
const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const STATE: &str = "state.json";

/// What can go wrong with a checkpoint.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// A file or folder could not be read or written.
    #[error("checkpoint {}: {source}", .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A record could not be read or written, or does not fit the model.
    #[error("checkpoint {}: {source}", .path.display())]
    Record {
        /// The record's file.
        path: PathBuf,
        /// What Burn said.
        source: RecordError,
    },
    /// The state could not be read or written.
    #[error("checkpoint {}: {source}", .path.display())]
    State {
        /// The state's file.
        path: PathBuf,
        /// What the parser said.
        source: serde_json::Error,
    },
}

type Result<T> = std::result::Result<T, CheckpointError>;

/// A folder of checkpoints.
///
/// ```
/// use burn::{nn::{Linear, LinearConfig}, optim::SgdConfig, tensor::Device};
/// use examples::checkpoint::Checkpoints;
///
/// let dir = tempfile::tempdir()?;
/// let checkpoints = Checkpoints::open(dir.path())?;
/// let model = LinearConfig::new(2, 2).init(&Device::flex());
/// checkpoints.save(7, &model, &SgdConfig::new().init(), &"anything else")?;
///
/// let latest = checkpoints.latest()?.expect("one was just written");
/// let (model, optimizer) = latest.load(model, SgdConfig::new().init())?;
/// assert_eq!(latest.state::<String>()?, "anything else");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Checkpoints {
    dir: PathBuf,
}

/// One whole checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Optimizer steps done.
    pub step: usize,
}

impl Checkpoints {
    /// Checkpoints in `dir`, which is made when it is not there.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]
    pub fn open(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).map_err(io_error(dir))?;
        Ok(Self {
            // Without a slash at its end, so that a folder beside it can be named after it.
            dir: dir.components().collect(),
        })
    }

    /// Makes room for another run: what is in the folder goes to one beside it, whose name ends in `.previous`,
    /// in place of what is there.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]
    pub fn set_aside(&self) -> Result<()> {
        if self.entries()?.is_empty() {
            return Ok(());
        }
        let mut name = self.dir.clone().into_os_string();
        name.push(".previous");
        let previous = PathBuf::from(name);
        match fs::remove_dir_all(&previous) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(io_error(&previous)(error))?
            }
            _ => fs::rename(&self.dir, &previous).map_err(io_error(&previous))?,
        }
        fs::create_dir(&self.dir).map_err(io_error(&self.dir))
    }

    /// Writes the checkpoint of `step` and removes the oldest ones. A checkpoint of this step that is already there
    /// is left as it is.
    ///
    /// # Errors
    /// [`CheckpointError`]: the disk is full, the folder cannot be written.
    pub fn save<M: Module, S: Serialize>(
        &self,
        step: usize,
        model: &M,
        optimizer: &ModuleOptimizer,
        state: &S,
    ) -> Result<()> {
        let place = self.dir.join(format!("{COMPLETE}{step:08}"));
        if place.exists() {
            return Ok(());
        }
        self.clear_partial()?;
        let partial = self.dir.join(format!("{PARTIAL}{step:08}"));
        fs::create_dir(&partial).map_err(io_error(&partial))?;

        let path = partial.join(MODEL);
        // `valid` also folds the pending update of running statistics in, which a record would otherwise miss.
        model
            .valid()
            .save_file(&path)
            .map_err(record_error(&path))?;
        let path = partial.join(OPTIMIZER);
        optimizer.save(&path).map_err(record_error(&path))?;
        let path = partial.join(STATE);
        let text = serde_json::to_vec_pretty(state).map_err(state_error(&path))?;
        fs::write(&path, text).map_err(io_error(&path))?;

        for path in [
            partial.join(MODEL),
            partial.join(OPTIMIZER),
            partial.join(STATE),
            partial.clone(),
        ] {
            flush(&path)?;
        }
        fs::rename(&partial, &place).map_err(io_error(&place))?;
        flush(&self.dir)?;
        self.remove_old()
    }

    /// The newest whole checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        Ok(self.all()?.pop())
    }

    /// Whole checkpoints, the newest last.
    fn all(&self) -> Result<Vec<Checkpoint>> {
        let mut all: Vec<Checkpoint> = self
            .entries()?
            .into_iter()
            .filter_map(|(name, path)| {
                let step = name.strip_prefix(COMPLETE)?.parse().ok()?;
                Some(Checkpoint { path, step })
            })
            .collect();
        all.sort_by_key(|checkpoint| checkpoint.step);
        Ok(all)
    }

    fn entries(&self) -> Result<Vec<(String, PathBuf)>> {
        let entries = fs::read_dir(&self.dir).map_err(io_error(&self.dir))?;
        entries
            .map(|entry| {
                let entry = entry.map_err(io_error(&self.dir))?;
                Ok((
                    entry.file_name().to_string_lossy().into_owned(),
                    entry.path(),
                ))
            })
            .collect()
    }

    /// Removes what a killed run left half-written.
    fn clear_partial(&self) -> Result<()> {
        for (name, path) in self.entries()? {
            if name.starts_with(PARTIAL) {
                fs::remove_dir_all(&path).map_err(io_error(&path))?;
            }
        }
        Ok(())
    }

    fn remove_old(&self) -> Result<()> {
        let all = self.all()?;
        for old in &all[..all.len().saturating_sub(KEPT)] {
            // Renamed first: a kill in between must not leave half a checkpoint under its name.
            let partial = self.dir.join(format!("{PARTIAL}{:08}", old.step));
            fs::rename(&old.path, &partial).map_err(io_error(&old.path))?;
            fs::remove_dir_all(&partial).map_err(io_error(&partial))?;
        }
        Ok(())
    }
}

impl Checkpoint {
    /// The model and the optimizer as they were, given new ones of the same shapes.
    ///
    /// # Errors
    /// [`CheckpointError::Record`]: a record is damaged or is that of another model.
    pub fn load<M: Module>(
        &self,
        model: M,
        optimizer: ModuleOptimizer,
    ) -> Result<(M, ModuleOptimizer)> {
        let path = self.path.join(MODEL);
        let model = model.try_load_file(&path).map_err(record_error(&path))?;
        let path = self.path.join(OPTIMIZER);
        let optimizer = optimizer.load(&path).map_err(record_error(&path))?;
        Ok((model, optimizer))
    }

    /// Whatever else was saved.
    ///
    /// # Errors
    /// [`CheckpointError::Io`], [`CheckpointError::State`]
    pub fn state<S: DeserializeOwned>(&self) -> Result<S> {
        let path = self.path.join(STATE);
        let text = fs::read(&path).map_err(io_error(&path))?;
        serde_json::from_slice(&text).map_err(state_error(&path))
    }
}

/// Waits until a file or folder is on the disk.
fn flush(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(io_error(path))
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    |source| CheckpointError::Io { path, source }
}

fn record_error(path: &Path) -> impl FnOnce(RecordError) -> CheckpointError {
    let path = path.to_owned();
    |source| CheckpointError::Record { path, source }
}

fn state_error(path: &Path) -> impl FnOnce(serde_json::Error) -> CheckpointError {
    let path = path.to_owned();
    |source| CheckpointError::State { path, source }
}

#[cfg(test)]
mod tests {
    use burn::optim::momentum::MomentumConfig;
    use burn::optim::{GradientsParams, SgdConfig};
    use burn::tensor::{Device, Tensor, TensorData};

    use super::*;
    use crate::parameters::Parameters;
    use crate::resnet::{ResNet, ResNetConfig};

    fn optimizer() -> ModuleOptimizer {
        SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .init()
    }

    fn new_model() -> ResNet {
        ResNetConfig::new(8, 2).init(&Device::flex().autodiff())
    }

    /// One step on images that depend on `step` alone; the bits of the new weights' sum of squares.
    fn step(step: u64, model: ResNet, optimizer: &mut ModuleOptimizer) -> ResNet {
        let device = Device::flex().autodiff();
        let values: Vec<f32> = (0..4 * 3072)
            .map(|i| ((i as u64 * (step + 1) * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0)
            .collect();
        let images = Tensor::from_data(TensorData::new(values, [4, 3, 32, 32]), &device);
        let grads = model.forward(images).powf_scalar(2.0).mean().backward();
        let grads = GradientsParams::from_grads(grads, &model);
        optimizer.step(0.1, model, grads)
    }

    #[test]
    fn a_run_goes_on_from_a_checkpoint_bit_for_bit() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(dir.path()).unwrap();
        let (mut model, mut sgd) = (new_model(), optimizer());
        for i in 0..3 {
            model = step(i, model, &mut sgd);
        }
        checkpoints.save(3, &model, &sgd, &3).unwrap();
        for i in 3..6 {
            model = step(i, model, &mut sgd);
        }

        let latest = checkpoints.latest().unwrap().unwrap();
        assert_eq!((latest.step, latest.state::<u64>().unwrap()), (3, 3));
        let (mut resumed, mut sgd) = latest.load(new_model(), optimizer()).unwrap();
        for i in 3..6 {
            resumed = step(i, resumed, &mut sgd);
        }
        assert_eq!(Parameters::of(&resumed), Parameters::of(&model));
    }

    #[test]
    fn only_whole_checkpoints_count_and_only_the_last_two_stay() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(dir.path()).unwrap();
        assert_eq!(checkpoints.latest().unwrap(), None);
        let (model, sgd) = (new_model(), optimizer());
        // What a kill leaves: a later checkpoint whose writing never ended.
        let partial = dir.path().join(".step-00000009");
        fs::create_dir(&partial).unwrap();
        fs::write(partial.join(MODEL), b"half").unwrap();
        for step in [1, 2, 10] {
            checkpoints.save(step, &model, &sgd, &step).unwrap();
        }
        assert!(!partial.exists());
        let steps: Vec<usize> = checkpoints.all().unwrap().iter().map(|c| c.step).collect();
        assert_eq!(steps, [2, 10]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn another_run_sets_the_last_ones_checkpoints_aside() {
        let parent = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(&parent.path().join("run")).unwrap();
        checkpoints.set_aside().unwrap();
        assert_eq!(
            fs::read_dir(parent.path()).unwrap().count(),
            1,
            "nothing to set aside"
        );
        let (model, sgd) = (new_model(), optimizer());
        for step in [5, 6] {
            checkpoints.save(step, &model, &sgd, &step).unwrap();
            checkpoints.set_aside().unwrap();
            assert_eq!(checkpoints.latest().unwrap(), None);
            let previous = Checkpoints::open(&parent.path().join("run.previous")).unwrap();
            assert_eq!(previous.all().unwrap().len(), 1);
            assert_eq!(previous.latest().unwrap().unwrap().step, step);
        }
    }

    #[test]
    fn another_model_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(dir.path()).unwrap();
        checkpoints
            .save(1, &new_model(), &optimizer(), &())
            .unwrap();
        let wider = ResNetConfig::new(8, 3).init(&Device::flex().autodiff());
        let loaded = checkpoints
            .latest()
            .unwrap()
            .unwrap()
            .load(wider, optimizer());
        assert!(matches!(loaded, Err(CheckpointError::Record { .. })));
    }

    #[test]
    fn a_file_in_the_way_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"").unwrap();
        let error = Checkpoints::open(&file).unwrap_err();
        assert!(
            error.to_string().contains(&file.display().to_string()),
            "{error}"
        );
    }
}
