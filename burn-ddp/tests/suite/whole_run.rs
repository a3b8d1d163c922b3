//! A training run with all that a checkpoint has to hold, killed again and again.

use std::{fs, io, path::Path, process::Command, thread, time::Duration};

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig},
    store::ModuleRecord,
    tensor::{Device, Tensor, TensorData},
};
use burn_amp::{LossScaler, LossScalerConfig, LossScalerState};
use burn_ddp::{
    Best, Checkpoint, Checkpoints, Ddp, DdpConfig, DdpError, DistributedSampler, ProcessGroup,
    ReduceOp, SamplerState,
};
use nix::sys::signal::Signal;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::suite::{
    net::contents,
    overlapped::layered,
    ranks::{FOLDER, PLAY, Rank, made, meeting_place, result, spawn},
};

const RANKS: usize = 3;
const STEPS: u64 = 50;
const BATCH: usize = 2;
/// Steps of an epoch of 24 items.
const EPOCH: u64 = (24 / (RANKS * BATCH)) as u64;

/// Of each rank, beside the model and the optimizer.
#[derive(Serialize, Deserialize)]
struct State {
    sampler: SamplerState,
    scaler: LossScalerState,
    /// The place of the rank's generator in its stream.
    random: u128,
}

struct Run {
    model: Linear,
    optimizer: ModuleOptimizer,
    scaler: LossScaler,
    sampler: DistributedSampler,
    random: ChaCha8Rng,
    step: u64,
}

impl Run {
    fn new(rank: usize, device: &Device) -> Self {
        let momentum = MomentumConfig::new().with_momentum(0.9);
        let scaler = LossScalerConfig::new().with_init_scale(1024.0);
        Self {
            model: LinearConfig::new(4, 3).init(device),
            optimizer: SgdConfig::new().with_momentum(Some(momentum)).init(),
            scaler: scaler.with_growth_interval(7).init().unwrap(),
            sampler: DistributedSampler::new(24, rank, RANKS)
                .shuffle(true)
                .seed(9),
            random: ChaCha8Rng::seed_from_u64(rank as u64),
            step: 0,
        }
    }

    fn state(&self) -> State {
        State {
            sampler: self.sampler.state(0),
            scaler: self.scaler.state().clone(),
            random: self.random.get_word_pos(),
        }
    }

    fn save(&self, folder: &Path, padding: usize) -> io::Result<()> {
        let saved = self.model.clone().save_file(folder.join("model.bpk"));
        saved.map_err(io::Error::other)?;
        let saved = self.optimizer.save(folder.join("optimizer.bpk"));
        saved.map_err(io::Error::other)?;
        // More from step to step.
        let padding = vec![1u8; padding * self.step as usize];
        fs::write(folder.join("padding"), padding)
    }

    fn load(self, checkpoint: &Checkpoint, rank: usize) -> Self {
        let state: State = checkpoint.state(rank).unwrap();
        let Self {
            mut sampler,
            mut random,
            ..
        } = self;
        sampler.load_state(&state.sampler);
        random.set_word_pos(state.random);
        Self {
            model: self
                .model
                .try_load_file(checkpoint.folder.join("model.bpk"))
                .unwrap(),
            optimizer: self
                .optimizer
                .load(checkpoint.folder.join("optimizer.bpk"))
                .unwrap(),
            scaler: self.scaler.load_state(state.scaler).unwrap(),
            sampler,
            random,
            step: checkpoint.step,
        }
    }

    /// A batch: this rank's items of the step, and noise of its own.
    fn batch(&mut self) -> Tensor<2> {
        let items = self.sampler.indices();
        match items.len() > BATCH {
            true => self.sampler.load_state(&self.sampler.state(BATCH)),
            false => self.sampler.set_epoch(self.step / EPOCH + 1),
        }
        let values: Vec<f32> = items[..BATCH]
            .iter()
            .flat_map(|item| [0, 1, 2, 3].map(|at| ((item * 4 + at) as f32).sin()))
            .map(|value| value + self.random.random_range(-0.1..0.1))
            .collect();
        let data = TensorData::new(values, [BATCH, 4]);
        Tensor::from_data(data, &self.model.weight.val().device())
    }
}

fn open(folder: &Path, group: &ProcessGroup) -> Result<Checkpoints, DdpError> {
    let checkpoints = Checkpoints::new(folder, group)?;
    Ok(checkpoints.keep_last(2).keep_best(Best::Lowest))
}

/// The whole run, or the rest of it, with a checkpoint after each step. Its gradients are averaged after backward
/// or during it, which makes no difference to it.
pub(crate) fn play(
    group: &ProcessGroup,
    padding: usize,
    overlapped: bool,
) -> Result<String, DdpError> {
    let folder = std::env::var(FOLDER).unwrap();
    let checkpoints = open(folder.as_ref(), group)?;
    let (device, overlap) = match overlapped {
        false => (Device::flex().autodiff(), None),
        true => layered(group, DdpConfig::new()).map(|(device, it)| (device, Some(it)))?,
    };
    let mut run = Run::new(group.rank(), &device);
    let mut ddp = match overlap {
        None => Ddp::new(group, DdpConfig::new(), &run.model)?,
        Some(overlap) => Ddp::overlapped(group, overlap, &run.model)?,
    };
    match checkpoints.latest()? {
        Some(checkpoint) => run = run.load(&checkpoint, group.rank()),
        None => {
            // The same start each time.
            let weight = TensorData::new((0..12).map(|it| (it as f32).cos()).collect(), [4, 3]);
            let weight = |old: Tensor<2>| Tensor::from_data(weight, &old.device()).require_grad();
            run.model.weight = run.model.weight.map(weight);
            let bias = |old: Tensor<1>| old.zeros_like().require_grad();
            run.model.bias = run.model.bias.map(|it| it.map(bias));
        }
    }
    run.model = ddp.broadcast_parameters(run.model)?;
    while run.step < STEPS {
        let batch = run.batch();
        // Rank 1's gradients overflow now and then: all ranks skip the step.
        let factor = match group.rank() == 1 && run.step % 11 == 3 {
            true => f32::INFINITY,
            false => 1.0,
        };
        let loss = run.model.forward(batch).powi_scalar(2).mean();
        let mut mean = [loss.clone().into_scalar::<f32>()];
        let scaled = run.scaler.scale(loss.mul_scalar(factor));
        let gradients = GradientsParams::from_grads(scaled.backward(), &run.model);
        let gradients = ddp.reduce_gradients(gradients, &run.model)?;
        let (model, _) = run
            .scaler
            .step(&mut run.optimizer, 0.05, run.model, gradients);
        run.model = model;
        run.step += 1;
        group.all_reduce(&mut mean, ReduceOp::Mean)?;
        let write = |folder: &Path| run.save(folder, padding);
        checkpoints.save_with(run.step, Some(mean[0].into()), &run.state(), write)?;
        println!("STEP");
    }
    let end = (
        contents(&run.model),
        run.scaler.state().clone(),
        run.random.get_word_pos().to_string(),
    );
    Ok(serde_json::to_string(&end).unwrap())
}

/// A folder in memory, where there is one: each checkpoint is synced, which takes seconds on a disk that is busy with something else.
fn checkpoint_folder() -> TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

fn start(scenario: &str, folder: &Path, url: &str, timeout: f64, small: bool) -> Vec<Rank> {
    let program = std::env::current_exe().unwrap();
    let rank = |rank: usize| {
        let mut command = match small {
            false => Command::new(&program),
            true => {
                // No file above some 100 KB, as if the disk were full; a write that fails is no death.
                let mut shell = Command::new("sh");
                let limited = "trap '' XFSZ; ulimit -f 128; exec \"$0\" \"$@\"";
                shell.args(["-c", limited]).arg(&program);
                shell
            }
        };
        let command = command.args(PLAY).env(FOLDER, folder);
        spawn(command, scenario, rank, RANKS, url, timeout)
    };
    (0..RANKS).map(rank).collect()
}

/// The results of all ranks of a run that nothing happens to.
fn finish(folder: &Path) -> Vec<String> {
    let (_place, url) = meeting_place();
    let ends = start("whole run", folder, &url, 60.0, false)
        .into_iter()
        .map(|rank| result(&rank.succeed(100)).to_string());
    ends.collect()
}

/// The last checkpoint, which must be whole.
fn last(folder: &Path) -> Option<u64> {
    let checkpoints = open(folder, &ProcessGroup::single()).unwrap();
    let last = checkpoints.latest().unwrap()?;
    let record = ModuleRecord::load(last.folder.join("model.bpk")).unwrap();
    let fresh = Run::new(0, &Device::flex().autodiff());
    assert!(fresh.model.clone().try_load_record(record).is_ok());
    let run = fresh.load(&last, 0);
    assert_eq!(run.step, last.step);
    Some(last.step)
}

#[test]
fn a_run_that_is_killed_at_any_moment_goes_on_from_its_last_checkpoint() {
    let whole = checkpoint_folder();
    let expected = finish(whole.path());
    // The last two and the best are left.
    let left = fs::read_dir(whole.path()).unwrap().count();
    assert!(left == 2 || left == 3, "{left}");

    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut folder = checkpoint_folder();
    let (mut reached, mut ended) = (0, 0);
    for kill in 0..20 {
        let victim = random.random_range(0..RANKS);
        // Now and then before the first step, in which the ranks meet.
        let steps = if kill % 5 == 0 {
            0
        } else {
            random.random_range(1..12)
        };
        let moment = match steps {
            0 => random.random_range(0..200_000),
            _ => random.random_range(0..10_000),
        };
        let (_place, url) = meeting_place();
        let scenario = match kill % 4 {
            3 => "whole run overlapped",
            _ => "whole run",
        };
        let mut ranks = start(scenario, folder.path(), &url, 10.0, false);
        let printed = ranks[victim].wait_for_steps(steps);
        let made = made(&printed);
        thread::sleep(Duration::from_micros(moment));
        // It may have come to its end.
        let _ = nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(ranks[victim].0.id() as i32),
            Signal::SIGKILL,
        );
        for (index, rank) in ranks.into_iter().enumerate() {
            let (success, mut output) = rank.finish(Duration::from_secs(30));
            if index == victim {
                output.insert_str(0, &printed);
            }
            match success {
                true => assert_eq!(result(&output), expected[index]),
                false if index == victim => {}
                false => {
                    assert!(output.contains("RESULT error"), "{index}: {output}");
                    // When they have not all met, a rank may not know whom it lacks.
                    let named = output.contains(&format!("rank {victim} died"));
                    assert!(named || made == 0, "{index}: {output}");
                }
            }
        }
        let step = last(folder.path()).unwrap_or(0);
        assert!(step + 1 >= reached + made as u64, "{step} {reached} {made}");
        reached = step;
        if step == STEPS {
            assert_eq!(finish(folder.path()), expected);
            folder = checkpoint_folder();
            (reached, ended) = (0, ended + 1);
        }
    }
    assert!(
        ended > 0 || reached > 0,
        "some steps were made between the kills"
    );
    assert_eq!(finish(folder.path()), expected);
}

#[test]
fn a_full_disk_ends_all_ranks_and_the_last_checkpoint_loads() {
    let folder = checkpoint_folder();
    let (_place, url) = meeting_place();
    let ranks = start("whole run on a small disk", folder.path(), &url, 30.0, true);
    for rank in ranks {
        let output = rank.fail(60);
        assert!(output.contains("RESULT error checkpoint"), "{output}");
        assert!(output.contains("File too large"), "{output}");
    }
    let step = last(folder.path()).unwrap();
    assert!(step > 2 && step < STEPS, "{step}");
    // With room again, the run comes to the end that it would have had.
    let whole = checkpoint_folder();
    assert_eq!(finish(folder.path()), finish(whole.path()));
}
