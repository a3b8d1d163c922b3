//! Ranks that begin alike: what rank 0 has loaded reaches the others, and who forgets it is told.

use burn::{
    module::{Module, Param, ParamId, RunningState},
    nn::{BatchNorm, BatchNormConfig, Initializer, Linear, LinearConfig},
    optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig},
    store::ModuleRecord,
    tensor::{Bool, Device, Int, Tensor, TensorData},
};
use burn_ddp::{Ddp, DdpConfig, DdpError, ProcessGroup};
use burn_layer::Layers;

use crate::suite::{
    net::{closest, contents},
    overlapped::layered,
    ranks::{all_succeed, locally},
};

#[derive(Module, Debug)]
struct Model {
    first: Linear,
    second: Linear,
}

fn model(device: &Device) -> Model {
    Model {
        first: LinearConfig::new(3, 4).init(device),
        second: LinearConfig::new(4, 2).init(device),
    }
}

fn gradients(model: &Model, step: usize, device: &Device) -> GradientsParams {
    let values: Vec<f32> = (0..6).map(|it| ((step * 7 + it) as f32).sin()).collect();
    let input = Tensor::<2>::from_data(TensorData::new(values, [2, 3]), device);
    let loss = model.second.forward(model.first.forward(input).tanh());
    GradientsParams::from_grads(loss.powi_scalar(2).mean().backward(), model)
}

fn optimizers() -> [ModuleOptimizer; 2] {
    let momentum = MomentumConfig::new().with_momentum(0.9);
    [
        AdamConfig::new().init(),
        SgdConfig::new().with_momentum(Some(momentum)).init(),
    ]
}

/// One process that trains on; a job that goes on from its checkpoint, which rank 0 alone has read.
#[test]
fn the_state_of_an_optimizer_reaches_all_ranks() {
    let device = Device::flex().autodiff();
    for kind in 0..2 {
        let (mut one, mut optimizer) = (model(&device), optimizers()[kind].clone());
        let mut train = |steps: std::ops::Range<usize>| {
            for step in steps {
                let gradients = gradients(&one, step, &device);
                one = optimizer.step(0.05, one.clone(), gradients);
            }
            (one.clone(), optimizer.clone())
        };
        let (saved, optimizer) = train(0..5);
        let saved = saved.into_record().into_bytes().unwrap();
        let state = optimizer.into_bytes().unwrap();
        let whole = contents(&train(5..10).0);
        let ends = locally(3, |group| {
            let (mut model, mut optimizer) = (model(&device), optimizers()[kind].clone());
            let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
            if group.is_main() {
                model = model.load_record(ModuleRecord::from_bytes(saved.clone()).unwrap());
                optimizer = optimizer.from_bytes(state.clone()).unwrap();
            }
            let mut model = ddp.broadcast_parameters(model).unwrap();
            let mut optimizer = ddp.broadcast_optimizer(optimizer, &model).unwrap();
            // No averages: every rank has the same gradients, and only its own state.
            for step in 5..10 {
                let gradients = gradients(&model, step, &device);
                model = optimizer.step(0.05, model, gradients);
            }
            contents(&model)
        });
        for end in ends {
            assert_eq!(closest(&end, &whole), 0.0);
        }
    }
}

#[test]
fn another_model_gets_no_state() {
    let device = Device::flex().autodiff();
    let errors = locally(2, |group| {
        let ddp = Ddp::new(&group, DdpConfig::new(), &model(&device)).unwrap();
        let other = LinearConfig::new(3, 3).init(&device);
        let optimizer = SgdConfig::new().init();
        let received = ddp.broadcast_optimizer(optimizer, &other);
        received.err().unwrap().to_string()
    });
    assert!(
        errors.iter().all(|it| it.contains("make a new Ddp for it")),
        "{errors:?}"
    );
}

fn first_step(group: &ProcessGroup, model: &Model, device: &Device) -> Result<(), DdpError> {
    let mut ddp = Ddp::new(group, DdpConfig::new(), model)?;
    for step in 0..2 {
        ddp.reduce_gradients(gradients(model, step, device), model)?;
    }
    Ok(())
}

#[test]
fn ranks_that_begin_apart_are_told() {
    let device = Device::flex().autodiff();
    // Burn draws each rank's parameters anew.
    let errors = locally(3, |group| {
        first_step(&group, &model(&device), &device).unwrap_err()
    });
    for error in &errors {
        let DdpError::ModelMismatch { rank: 1, problem } = error else {
            panic!("{error}")
        };
        assert!(problem.contains("`first.weight`"), "{problem}");
        assert!(problem.contains("Ddp::broadcast_parameters"), "{problem}");
    }
    let record = model(&device).into_record().into_bytes().unwrap();
    locally(3, |group| {
        let record = ModuleRecord::from_bytes(record.clone()).unwrap();
        let model = model(&device).load_record(record);
        first_step(&group, &model, &device).unwrap();
    });
}

/// The model that was received is dropped, and each rank trains its own.
#[test]
fn what_is_trained_instead_of_what_was_received_is_compared() {
    let device = Device::flex().autodiff();
    let errors = locally(3, |group| {
        let own = model(&device);
        let mut ddp = Ddp::new(&group, DdpConfig::new(), &own).unwrap();
        drop(ddp.broadcast_parameters(own.clone()).unwrap());
        let gradients = gradients(&own, 0, &device);
        ddp.reduce_gradients(gradients, &own).unwrap_err()
    });
    for error in &errors {
        let DdpError::ModelMismatch { rank: 1, problem } = error else {
            panic!("{error}")
        };
        assert!(problem.contains("`first.weight`"), "{problem}");
        assert!(
            problem.contains("train the one that this returns"),
            "{problem}"
        );
    }
}

/// Two draws of a large matrix have sums that are alike, as have the same numbers in another order.
#[test]
fn sums_that_are_alike_do_not_make_models_equal() {
    let device = Device::flex().autodiff();
    let errors = locally(4, |group| {
        let numbers: Vec<f32> = (0..640).map(|it| (it as f32 * 0.7).sin()).collect();
        let numbers = match group.rank() {
            3 => numbers.into_iter().rev().collect(),
            _ => numbers,
        };
        let weight = TensorData::new(numbers, [20, 32]);
        let model = Linear {
            weight: Param::from_tensor(Tensor::<2>::from_data(weight, &device)),
            bias: None,
        };
        let first_step = |group: &ProcessGroup, model: &Linear| {
            let mut ddp = Ddp::new(group, DdpConfig::new(), model)?;
            let input = Tensor::<2>::ones([1, 20], &device);
            let loss = model.forward(input).sum();
            let gradients = GradientsParams::from_grads(loss.backward(), model);
            ddp.reduce_gradients(gradients, model).map(drop)
        };
        // A part of the job in which all are equal, and one in which they are not.
        let part = group.subgroup(&[0, 1]).unwrap();
        let other = group.subgroup(&[2, 3]).unwrap();
        if let Some(part) = part {
            first_step(&part, &model).unwrap();
            // Nor does a number that is none make them differ.
            let nan = Tensor::<2>::full([1, 1], f32::NAN, &device.clone().without_autodiff());
            let spoilt = Linear {
                weight: model.weight.clone().map(|weight| {
                    let nan = Tensor::from_inner(nan);
                    weight
                        .slice_assign([0..1, 1..2], nan)
                        .detach()
                        .require_grad()
                }),
                bias: None,
            };
            first_step(&part, &spoilt).unwrap();
        }
        other.map(|other| first_step(&other, &model).unwrap_err())
    });
    for error in errors.iter().skip(2) {
        // The number in the whole job.
        let Some(DdpError::ModelMismatch { rank: 3, problem }) = error else {
            panic!("{error:?}")
        };
        assert!(
            problem.contains("`weight` begins with other numbers (one of them"),
            "{problem}"
        );
    }
}

/// Where nobody has made the ranks equal, their parameters are compared, wherever these are.
#[test]
fn models_on_several_devices_are_compared() {
    for other in [false, true] {
        let results = locally(2, |group| {
            let devices = [Device::flex(), Layers::on(Device::flex()).serve().unwrap()];
            let [first, second] = devices.map(|device| device.autodiff());
            let full = |value: f32, device: &Device| {
                Param::from_tensor(Tensor::<1>::full([3], value, device))
            };
            let begins = if other && group.rank() == 1 { 4.0 } else { 2.0 };
            let model = [full(1.0, &first), full(begins, &second)];
            let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
            let mut gradients = GradientsParams::new();
            for param in &model {
                let device = param.val().device().inner();
                let rank = Tensor::<1>::full([3], group.rank() as f32, &device);
                gradients.register(param.id, rank);
            }
            let averages = ddp.reduce_gradients(gradients, &model)?;
            let values = model.each_ref().map(|param| {
                let average = averages.get::<1>(param.id).unwrap();
                average.into_data().try_to_vec::<f32>().unwrap()
            });
            assert_eq!(values, [[0.5; 3]; 2]);
            Ok(())
        });
        for result in results {
            let result: Result<(), DdpError> = result;
            match result {
                Ok(()) => assert!(!other),
                Err(error) => assert!(other && error.to_string().contains("begins with other")),
            }
        }
    }
}

/// A head that begins alike, over what no optimizer changes.
#[derive(Module, Debug)]
struct Untrained {
    base: Linear,
    norm: BatchNorm,
    count: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
    head: Linear,
}

impl Untrained {
    /// What differs from the other ranks' is 4 instead of 1.
    fn new(differs: &str, device: &Device) -> Self {
        let value = |name: &str| if name == differs { 4.0 } else { 1.0 };
        let linear = |name: &str| {
            let initializer = Initializer::Constant { value: value(name) };
            LinearConfig::new(4, 4)
                .with_initializer(initializer)
                .init(device)
        };
        let mut norm = BatchNormConfig::new(4).init(device);
        norm.running_var = RunningState::new(Tensor::full([4], value("statistics"), device));
        let count = Tensor::full([1], value("count") as i32, device);
        let mask = Tensor::<1>::ones([4], device).equal_elem(value("mask") as f32);
        Self {
            base: linear("base").no_grad(),
            norm,
            count: Param::initialized(ParamId::new(), count),
            mask: Param::initialized(ParamId::new(), mask),
            head: linear("head"),
        }
    }

    /// The first step after forward passes that make the ranks' running statistics different.
    fn first_step(&self, mut ddp: Ddp, device: &Device) -> Result<(), DdpError> {
        let batch = Tensor::<2>::full([2, 4], ddp.group().rank() as f32, device);
        let output = self.norm.forward(self.base.forward(batch));
        let _ = self.norm.valid();
        let loss = self.head.forward(output).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), self);
        ddp.reduce_gradients(gradients, self).map(drop)
    }
}

#[test]
fn what_is_not_trained_must_begin_alike_too() {
    let device = Device::flex().autodiff();
    let named = [
        ("base", "`base.weight` begins with other numbers"),
        ("statistics", "`norm.running_var` begins with other numbers"),
        ("count", "`count` begins with other numbers"),
        ("mask", "`mask` begins with other numbers"),
        ("head", "`head.weight` begins with other numbers"),
    ];
    for (differs, named) in named {
        let body = |group: ProcessGroup, received: bool| {
            let differs = if group.rank() == 1 { differs } else { "" };
            let model = Untrained::new(differs, &device);
            let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
            let model = match received {
                true => ddp.broadcast_parameters(model).unwrap(),
                false => model,
            };
            model.first_step(ddp, &device)
        };
        for result in locally(3, |group| body(group, false)) {
            let Err(DdpError::ModelMismatch { rank: 1, problem }) = result else {
                panic!("{differs}: {result:?}")
            };
            assert!(problem.starts_with(named), "{problem}");
            assert!(problem.contains("Ddp::broadcast_parameters"), "{problem}");
        }
        for result in locally(3, |group| body(group, true)) {
            result.unwrap();
        }
        // Every rank loads the same record, later.
        for result in locally(3, |group| {
            let differs = if group.rank() == 1 { differs } else { "" };
            let model = Untrained::new(differs, &device);
            let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
            Untrained::new("", &device).first_step(ddp, &device)
        }) {
            result.unwrap();
        }
    }
    // Running statistics that begin alike may go apart.
    for result in locally(3, |group| {
        let model = Untrained::new("", &device);
        let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        model.first_step(ddp, &device)
    }) {
        result.unwrap();
    }
}

/// Each rank updates its own running statistics.
#[test]
fn buffers_become_those_of_rank_0_and_trained_parameters_stay() {
    let device = Device::flex().autodiff();
    let ends = locally(3, |group| {
        let differs = if group.rank() == 1 { "head" } else { "" };
        let model = Untrained::new(differs, &device);
        let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let batch = Tensor::<2>::full([2, 4], group.rank() as f32 + 2.0, &device);
        model.norm.forward(batch);
        let model = ddp.broadcast_buffers(model).unwrap();
        assert!(model.head.weight.is_require_grad());
        let floats = |data: TensorData| data.try_to_vec::<f32>().unwrap();
        let mean = floats(model.norm.running_mean.value_sync().into_data());
        (mean, floats(model.head.weight.val().into_data()))
    });
    for (rank, (mean, head)) in ends.iter().enumerate() {
        // Of rank 0's batch, with momentum 0.1, after zeros.
        assert!(mean.iter().all(|it| (it - 0.2).abs() < 1e-6), "{mean:?}");
        assert_eq!(*head, [if rank == 1 { 4.0 } else { 1.0 }; 16]);
    }
}

#[test]
fn replicas_that_have_gone_apart_are_named() {
    let device = Device::flex().autodiff();
    let errors = locally(3, |group| {
        let mut model = Untrained::new("", &device);
        let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        // Running statistics may differ.
        let batch = Tensor::<2>::full([2, 4], group.rank() as f32, &device);
        model.norm.forward(batch);
        ddp.check_replicas(&model).unwrap();
        ddp.check_replicas(&model.valid()).unwrap();
        if group.rank() == 2 {
            let weight = |it: Tensor<2>| (it + 0.5).detach().require_grad();
            model.head.weight = model.head.weight.map(weight);
        }
        let error = ddp.check_replicas(&model).unwrap_err();
        // A model for evaluation, in which nothing is trained.
        let same = ddp.check_replicas(&model.valid()).unwrap_err();
        assert_eq!(same.to_string(), error.to_string());
        let model = ddp.broadcast_parameters(model).unwrap();
        ddp.check_replicas(&model).unwrap();
        error
    });
    for error in errors {
        let DdpError::ModelMismatch { rank: 2, problem } = &error else {
            panic!("{error}")
        };
        let expected = "`head.weight` has other numbers (their sum is 24, expected 16)";
        assert!(problem.starts_with(expected), "{problem}");
    }
    let alone = Untrained::new("", &device);
    let ddp = Ddp::new(&ProcessGroup::single(), DdpConfig::new(), &alone).unwrap();
    ddp.check_replicas(&alone).unwrap();
}

/// Rank 1 has another frozen layer.
pub(crate) fn untrained_when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, DdpConfig::new())?;
    let differs = if group.rank() == 1 { "base" } else { "" };
    let model = Untrained::new(differs, &device);
    let ddp = Ddp::overlapped(group, overlap, &model)?;
    let error = model.first_step(ddp, &device).unwrap_err();
    assert!(
        error.to_string().contains("`base.weight` begins"),
        "{error}"
    );
    Ok(())
}

#[test]
fn what_is_not_trained_is_compared_on_layered_devices_too() {
    all_succeed("overlapped untrained", 2);
}
