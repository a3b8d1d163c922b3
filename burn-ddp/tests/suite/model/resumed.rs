//! Random training that is broken off and resumed from checkpoints, beside the same training without a break: equal to the bit.

use std::{fs, io, path::Path, sync::Arc};

use burn::{
    data::{dataloader::DataLoader, dataset::InMemDataset},
    module::{Module, Param},
    nn::{BatchNormConfig, Linear, LinearConfig},
    optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig},
    store::ModuleRecord,
    tensor::{Device, Tensor, TensorData},
};
use burn_amp::{LossScaler, LossScalerConfig, LossScalerState};
use burn_ddp::{
    Checkpoint, Checkpoints, Ddp, DdpConfig, DistributedLoader, DistributedSampler, ModelEma,
    ProcessGroup, SamplerState, SyncBatchNorm,
};
use burn_fp8::{
    Fp8Linear,
    recipe::{CurrentScaling, DelayedScaling, Fp8Recipe},
    share_amaxes,
};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::{config, samplers::Items, values::mix, watched};
use crate::suite::{net::contents, ranks::locally};

const FEATURES: usize = 4;
const HIDDEN: usize = 6;

#[derive(Clone, Debug)]
struct Case {
    ranks: usize,
    items: usize,
    batch: usize,
    workers: usize,
    steps: usize,
    /// Bits of the steps after which the run is broken off.
    breaks: u16,
    /// Bits of the steps after which the ranks get the model of rank 0, as before an evaluation.
    broadcasts: u16,
    /// Bits of the steps in which a rank's gradients overflow.
    overflows: u16,
    adam: bool,
    max_norm: Option<f64>,
    decay: f64,
    warm_up: bool,
    recipe: Fp8Recipe,
    /// Whether fp8 layers share their amaxes in each pass, or all at once after each step.
    each_layer: bool,
    /// Whether rank 0 alone loads model and optimizer, and the others get them from it.
    one_loads: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let delayed = (1usize..4, 1usize..4).prop_map(|(len, interval)| {
        let recipe = DelayedScaling::new().with_amax_history_len(len);
        Fp8Recipe::from(recipe.with_interval(interval))
    });
    let recipe = prop_oneof![3 => delayed, 1 => Just(CurrentScaling::new().into())];
    (
        (1usize..4, 1usize..20, 1usize..4, 0usize..3),
        (2usize..9, any::<[u16; 4]>()),
        prop_oneof![Just(None), (0.01f64..2.0).prop_map(Some)],
        (0.0f64..1.0, recipe, any::<[bool; 4]>()),
    )
        .prop_map(|(data, steps, max_norm, (decay, recipe, flags))| {
            let (ranks, items, batch, workers) = data;
            let (steps, [breaks, broadcasts, some, others]) = steps;
            let [adam, warm_up, each_layer, one_loads] = flags;
            Case {
                ranks,
                items,
                batch,
                workers,
                steps,
                breaks,
                broadcasts,
                overflows: some & others,
                adam,
                max_norm,
                decay,
                warm_up,
                recipe,
                each_layer,
                one_loads,
            }
        })
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: SyncBatchNorm,
    second: Fp8Linear,
}

fn number(seed: u64) -> f32 {
    (mix(seed) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let seed = mix(seed);
    (0..count as u64).map(|at| number(seed ^ at)).collect()
}

fn linear(seed: u64, inputs: usize, device: &Device) -> Linear {
    let mut linear = LinearConfig::new(inputs, HIDDEN)
        .with_bias(false)
        .init(device);
    let data = TensorData::new(numbers(seed, inputs * HIDDEN), [inputs, HIDDEN]);
    linear.weight = Param::from_tensor(Tensor::from_data(data, device));
    linear
}

impl Net {
    fn new(case: &Case, group: &ProcessGroup, seed: u64) -> Self {
        let device = Device::flex().autodiff();
        let second = Fp8Linear::from_linear(linear(seed + 1, HIDDEN, &device), case.recipe);
        let mut second = second.unwrap();
        if case.each_layer {
            second = second.with_amax_reducer(Arc::new(group.clone()));
        }
        Self {
            first: linear(seed, FEATURES, &device),
            norm: SyncBatchNorm::new(&BatchNormConfig::new(HIDDEN).init(&device), group),
            second,
        }
    }

    fn forward(&self, items: &[usize]) -> Tensor<1> {
        let values = items
            .iter()
            .flat_map(|item| numbers(*item as u64, FEATURES));
        let data = TensorData::new(values.collect::<Vec<f32>>(), [items.len(), FEATURES]);
        let input = Tensor::<2>::from_data(data, &Device::flex().autodiff());
        let hidden = self.norm.forward(self.first.forward(input));
        self.second.forward(hidden).powi_scalar(2).mean()
    }
}

/// What each rank saves beside what is the same on all.
#[derive(Serialize, Deserialize)]
struct State {
    sampler: SamplerState,
    scaler: LossScalerState,
    updates: u64,
}

/// What has come of a run: all that is in the model, running statistics and scales of fp8 included, and in its average.
struct End {
    model: Vec<f32>,
    average: Vec<f32>,
    scaler: LossScalerState,
}

struct Run {
    model: Net,
    ddp: Ddp,
    optimizer: ModuleOptimizer,
    ema: ModelEma<Net>,
    scaler: LossScaler,
    loader: Arc<DistributedLoader<usize, Vec<usize>>>,
    step: usize,
}

fn file(folder: &Path, name: &str) -> std::path::PathBuf {
    folder.join(name).with_extension("bpk")
}

impl Run {
    /// The beginning, or the rest from a checkpoint.
    fn new(case: &Case, group: &ProcessGroup, last: Option<Checkpoint>) -> Self {
        let (rank, ranks) = (group.rank(), group.world_size());
        let mut model = Net::new(case, group, if last.is_some() { 77 } else { 7 });
        let mut optimizer = match case.adam {
            true => AdamConfig::new().init(),
            false => {
                let momentum = MomentumConfig::new().with_momentum(0.9);
                SgdConfig::new().with_momentum(Some(momentum)).init()
            }
        };
        let scaler = LossScalerConfig::new().with_init_scale(64.0);
        let mut scaler = scaler.with_growth_interval(3).init().unwrap();
        let sampler = DistributedSampler::new(case.items, rank, ranks).shuffle(true);
        let dataset = InMemDataset::new((0..case.items).collect());
        let loader = DistributedLoader::new(dataset, Items, sampler)
            .batch_size(case.batch)
            .num_workers(case.workers);
        let ddp = Ddp::new(group, DdpConfig::new(), &model).unwrap();
        if let Some(last) = &last
            && (group.is_main() || !case.one_loads)
        {
            model = model.load_file(file(&last.folder, "model"));
            optimizer = optimizer.load(file(&last.folder, "optimizer")).unwrap();
        }
        if last.is_none() || case.one_loads {
            model = ddp.broadcast_parameters(model).unwrap();
            optimizer = ddp.broadcast_optimizer(optimizer, &model).unwrap();
        }
        let mut ema = ModelEma::new(&model, case.decay).warm_up(case.warm_up);
        if let Some(last) = &last {
            let state: State = last.state(rank).unwrap();
            let average = ModuleRecord::load(file(&last.folder, "average")).unwrap();
            ema = ema.restore(average, state.updates).unwrap();
            scaler = scaler.load_state(state.scaler).unwrap();
            loader.load_state(&state.sampler);
        }
        Self {
            model,
            ddp,
            optimizer,
            ema,
            scaler,
            loader: Arc::new(loader),
            step: last.map_or(0, |last| last.step as usize),
        }
    }

    fn train(&mut self, case: &Case, batch: &[usize]) {
        let group = self.ddp.group().clone();
        let overflows = case.overflows >> self.step & 1 == 1;
        let factor = match overflows && group.rank() == self.step % group.world_size() {
            // Not infinity, which a cast to fp8 saturates.
            true => f32::NAN,
            false => 1.0,
        };
        let model = self.model.clone();
        let loss = self.scaler.scale(model.forward(batch).mul_scalar(factor));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = self.ddp.reduce_gradients(gradients, &model).unwrap();
        let mut unscaled = self.scaler.unscale(gradients, &model);
        if let Some(max_norm) = case.max_norm {
            (unscaled, _) = unscaled.clip_norm(&model, max_norm);
        }
        let (mut model, step) = unscaled.step(&mut self.optimizer, 0.05, model);
        assert_eq!(step.overflow.is_some(), overflows);
        self.scaler.update_after([&step]).unwrap();
        if !case.each_layer {
            model = share_amaxes(model, &group).unwrap();
        }
        self.ema.update(&model);
        self.model = model;
        self.step += 1;
    }

    /// Shares the amaxes of the last pass, as the next one would.
    fn share(&mut self) {
        self.model = share_amaxes(self.model.clone(), self.ddp.group()).unwrap();
    }

    fn save(&mut self, checkpoints: &Checkpoints, items: usize) {
        self.share();
        let state = State {
            sampler: self.loader.state(items),
            scaler: self.scaler.state().clone(),
            updates: self.ema.updates(),
        };
        let write = |folder: &Path| {
            let model = self.model.valid().save_file(file(folder, "model"));
            model.map_err(io::Error::other)?;
            let optimizer = self.optimizer.save(file(folder, "optimizer"));
            optimizer.map_err(io::Error::other)?;
            let average = self.ema.record().save(file(folder, "average"));
            average.map_err(io::Error::other)
        };
        let saved = checkpoints.save_with(self.step as u64, None, &state, write);
        saved.unwrap();
    }

    fn end(mut self) -> End {
        self.share();
        // Burn reads a state from its file when it is first used, which must be before the file is removed.
        let folder = tempfile::tempdir().unwrap();
        self.optimizer
            .save(file(folder.path(), "optimizer"))
            .unwrap();
        End {
            model: contents(&self.model.valid()),
            average: contents(&self.ema.apply(&self.model)),
            scaler: self.scaler.state().clone(),
        }
    }
}

/// Trains a rank, with breaks where there is a folder for checkpoints.
fn train(case: &Case, group: &ProcessGroup, folder: Option<&Path>) -> End {
    let checkpoints = folder.map(|folder| Checkpoints::new(folder, group).unwrap());
    loop {
        let last = checkpoints.as_ref().and_then(|it| it.latest().unwrap());
        let mut run = Run::new(case, group, last);
        let loader = run.loader.clone();
        let mut epoch = loader.state(0).epoch;
        let mut broken_off = false;
        while run.step < case.steps && !broken_off {
            loader.set_epoch(epoch);
            let mut pass = loader.iter();
            while run.step < case.steps
                && !broken_off
                && let Some(batch) = pass.next()
            {
                run.train(case, &batch.unwrap());
                let happens = |steps: u16| checkpoints.is_some() && steps >> run.step & 1 == 1;
                let (breaks, broadcasts) = (happens(case.breaks), happens(case.broadcasts));
                if broadcasts {
                    let model = run.model.clone();
                    run.model = run.ddp.broadcast_parameters(model).unwrap();
                }
                if let Some(checkpoints) = checkpoints.as_ref().filter(|_| breaks) {
                    run.save(checkpoints, pass.progress().items_processed);
                    broken_off = true;
                }
            }
            epoch += 1;
        }
        if run.step == case.steps {
            return run.end();
        }
    }
}

fn run(case: &Case) {
    let whole = locally(case.ranks, |group| train(case, &group, None));
    let folder = tempfile::tempdir().unwrap();
    let resumed = locally(case.ranks, |group| train(case, &group, Some(folder.path())));
    for (rank, (resumed, whole)) in resumed.iter().zip(&whole).enumerate() {
        assert_eq!(resumed.scaler, whole.scaler, "rank {rank}");
        let mut pairs = vec![("model", &resumed.model, &whole.model)];
        // Others have averaged their own amaxes, and go on with those of rank 0.
        if rank == 0 || !case.each_layer {
            pairs.push(("average", &resumed.average, &whole.average));
        }
        for (what, resumed, whole) in pairs {
            assert_eq!(resumed.len(), whole.len(), "{what} of rank {rank}");
            let mut pairs = resumed.iter().zip(whole).enumerate();
            let other = pairs.find(|(_, (resumed, whole))| resumed.to_bits() != whole.to_bits());
            assert_eq!(other, None, "{what} of rank {rank}");
        }
    }
    let saved = fs::read_dir(folder.path()).unwrap().count();
    let breaks = (1..=case.steps).filter(|step| case.breaks >> step & 1 == 1);
    assert_eq!(saved, breaks.count());
}

proptest! {
    #![proptest_config(config(12))]
    #[test]
    fn a_run_that_was_broken_off_goes_on_as_if_it_had_not_been(case in cases()) {
        watched(&case, run);
    }
}
