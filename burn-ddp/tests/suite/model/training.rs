//! Random models, and random steps in which ranks train them.

use burn::{
    optim::{GradientsAccumulator, GradientsParams, SgdConfig},
    tensor::{Device, FloatDType},
};
use burn_ddp::{Compression, Ddp, DdpConfig, DdpError, Overlap, ProcessGroup, clip_gradient_norm};
use burn_layer::Layers;
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::{
    aside::{Aside, Renewed, asides},
    parameters::{Model, values},
    values::mix,
};
use crate::suite::accumulation::Sum;

/// A parameter.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) shape: [usize; 2],
    pub(crate) dtype: FloatDType,
    pub(crate) frozen: bool,
    /// The place of an earlier parameter that is here too.
    pub(crate) tied: Option<usize>,
}

fn slot() -> impl Strategy<Value = Slot> {
    let dtypes = [
        FloatDType::F32,
        FloatDType::F32,
        FloatDType::F64,
        FloatDType::BF16,
        FloatDType::F16,
    ];
    let few = [1usize..7, 1..7].prop_map(|shape| shape);
    let shape = prop_oneof![8 => few, 1 => Just([40, 60]), 1 => Just([0, 3])];
    let tied = prop_oneof![4 => Just(None), 1 => (0usize..12).prop_map(Some)];
    let frozen = prop_oneof![5 => Just(false), 1 => Just(true)];
    (shape, prop::sample::select(dtypes.to_vec()), frozen, tied).prop_map(
        |(shape, dtype, frozen, tied)| Slot {
            shape,
            dtype,
            frozen,
            tied,
        },
    )
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hook {
    Average,
    F16,
    BF16,
    Sum,
}

/// A step, which may have several backward passes.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// Bits of the ranks that have a batch.
    pub(crate) has: u8,
    micro_steps: usize,
    /// Bits of the passes that run inside `no_sync`.
    inside: u8,
    /// Bits of the ranks that run a pass more.
    more: u8,
    /// For each rank, the bits of the parameters that it uses.
    uses: Vec<u16>,
    aside: Aside,
}

fn step() -> impl Strategy<Value = Step> {
    let micro_steps = prop_oneof![2 => Just(1usize), 1 => 2usize..4];
    let uses = prop::collection::vec(prop_oneof![Just(u16::MAX), any::<u16>()], 4);
    let has = prop_oneof![Just(u8::MAX), any::<u8>()];
    let bits = (has, any::<u8>(), any::<u8>());
    (bits, micro_steps, uses, asides()).prop_map(
        |((has, inside, more), micro_steps, uses, aside)| Step {
            has,
            micro_steps,
            inside,
            more,
            uses,
            aside,
        },
    )
}

impl Step {
    /// The number of passes of a rank.
    fn passes(&self, rank: usize) -> usize {
        match self.has >> rank & 1 {
            0 => 0,
            _ => self.micro_steps + usize::from(self.more >> rank & 1),
        }
    }

    /// Whether no pass may average.
    fn is_inside(&self) -> bool {
        let passes = (1 << (self.micro_steps + 1)) - 1;
        self.inside & passes == passes && self.aside.wasted != Some(false)
    }
}

/// How all ranks train.
#[derive(Clone, Debug)]
pub(crate) struct Training {
    pub(crate) ranks: usize,
    pub(crate) tcp: bool,
    pub(crate) slots: Vec<Slot>,
    buckets: [usize; 2],
    pub(crate) hook: Hook,
    pub(crate) static_graph: bool,
    pub(crate) divide_by_all: bool,
    /// Whether ranks begin with parameters of their own, and get those of rank 0.
    pub(crate) broadcast: bool,
    pub(crate) join: bool,
    pub(crate) max_norm: Option<f64>,
    pub(crate) steps: Vec<Step>,
}

pub(crate) fn trainings() -> impl Strategy<Value = Training> {
    let hooks = vec![
        Hook::Average,
        Hook::Average,
        Hook::F16,
        Hook::BF16,
        Hook::Sum,
    ];
    let bytes = || prop::sample::select(vec![1usize, 16, 100, 1000, 1 << 20]);
    let max_norm = prop_oneof![Just(None), (0.1f64..10.0).prop_map(Some)];
    (
        (1usize..5, any::<bool>()),
        prop::collection::vec(slot(), 1..13),
        [bytes(), bytes()],
        prop::sample::select(hooks),
        any::<[bool; 4]>(),
        max_norm,
        prop::collection::vec(step(), 1..5),
    )
        .prop_map(|(ranks, slots, buckets, hook, flags, max_norm, steps)| {
            let [static_graph, divide_by_all, broadcast, join] = flags;
            let mut training = Training {
                ranks: ranks.0,
                tcp: ranks.1,
                slots,
                buckets,
                hook,
                static_graph,
                divide_by_all,
                broadcast,
                join,
                max_norm,
                steps,
            };
            training.settle();
            training
        })
}

impl Training {
    /// Keeps to what is documented.
    fn settle(&mut self) {
        for place in 0..self.slots.len() {
            let first = self.slots[place].tied.filter(|first| *first < place);
            let first = first.map(|first| self.slots[first].tied.unwrap_or(first));
            self.slots[place] = Slot {
                tied: first,
                ..self.slots[first.unwrap_or(place)].clone()
            };
        }
        let promised = self.steps[0].uses.clone();
        for step in &mut self.steps {
            if self.static_graph {
                step.uses.clone_from(&promised);
            }
            if !self.join {
                step.has = u8::MAX;
            }
            // Averages are no longer averages of the ranks that have a batch, or sums are summed up again.
            let differs = self.join && !self.divide_by_all;
            step.aside.again &= !differs && !self.static_graph && self.hook != Hook::Sum;
        }
    }

    /// The same with what averaging during backward asks for.
    pub(crate) fn overlapped(mut self, ranks: usize) -> Self {
        self.ranks = ranks;
        self.broadcast = true;
        for step in &mut self.steps {
            let once = step.micro_steps == 1 && step.more == 0;
            if self.hook == Hook::Sum {
                step.aside.keep_sums();
                if !once {
                    step.inside = u8::MAX;
                }
            }
            // Burn submits no gradient of a parameter that has been through backward already, so that must be the
            // same on all ranks if the next pass finds the same parameters.
            if !step.is_inside() || step.aside.skipped || self.static_graph {
                let alike = step.uses[0];
                step.uses.fill(alike);
                step.more = 0;
            }
        }
        self
    }

    fn config(&self) -> DdpConfig {
        let config = DdpConfig::new()
            .first_bucket_bytes(self.buckets[0])
            .bucket_bytes(self.buckets[1])
            .static_graph(self.static_graph)
            .divide_by_initial_world_size(self.divide_by_all);
        match self.hook {
            Hook::Average => config,
            Hook::F16 => config.compression(Compression::F16),
            Hook::BF16 => config.compression(Compression::BF16),
            Hook::Sum => config.hook(Sum),
        }
    }

    /// The parameters that a rank uses in a pass, if any of them is trained.
    fn used(&self, step: &Step, rank: usize, pass: usize) -> Vec<usize> {
        // Others in later passes.
        let more = if self.static_graph {
            0
        } else {
            mix(pass as u64) as u16 & 5
        };
        let bits = step.uses[rank] | more;
        let used: Vec<usize> = (0..self.slots.len())
            .filter(|place| bits >> place & 1 == 1)
            .collect();
        match used.iter().any(|place| !self.slots[*place].frozen) {
            true => used,
            false => Vec::new(),
        }
    }
}

/// What a rank has seen of a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// What `join` said.
    pub(crate) active: usize,
    /// The rank's own gradients, by parameter.
    pub(crate) own: Vec<Option<Vec<f64>>>,
    pub(crate) averages: Vec<Option<Vec<f64>>>,
    pub(crate) norm: Option<f64>,
    pub(crate) clipped: Vec<Option<Vec<f64>>>,
    pub(crate) parameters: Vec<Vec<f64>>,
}

/// Trains one rank; gradients are averaged during backward if it is `overlapped`.
pub(crate) fn train(
    group: &ProcessGroup,
    training: &Training,
    overlapped: bool,
) -> Result<Vec<Seen>, DdpError> {
    let rank = group.rank();
    let plain = Device::flex().autodiff();
    let overlap = overlapped.then(|| Overlap::new(group, training.config()));
    let overlap = overlap.transpose()?;
    // Many cases have many devices, one after the other.
    let lease = overlap.as_ref().map(|overlap| {
        let layers = Layers::on(Device::flex()).layer(overlap.layer());
        layers.lease().unwrap()
    });
    let device = match &lease {
        Some(lease) => lease.device().autodiff(),
        None => plain.clone(),
    };
    let mut model = Model::new(training, rank, &device);
    let start = |model: &Model| match &overlap {
        Some(overlap) => Ddp::overlapped(group, overlap.clone(), model),
        None => Ddp::new(group, training.config(), model),
    };
    let mut ddp = start(&model)?;
    if training.broadcast {
        model = ddp.broadcast_parameters(model)?;
    }
    let mut optimizer = SgdConfig::new().init();
    let mut all = Vec::new();
    for (number, step) in training.steps.iter().enumerate() {
        match step.aside.renewed {
            Renewed::Nothing => {}
            Renewed::Ddp => {
                drop(ddp);
                ddp = start(&model)?;
            }
            Renewed::Parameters => {
                model = ddp.broadcast_parameters(model.reloaded(training))?;
            }
        }
        let mut seen = Seen {
            active: training.ranks,
            ..Seen::default()
        };
        if training.join {
            seen.active = ddp.join(step.has >> rank & 1 == 1)?;
        }
        let replica = model.on(training, &plain);
        let passes = step.passes(rank);
        if passes > 0
            && let Some(inside) = step.aside.wasted
        {
            let used = training.used(step, rank, 0);
            let _ = pass(&mut ddp, inside, || model.backward(&used, 0));
        }
        let mut sum = GradientsAccumulator::new();
        let mut own = GradientsAccumulator::new();
        for at in 0..passes {
            let used = training.used(step, rank, at);
            let seed = mix((number * 64 + rank * 8 + at) as u64);
            step.aside.before_pass(at, &device);
            let gradients = pass(&mut ddp, step.inside >> at & 1 == 1, || {
                model.backward(&used, seed)
            });
            sum.accumulate(&model, gradients);
            own.accumulate(&replica, replica.backward(&used, seed));
        }
        step.aside.before_pass(passes, &device);
        seen.own = replica.values_of(&own.grads());
        if seen.active > 0 {
            let mut gradients = ddp.reduce_gradients(sum.grads(), &model)?;
            if step.aside.again {
                gradients = ddp.reduce_gradients(gradients, &model)?;
            }
            seen.averages = model.values_of(&gradients);
            if let Some(max_norm) = training.max_norm {
                let (clipped, norm) = clip_gradient_norm(gradients, &model, max_norm)?;
                (gradients, seen.norm) = (clipped, Some(norm));
            }
            seen.clipped = model.values_of(&gradients);
            if !step.aside.skipped {
                model = optimizer.step(0.25, model, gradients).tied(training);
            }
        }
        let parameters = model.parameters.iter();
        seen.parameters = parameters.map(|it| values(it.val())).collect();
        all.push(seen);
    }
    Ok(all)
}

/// The gradients of a pass, inside `no_sync` or not.
fn pass(
    ddp: &mut Ddp,
    inside: bool,
    backward: impl FnOnce() -> GradientsParams,
) -> GradientsParams {
    match inside {
        true => ddp.no_sync(|_| backward()),
        false => backward(),
    }
}
