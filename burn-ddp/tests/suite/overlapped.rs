//! Gradients averaged while backward still runs. Each rank is a process.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use burn::{
    module::{Module, Param},
    nn::LinearConfig,
    optim::{GradientsAccumulator, GradientsParams, SgdConfig},
    tensor::{Device, Distribution, FloatDType, Tensor},
};
use burn_backend::{DeviceId, distributed::ReduceOperation};
use burn_ddp::{
    CommHook, Ddp, DdpConfig, DdpError, GradientBucket, Overlap, ProcessGroup, ReduceOp, Values,
    with_custom_ops,
};
use burn_layer::{FloatView, Layer, Layers, Reduced};
use burn_std::id::StreamId;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::suite::{
    accumulation::{Sum, WAYS, sums_when_overlapped},
    ddp::Branches,
    net::{Net, Run, contents, train, train_overlapped},
    ranks::{all_fail, all_succeed, locally, result, results},
};

type Scenario = fn(&ProcessGroup) -> Result<(), DdpError>;

/// What a rank does that averages during backward, in a process of its own.
pub(crate) fn scenario_named(name: &str) -> Option<Scenario> {
    let body: Scenario = match name {
        "overlapped unused" => |group| unused_when_overlapped(group, DdpConfig::new(), false),
        "overlapped unused at the end" => |group| {
            let config = DdpConfig::new().bucket_bytes(12).first_bucket_bytes(12);
            unused_when_overlapped(group, config, false)
        },
        "overlapped other order" => |group| other_order_when_overlapped(group, 1, false),
        "overlapped other order, static" => |group| other_order_when_overlapped(group, 0, true),
        "overlapped new order, static" => |group| other_order_when_overlapped(group, 1, true),
        "overlapped unused elsewhere" => {
            |group| unused_when_overlapped(group, DdpConfig::new(), true)
        }
        "overlapped accumulation" => |group| accumulate_when_overlapped(group, Device::flex()),
        "overlapped reduce" => leave_after_a_reduce,
        "overlapped types" => types_when_overlapped,
        "overlapped stream" => averaged_on_the_trainers_stream,
        "overlapped twice" => one_after_the_other,
        "overlapped killed" => |group| signalled_in_backward(group, Signal::SIGKILL),
        "overlapped stopped" => |group| signalled_in_backward(group, Signal::SIGSTOP),
        "overlapped static graph" => crate::suite::static_graph::when_overlapped,
        "overlapped sums" => |group| sums_when_overlapped(group, WAYS[2]),
        "overlapped sums, none inside" => |group| sums_when_overlapped(group, WAYS[3]),
        "overlapped alone again" => crate::suite::static_graph::alone_again_when_overlapped,
        "overlapped untrained" => crate::suite::equal::untrained_when_overlapped,
        "overlapped earlier pass" => crate::suite::earlier_pass::when_overlapped,
        "overlapped hook" => crate::suite::hook::alone_when_overlapped,
        "overlapped early" => crate::suite::early::when_overlapped,
        "overlapped beside" => beside_another_model,
        "overlapped at random" => crate::suite::model::gradients::when_overlapped,
        "overlapped unmarked" => crate::suite::accumulation::unmarked_when_overlapped,
        _ => return None,
    };
    Some(body)
}

#[test]
fn overlapped_ranks_train_as_one_process_does() {
    let (_, whole) = train(&ProcessGroup::single(), DdpConfig::new(), 12);
    for world_size in [2, 3, 4] {
        for output in all_succeed("overlapped", world_size) {
            let (run, hidden): (Run, f64) = serde_json::from_str(result(&output)).unwrap();
            run.is_near(&whole, 1e-5);
            assert!((0.0..=1.0).contains(&hidden));
        }
    }
}

#[test]
fn overlapped_ranks_must_use_the_same_parameters() {
    // The buckets of the ranks differ: if that ends the job first, the log says what is missing where.
    let lacking = [r#"["never", "sometimes"]"#, r#"["never"]"#];
    for ((success, output), lacking) in results("overlapped unused", 2).iter().zip(lacking) {
        assert!(!success);
        let lacking = format!("this rank has no gradients of {lacking}");
        let diverged = output.contains("RESULT error ranks diverged") && output.contains(&lacking);
        let named = output.contains("rank 1 has a gradient of `sometimes` and rank 0 has none");
        assert!(diverged || named, "{output}");
    }
    // One rank has a bucket more, and the others none that differs from it.
    for output in all_fail("overlapped unused at the end", 2) {
        let named = "rank 1 has a gradient of `sometimes` and rank 0 has none";
        assert!(output.contains(named), "{output}");
    }
    // They are alike, and the ranks can tell each other.
    for output in all_fail("overlapped unused elsewhere", 2) {
        assert!(output.contains("a gradient of `never`"), "{output}");
    }
}

#[test]
fn overlapped_ranks_must_come_to_their_gradients_in_the_same_order() {
    for scenario in ["overlapped other order", "overlapped other order, static"] {
        for output in all_fail(scenario, 2) {
            let place = "`1.weight` is gradient 1 of backward on rank 0 and 2 on rank 1";
            assert!(output.contains(place), "{output}");
        }
    }
    for output in all_fail("overlapped new order, static", 2) {
        assert!(output.contains("a static graph was promised"), "{output}");
    }
}

#[test]
fn overlapped_accumulation_averages_once() {
    all_succeed("overlapped accumulation", 2);
}

/// A layered device of this process.
pub(crate) fn layered(
    group: &ProcessGroup,
    config: DdpConfig,
) -> Result<(Device, Overlap), DdpError> {
    layered_over(Device::flex(), group, config)
}

fn layered_over(
    device: Device,
    group: &ProcessGroup,
    config: DdpConfig,
) -> Result<(Device, Overlap), DdpError> {
    let overlap = Overlap::new(group, config)?;
    let layers = Layers::on(device).layer(overlap.layer());
    Ok((layers.serve().unwrap().autodiff(), overlap))
}

/// Rank 1 uses a parameter that rank 0 does not, which may use another instead.
fn unused_when_overlapped(
    group: &ProcessGroup,
    config: DdpConfig,
    elsewhere: bool,
) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, config)?;
    let param = || Param::from_tensor(Tensor::<1>::ones([3], &device));
    let model = Branches {
        used: param(),
        sometimes: param(),
        never: param(),
    };
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    let mut loss = model.used.val().sum();
    match group.rank() {
        1 => loss = loss + model.sometimes.val().sum(),
        _ if elsewhere => loss = loss + model.never.val().sum(),
        _ => {}
    }
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    ddp.reduce_gradients(gradients, &model).map(drop)
}

/// Rank 1 applies two layers of the same shape in the other order, from some step on.
fn other_order_when_overlapped(
    group: &ProcessGroup,
    from: usize,
    promised: bool,
) -> Result<(), DdpError> {
    let config = DdpConfig::new().static_graph(promised);
    let (device, overlap) = layered(group, config)?;
    let linear = || LinearConfig::new(4, 4).with_bias(false).init(&device);
    let model = [linear(), linear()];
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let mut model = ddp.broadcast_parameters(model)?;
    let mut optimizer = SgdConfig::new().init();
    for step in 0..2 {
        let [first, second] = &model;
        let input = Tensor::<2>::ones([2, 4], &device);
        let output = match group.rank() == 1 && step >= from {
            true => first.forward(second.forward(input)),
            false => second.forward(first.forward(input)),
        };
        let gradients = GradientsParams::from_grads(output.sum().backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model)?;
        model = optimizer.step(0.1, model, gradients);
    }
    group.barrier()
}

pub(crate) fn accumulate_when_overlapped(
    group: &ProcessGroup,
    device: Device,
) -> Result<(), DdpError> {
    // The weight and the bias have a bucket each.
    let config = DdpConfig::new().bucket_bytes(4).first_bucket_bytes(4);
    let (device, overlap) = layered_over(device, group, config)?;
    let model = LinearConfig::new(2, 1).init(&device);
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    let rank = group.rank() as f32;
    let gradients = || {
        let input = Tensor::<2>::full([1, 2], rank, &device);
        GradientsParams::from_grads(model.forward(input).sum().backward(), &model)
    };
    let weight = |gradients: &GradientsParams| {
        let weight = gradients.get::<2>(model.weight.id).unwrap();
        weight.into_data().try_to_vec::<f32>().unwrap()
    };
    // Two micro-steps without averaging, then their sum's average, twice.
    for round in 1..=2 {
        let mut accumulator = GradientsAccumulator::new();
        for _ in 0..2 {
            let local = ddp.no_sync(|ddp| ddp.reduce_gradients(gradients(), &model))?;
            assert_eq!(weight(&local), [rank; 2]);
            accumulator.accumulate(&model, local);
        }
        let averaged = ddp.reduce_gradients(accumulator.grads(), &model)?;
        assert_eq!(weight(&averaged), [1.0; 2]);
        // By the layer, which averages buckets of its own.
        let stats = ddp.stats();
        assert_eq!((stats.steps, stats.buckets), (round, 2));
    }
    Ok(())
}

#[test]
fn threads_of_one_process_are_refused_and_go_on() {
    locally(2, |group| {
        for _ in 0..2 {
            let (device, overlap) = layered(&group, DdpConfig::new()).unwrap();
            let model = LinearConfig::new(2, 1).init(&device);
            let error = Ddp::overlapped(&group, overlap, &model).unwrap_err();
            assert!(matches!(error, DdpError::InvalidArgument(_)), "{error}");
            assert!(error.to_string().contains("one overlapped Ddp"), "{error}");
            // What the error says to do.
            let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
            let model = ddp.broadcast_parameters(model).unwrap();
            let input = Tensor::<2>::full([1, 2], group.rank() as f32, &device);
            let loss = model.forward(input).sum();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            let gradients = ddp.reduce_gradients(gradients, &model).unwrap();
            let weight = gradients.get::<2>(model.weight.id).unwrap();
            assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [0.5; 2]);
        }
    });
}

/// A second one at the same time is refused on all ranks, and may come when the first has gone.
fn one_after_the_other(group: &ProcessGroup) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, DdpConfig::new())?;
    let model = LinearConfig::new(2, 1).init(&device);
    let first = Ddp::overlapped(group, overlap.clone(), &model)?;
    assert!(Ddp::overlapped(group, overlap.clone(), &model).is_err());
    drop(first);
    Ddp::overlapped(group, overlap, &model).map(drop)
}

/// Notes the stream on which buckets are averaged.
#[derive(Debug, Default)]
struct Streams(Arc<Mutex<Vec<StreamId>>>);

impl CommHook for Streams {
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
        self.0.lock().unwrap().push(StreamId::current());
        let mut values = bucket.values;
        values.all_reduce(group, ReduceOp::Mean)?;
        Ok(values)
    }
}

fn averaged_on_the_trainers_stream(group: &ProcessGroup) -> Result<(), DdpError> {
    let hook = Streams::default();
    let streams = hook.0.clone();
    let config = DdpConfig::new()
        .bucket_bytes(100)
        .first_bucket_bytes(100)
        .hook(hook);
    train_overlapped(group, config, 12, Device::flex())?;
    let streams = streams.lock().unwrap();
    assert!(streams.len() > 40, "{}", streams.len());
    let own = StreamId::current();
    assert!(streams.iter().all(|stream| *stream == own), "{streams:?}");
    Ok(())
}

/// Another thread submits gradients during backward; CubeCL's tensors are of the stream that makes them.
#[test]
fn averages_are_made_on_the_stream_of_the_thread_that_trains() {
    all_succeed("overlapped stream", 2);
}

#[test]
fn one_overlaps_at_a_time() {
    all_succeed("overlapped twice", 2);
}

/// Rank 1 has ended before rank 0 takes what it has sent last.
fn leave_after_a_reduce(group: &ProcessGroup) -> Result<(), DdpError> {
    let pids = group.all_gather(&[std::process::id()])?;
    accumulate_when_overlapped(group, Device::flex())?;
    if group.is_main() {
        let path = format!("/proc/{}/stat", pids[1]);
        // A zombie, until this test's process asks for its end.
        let has_ended = |stat: String| stat.contains(") Z ");
        while !std::fs::read_to_string(&path).map_or(true, has_ended) {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        // What its end told has arrived.
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
    let mut last = [group.rank() as f32 + 1.0];
    group.reduce(&mut last, ReduceOp::Sum, 0)?;
    assert!(!group.is_main() || last == [3.0]);
    Ok(())
}

#[test]
fn an_overlapped_rank_says_goodbye() {
    all_succeed("overlapped reduce", 2);
}

#[derive(Module, Debug)]
struct Many {
    parameters: Vec<Param<Tensor<1>>>,
}

/// Parameters of two types in turn.
fn types_when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, DdpConfig::new())?;
    let parameter = |index: usize| {
        let dtype = [FloatDType::F32, FloatDType::BF16][index % 2];
        Param::from_tensor(Tensor::<1>::ones([3], &device).cast(dtype))
    };
    let model = Many {
        parameters: (0..10).map(parameter).collect(),
    };
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    for step in 0..2 {
        let terms = model.parameters.iter().enumerate().map(|(index, it)| {
            let factor = (index + step + 2 * group.rank()) as f32;
            it.val().mul_scalar(factor).cast(FloatDType::F32).sum()
        });
        let loss = terms.reduce(|a, b| a + b).unwrap();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model)?;
        for (index, it) in model.parameters.iter().enumerate() {
            let gradient = gradients.get::<1>(it.id).unwrap();
            assert_eq!(gradient.dtype(), it.val().dtype());
            let values: Vec<f32> = gradient.into_data().iter::<f32>().collect();
            assert_eq!(values, [(index + step + 1) as f32; 3]);
        }
        // 5 gradients of 12 bytes and 5 of 6.
        let timeline = ddp.timeline().unwrap();
        let mut bytes: Vec<usize> = timeline.buckets.iter().map(|it| it.bytes).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, [30, 60]);
    }
    Ok(())
}

#[test]
fn overlapped_types_have_a_bucket_each() {
    all_succeed("overlapped types", 2);
}

/// Sends its process a signal when backward hands over the second gradient of the third step: the norm's backward
/// has not run, and the others wait in it.
#[derive(Debug)]
struct Deadly(Signal, AtomicUsize);

/// Parameters of the network.
const PARAMETERS: usize = 6;

impl Layer for Deadly {
    fn all_reduce(
        &self,
        _tensor: FloatView<'_>,
        _op: ReduceOperation,
        _devices: &[DeviceId],
    ) -> Option<Reduced> {
        if self.1.fetch_add(1, Ordering::SeqCst) == 2 * PARAMETERS + 1 {
            kill(Pid::this(), self.0).unwrap();
        }
        None
    }
}

/// Rank 1 gets a signal in the middle of backward.
fn signalled_in_backward(group: &ProcessGroup, signal: Signal) -> Result<(), DdpError> {
    let norms = group.duplicate()?;
    let overlap = Overlap::new(group, DdpConfig::new().first_bucket_bytes(100))?;
    let mut layers = Layers::on(Device::flex()).layer(overlap.layer());
    if group.rank() == 1 {
        layers = layers.layer(Deadly(signal, AtomicUsize::new(0)));
    }
    let device = with_custom_ops(layers).serve().unwrap().autodiff();
    let model = Net::new(&norms, &device);
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let mut model = ddp.broadcast_parameters(model)?;
    let mut optimizer = SgdConfig::new().init();
    for step in 1..10 {
        let images = Tensor::random([2, 3, 8, 8], Distribution::Default, &device);
        let loss = model.forward(images).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model)?;
        model = optimizer.step(0.01, model, gradients);
        println!("STEP {step}");
    }
    Ok(())
}

#[test]
fn a_kill_in_the_middle_of_backward_is_named() {
    for (rank, (success, output)) in results("overlapped killed", 3).into_iter().enumerate() {
        assert!(!success, "{output}");
        assert!(
            output.contains("STEP 2") && !output.contains("STEP 3"),
            "{output}"
        );
        if rank != 1 {
            assert!(output.contains("RESULT error rank 1 died"), "{output}");
        }
    }
}

/// In each step, a critic runs backward before the generator does: on the same device, in whose layer only the generator's
/// gradients are averaged.
fn beside_another_model(group: &ProcessGroup) -> Result<(), DdpError> {
    let run = |config: DdpConfig, critics_turns: usize| -> Result<_, DdpError> {
        let (device, overlap) = layered(group, config)?;
        let generator = LinearConfig::new(4, 4).init(&device);
        let critic = LinearConfig::new(4, 1).init(&device);
        let mut ddp = Ddp::overlapped(group, overlap, &generator)?;
        let mut critics = Ddp::new(group, DdpConfig::new(), &critic)?;
        let mut generator = ddp.broadcast_parameters(generator)?;
        let mut critic = critics.broadcast_parameters(critic)?;
        let mut optimizer = SgdConfig::new().init();
        for step in 0..3 {
            let noise = Tensor::<2>::full([2, 4], (1 + step + group.rank()) as f32, &device);
            for _ in 0..critics_turns {
                let fake = generator.forward(noise.clone()).detach();
                let loss = critic.forward(fake).powi_scalar(2).mean();
                let gradients = GradientsParams::from_grads(loss.backward(), &critic);
                let gradients = critics.reduce_gradients(gradients, &critic)?;
                critic = optimizer.step(0.01, critic, gradients);
            }
            let loss = critic.forward(generator.forward(noise)).mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &generator);
            let gradients = ddp.reduce_gradients(gradients, &generator)?;
            generator = optimizer.step(0.01, generator, gradients);
        }
        let parameters = contents(&generator);
        for theirs in group.all_gather(&parameters)?.chunks(parameters.len()) {
            assert_eq!(theirs, parameters);
        }
        Ok(ddp.stats().bytes_reduced)
    };
    let alone = run(DdpConfig::new(), 0)?;
    assert_eq!(run(DdpConfig::new(), 1)?, alone);
    assert_eq!(run(DdpConfig::new(), 2)?, alone);
    // Sums are not to be summed up again, which would be an error.
    assert_eq!(run(DdpConfig::new().hook(Sum), 1)?, alone);
    Ok(())
}

#[test]
fn backward_of_another_model_on_the_device_changes_nothing() {
    all_succeed("overlapped beside", 2);
}
