//! Saves and loads checkpoints.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::{fs, io};

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_amp::LossScalerState;
use burn_ddp::{Checkpoint, Checkpoints, DdpError};
use examples::resnet::ResNet;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::setup::Settings;

const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const STATE: &str = "state.json";

/// The state of a run besides the model and the optimizer. The order of the images and their crops need no state: they depend
/// on the step and the seed, which is one of the settings.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) settings: Settings,
    /// Only with fp16.
    pub(crate) scaler: Option<LossScalerState>,
}

/// Writes the checkpoint of `step`. All ranks call this.
pub(crate) fn save(
    checkpoints: &Checkpoints,
    step: usize,
    accuracy: Option<f64>,
    model: &ResNet,
    optimizer: &ModuleOptimizer,
    state: &State,
) -> Result<(), DdpError> {
    checkpoints.save(step as u64, accuracy, |folder| {
        // `valid` applies the last update of running statistics, which a record would miss.
        let model = model.valid();
        model
            .save_file(folder.join(MODEL))
            .map_err(io::Error::other)?;
        optimizer
            .save(folder.join(OPTIMIZER))
            .map_err(io::Error::other)?;
        fs::write(folder.join(STATE), serde_json::to_vec_pretty(state)?)
    })
}

/// Loads the model and the optimizer of a checkpoint into new ones of the same shapes.
pub(crate) fn load(
    checkpoint: &Checkpoint,
    model: ResNet,
    optimizer: ModuleOptimizer,
) -> Result<(ResNet, ModuleOptimizer), Error> {
    fn failed<E: Display>(path: PathBuf) -> impl FnOnce(E) -> Error {
        move |error| Error::Unreadable {
            path,
            problem: error.to_string(),
        }
    }
    let path = checkpoint.folder.join(MODEL);
    let model = model.try_load_file(&path).map_err(failed(path))?;
    let bytes = checkpoint.read(OPTIMIZER).map_err(Error::Checkpoint)?;
    let optimizer = optimizer.from_bytes(bytes);
    Ok((
        model,
        optimizer.map_err(failed(checkpoint.folder.join(OPTIMIZER)))?,
    ))
}

/// Loads the rest of the state.
pub(crate) fn state(checkpoint: &Checkpoint) -> Result<State, Error> {
    let path = checkpoint.folder.join(STATE);
    let read = || Ok(serde_json::from_slice(&fs::read(&path)?)?);
    read().map_err(|error: io::Error| Error::Unreadable {
        path: path.clone(),
        problem: error.to_string(),
    })
}

/// Makes room for another run: moves the checkpoints of the last run to the subfolder `previous`, and removes
/// checkpoints that are already there. Other files stay as they are.
pub(crate) fn set_aside(folder: &Path) -> io::Result<()> {
    let last = checkpoints_in(folder)?;
    if last.is_empty() {
        return Ok(());
    }
    let previous = folder.join("previous");
    fs::create_dir_all(&previous)?;
    for name in checkpoints_in(&previous)? {
        fs::remove_dir_all(previous.join(name))?;
    }
    for name in last {
        fs::rename(folder.join(&name), previous.join(&name))?;
    }
    Ok(())
}

/// The names of the checkpoints in a folder.
fn checkpoints_in(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let step = name.strip_prefix("step-").unwrap_or_default();
        if !step.is_empty() && step.bytes().all(|byte| byte.is_ascii_digit()) {
            names.push(name);
        }
    }
    Ok(names)
}
