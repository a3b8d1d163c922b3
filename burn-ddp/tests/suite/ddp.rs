//! Data parallel training against one process with the whole batch, and what can differ over ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::{
    module::{Module, Param},
    nn::LinearConfig,
    optim::GradientsParams,
    tensor::{DType, Device, Distribution, Tensor},
};
use burn_ddp::{Ddp, DdpConfig, DdpError, ProcessGroup, SyncBatchNorm};

use crate::suite::{
    devices::wgpu,
    net::{Net, Run, contents, train, train_at},
    ranks::{all_succeed, locally, over_tcp, result},
};

#[test]
fn ranks_train_as_one_process_does() {
    let (start, whole) = train(&ProcessGroup::single(), DdpConfig::new(), 12);
    assert!(whole.losses[19] < whole.losses[0]);
    // 20 steps of a convolution, a norm and a linear layer.
    assert_eq!(whole.gradients.len(), 20 * (112 + 8 + 144 * 5 + 5));
    for world_size in [2, 3, 4] {
        // Buckets so small that there are several, and gradients that fill one alone.
        let config = DdpConfig::new().bucket_bytes(600).first_bucket_bytes(100);
        let ranks = over_tcp(world_size, 1, |group| train(&group, config.clone(), 12));
        for (same_start, run) in &ranks {
            assert_eq!(*same_start, start);
            run.is_near(&whole, 1e-5);
            let first = &ranks[0].1;
            assert_eq!(run.parameters, first.parameters, "equal to the bit");
            assert_eq!(run.gradients, first.gradients, "equal to the bit");
        }
    }
}

/// As a job has them.
#[test]
fn processes_train_as_one_does() {
    let (_, whole) = train(&ProcessGroup::single(), DdpConfig::new(), 12);
    for world_size in [2, 3, 4] {
        let runs = all_succeed("averaged after backward", world_size).into_iter();
        let runs: Vec<Run> = runs
            .map(|output| serde_json::from_str(result(&output)).unwrap())
            .collect();
        for run in &runs {
            run.is_near(&whole, 1e-5);
            assert_eq!(run.parameters, runs[0].parameters, "equal to the bit");
        }
    }
}

/// Ranks that share a GPU.
#[test]
fn ranks_train_on_wgpu_as_on_flex() {
    let Some(device) = wgpu() else { return };
    let (_, whole) = train(&ProcessGroup::single(), DdpConfig::new(), 12);
    let config = DdpConfig::new().bucket_bytes(600).first_bucket_bytes(100);
    let ranks = over_tcp(2, 1, |group| {
        train_at(&group, config.clone(), 12, device.clone()).1
    });
    for run in &ranks {
        run.is_near(&whole, 1e-4);
        assert_eq!(run.gradients, ranks[0].gradients, "equal to the bit");
    }
}

#[test]
fn parameters_and_running_statistics_come_from_rank_0() {
    let ranks = over_tcp(3, 1, |group| {
        let device = Device::flex().autodiff();
        let model = Net::new(&group, &device);
        // Statistics of its own for each rank.
        let alone = SyncBatchNorm::new(&model.norm.clone().into(), &ProcessGroup::single());
        alone.forward(Tensor::<2>::random([8, 4], Distribution::Default, &device));
        let before = contents(&model);
        let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let model = ddp.broadcast_parameters(model).unwrap();
        assert!(model.conv.weight.is_require_grad());
        assert!(!model.norm.running_mean.value().is_require_grad());
        (before, contents(&model))
    });
    let gap = |a: &[f32], b: &[f32]| a.iter().zip(b).position(|(a, b)| a != b);
    assert!(gap(&ranks[0].0, &ranks[1].0).is_some());
    for (_, after) in &ranks {
        assert_eq!(gap(after, &ranks[0].1), None);
        // The weights are rank 0's; the statistics' last update has come in addition.
        assert_eq!(gap(after, &ranks[0].0), Some(4 * 27 + 4 + 8));
    }
}

#[test]
fn a_different_model_is_named_on_all_ranks() {
    let errors = over_tcp(3, 1, |group| {
        let device = Device::flex().autodiff();
        let inputs = if group.rank() == 2 { 4 } else { 3 };
        let model = LinearConfig::new(inputs, 2).init(&device);
        Ddp::new(&group, DdpConfig::new(), &model).unwrap_err()
    });
    for error in errors {
        let DdpError::ModelMismatch { rank: 2, problem } = &error else {
            panic!("{error}");
        };
        assert!(
            problem.contains("`weight`") && problem.contains('4'),
            "{problem}"
        );
    }
    let errors = locally(2, |group| {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(3, 2)
            .with_bias(group.rank() == 0)
            .init(&device);
        Ddp::new(&group, DdpConfig::new(), &model)
            .unwrap_err()
            .to_string()
    });
    for error in errors {
        assert!(
            error.contains("rank 1") && error.contains("nothing, expected `bias`"),
            "{error}"
        );
    }
}

#[test]
fn another_type_or_name_is_named_on_all_ranks() {
    #[derive(Module, Debug)]
    struct One {
        head: Param<Tensor<1>>,
    }
    #[derive(Module, Debug)]
    struct Other {
        tail: Param<Tensor<1>>,
    }
    let zeros = |dtype: DType| {
        let device = Device::flex().autodiff();
        Param::from_tensor(Tensor::zeros([2], (&device, dtype)))
    };
    let differ = |rank: usize, other_name: bool| {
        let errors = locally(3, |group| {
            let differs = group.rank() == rank;
            let dtype = if differs && !other_name {
                DType::F16
            } else {
                DType::F32
            };
            let result = match differs && other_name {
                true => Ddp::new(&group, DdpConfig::new(), &Other { tail: zeros(dtype) }),
                false => Ddp::new(&group, DdpConfig::new(), &One { head: zeros(dtype) }),
            };
            result.unwrap_err()
        });
        let problem = |error| match error {
            DdpError::ModelMismatch {
                rank: named,
                problem,
            } if named == rank => problem,
            error => panic!("{error}"),
        };
        errors.into_iter().map(problem).collect::<Vec<String>>()
    };
    for rank in [1, 2] {
        for problem in differ(rank, false) {
            assert!(
                problem.contains("`head`") && problem.contains("F16"),
                "{problem}"
            );
        }
        for problem in differ(rank, true) {
            assert!(
                problem.contains("`tail`") && problem.contains("`head`"),
                "{problem}"
            );
        }
    }
}

#[derive(Module, Debug)]
pub(crate) struct Branches {
    pub(crate) used: Param<Tensor<1>>,
    pub(crate) sometimes: Param<Tensor<1>>,
    pub(crate) never: Param<Tensor<1>>,
}

#[test]
fn accumulation_averages_once() {
    locally(2, |group| {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(2, 1).init(&device);
        let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let model = ddp.broadcast_parameters(model).unwrap();
        let gradients = |value: f32| {
            let input = Tensor::<2>::full([1, 2], value, &device);
            GradientsParams::from_grads(model.forward(input).sum().backward(), &model)
        };
        let rank = group.rank() as f32;
        let bytes = group.stats().bytes_reduced;
        let local = ddp
            .no_sync(|ddp| ddp.reduce_gradients(gradients(rank), &model))
            .unwrap();
        let weight = local.get::<2>(model.weight.id).unwrap();
        assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [rank; 2]);
        assert_eq!((ddp.stats().steps, group.stats().bytes_reduced), (0, bytes));
        assert!(ddp.stats().waited.is_zero());

        let averaged = ddp.reduce_gradients(gradients(rank), &model).unwrap();
        let weight = averaged.get::<2>(model.weight.id).unwrap();
        assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [0.5; 2]);
        assert_eq!(ddp.stats().steps, 1);
        assert!(!ddp.stats().waited.is_zero());
        assert!(ddp.all_reduce_any(group.rank() == 1).unwrap());
    });
}

/// As PyTorch's context manager does.
#[test]
fn a_panic_inside_no_sync_turns_averaging_on_again() {
    locally(2, |group| {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(2, 1).init(&device);
        let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let model = ddp.broadcast_parameters(model).unwrap();
        let bad = AssertUnwindSafe(|| ddp.no_sync(|_| panic!("a bad batch, on purpose")));
        assert!(catch_unwind(bad).is_err());
        let input = Tensor::<2>::full([1, 2], group.rank() as f32, &device);
        let gradients = model.forward(input).sum().backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        let averaged = ddp.reduce_gradients(gradients, &model).unwrap();
        let weight = averaged.get::<2>(model.weight.id).unwrap();
        assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [0.5; 2]);
    });
}

#[test]
fn another_model_on_one_rank_ends_the_job_for_all() {
    let ends = locally(2, |group| {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(2, 1).init(&device);
        let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let frozen = match group.rank() {
            1 => model.freeze(),
            _ => model,
        };
        let averages = ddp.reduce_gradients(GradientsParams::new(), &frozen);
        averages.unwrap_err().to_string()
    });
    for end in ends {
        assert!(end.starts_with("rank 1 aborted: ") && end.contains("make a new Ddp"));
    }
}

#[test]
fn another_model_is_not_broadcast() {
    let ends = over_tcp(2, 1, |group| {
        let device = Device::flex().autodiff();
        let linear = |outputs| LinearConfig::new(2, outputs).init(&device);
        let ddp = Ddp::new(&group, DdpConfig::new(), &linear(3)).unwrap();
        let model = linear(if group.rank() == 1 { 2 } else { 3 });
        // Rank 0 may be done before it hears of it.
        let model = ddp.broadcast_parameters(model);
        let end = model.and_then(|_| group.barrier());
        end.unwrap_err().to_string()
    });
    for end in ends {
        assert!(
            end.starts_with("rank 1 aborted: ") && end.contains("`weight`"),
            "{end}"
        );
    }
}
