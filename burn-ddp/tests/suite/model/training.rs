//! Random models, and random steps in which ranks train them.

use burn::{
    module::{Module, Param},
    optim::{GradientsAccumulator, GradientsParams, SgdConfig},
    tensor::{DType, Device, FloatDType, Tensor, TensorData},
};
use burn_ddp::{Compression, Ddp, DdpConfig, DdpError, Overlap, ProcessGroup, clip_gradient_norm};
use burn_layer::Layers;
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::values::mix;
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
    /// For each rank, the bits of the parameters that it uses.
    uses: Vec<u16>,
}

fn step() -> impl Strategy<Value = Step> {
    let micro_steps = prop_oneof![2 => Just(1usize), 1 => 2usize..4];
    let uses = prop::collection::vec(prop_oneof![Just(u16::MAX), any::<u16>()], 4);
    (any::<u8>(), micro_steps, any::<u8>(), uses).prop_map(|(has, micro_steps, inside, uses)| {
        Step {
            has,
            micro_steps,
            inside,
            uses,
        }
    })
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
    broadcast: bool,
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
        }
    }

    /// The same with what averaging during backward asks for.
    pub(crate) fn overlapped(mut self, ranks: usize) -> Self {
        self.ranks = ranks;
        self.broadcast = true;
        for step in &mut self.steps {
            let alike = step.uses[0];
            step.uses.fill(alike);
            if self.hook == Hook::Sum && step.micro_steps > 1 {
                step.inside = u8::MAX;
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

#[derive(Module, Debug)]
struct Model {
    parameters: Vec<Param<Tensor<2>>>,
}

impl Model {
    fn new(training: &Training, rank: usize, device: &Device) -> Self {
        let phase = if training.broadcast { rank } else { 0 };
        let mut parameters: Vec<Param<Tensor<2>>> = Vec::new();
        for (place, slot) in training.slots.iter().enumerate() {
            parameters.push(match slot.tied {
                Some(first) => parameters[first].clone(),
                None => {
                    let value = |index: usize| ((index + place * 7 + phase * 31) as f64).sin();
                    let values: Vec<f64> = (0..slot.shape[0] * slot.shape[1]).map(value).collect();
                    let data = TensorData::new(values, slot.shape);
                    let tensor = Tensor::from_data(data, (device, DType::from(slot.dtype)));
                    Param::from_tensor(tensor).set_require_grad(!slot.frozen)
                }
            });
        }
        Self { parameters }
    }

    /// Burn's optimizers change the first place alone of a parameter that is in several.
    fn tied(mut self, training: &Training) -> Self {
        for (place, slot) in training.slots.iter().enumerate() {
            if let Some(first) = slot.tied {
                self.parameters[place] = self.parameters[first].clone();
            }
        }
        self
    }

    /// The same parameters on another device, with graphs of their own.
    fn on(&self, training: &Training, device: &Device) -> Self {
        let mut parameters: Vec<Param<Tensor<2>>> = Vec::new();
        for (own, slot) in self.parameters.iter().zip(&training.slots) {
            parameters.push(match slot.tied {
                Some(first) => parameters[first].clone(),
                None => {
                    let data = own.val().into_data();
                    let tensor = Tensor::from_data(data, (device, DType::from(slot.dtype)));
                    Param::from_tensor(tensor).set_require_grad(!slot.frozen)
                }
            });
        }
        Self { parameters }
    }

    /// The gradients of a pass of a rank: in each use of parameter p, p / 2 and a number of the rank and pass.
    fn backward(&self, used: &[usize], seed: u64) -> GradientsParams {
        let term = |place: &usize| {
            let parameter = &self.parameters[*place];
            let factor = (mix(seed ^ *place as u64) % 17) as f64 / 8.0 - 1.0;
            let square = (parameter.val() * parameter.val()).mul_scalar(0.25);
            (square + parameter.val().mul_scalar(factor))
                .sum()
                .cast(FloatDType::F32)
        };
        match used.iter().map(term).reduce(|a, b| a + b) {
            Some(loss) => GradientsParams::from_grads(loss.backward(), self),
            None => GradientsParams::new(),
        }
    }

    fn values_of(&self, gradients: &GradientsParams) -> Vec<Option<Vec<f64>>> {
        let each = self.parameters.iter();
        each.map(|it| gradients.get::<2>(it.id).map(values))
            .collect()
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
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
    let mut ddp = match overlap {
        Some(overlap) => Ddp::overlapped(group, overlap, &model)?,
        None => Ddp::new(group, training.config(), &model)?,
    };
    if training.broadcast {
        model = ddp.broadcast_parameters(model)?;
    }
    let mut optimizer = SgdConfig::new().init();
    let mut all = Vec::new();
    for (number, step) in training.steps.iter().enumerate() {
        let mut seen = Seen {
            active: training.ranks,
            ..Seen::default()
        };
        let has = step.has >> rank & 1 == 1;
        if training.join {
            seen.active = ddp.join(has)?;
        }
        let replica = model.on(training, &plain);
        let passes = if has { step.micro_steps } else { 0 };
        let mut sum = GradientsAccumulator::new();
        let mut own = GradientsAccumulator::new();
        for pass in 0..passes {
            let used = training.used(step, rank, pass);
            let seed = mix((number * 64 + rank * 8 + pass) as u64);
            let gradients = match step.inside >> pass & 1 {
                1 => ddp.no_sync(|_| model.backward(&used, seed)),
                _ => model.backward(&used, seed),
            };
            sum.accumulate(&model, gradients);
            own.accumulate(&replica, replica.backward(&used, seed));
        }
        seen.own = replica.values_of(&own.grads());
        if seen.active > 0 {
            let mut gradients = ddp.reduce_gradients(sum.grads(), &model)?;
            seen.averages = model.values_of(&gradients);
            if let Some(max_norm) = training.max_norm {
                let (clipped, norm) = clip_gradient_norm(gradients, &model, max_norm)?;
                (gradients, seen.norm) = (clipped, Some(norm));
            }
            seen.clipped = model.values_of(&gradients);
            model = optimizer.step(0.25, model, gradients).tied(training);
        }
        let parameters = model.parameters.iter();
        seen.parameters = parameters.map(|it| values(it.val())).collect();
        all.push(seen);
    }
    Ok(all)
}
