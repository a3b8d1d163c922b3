//! Gradients averaged while backward still runs. Each rank is a process.

mod beside;
mod differing;
mod ends;
mod streams;
mod types;

use burn::{
    nn::LinearConfig,
    optim::{GradientsAccumulator, GradientsParams},
    tensor::{Device, Tensor},
};
use burn_ddp::{Ddp, DdpConfig, DdpError, Overlap, ProcessGroup};
use burn_layer::Layers;
use nix::sys::signal::Signal;

use self::{
    beside::{beside_another_model, one_after_the_other},
    differing::{other_order_when_overlapped, unused_when_overlapped},
    ends::{leave_after_a_reduce, signalled_in_backward},
    streams::averaged_on_the_trainers_stream,
    types::types_when_overlapped,
};
use crate::suite::{
    accumulation::{WAYS, sums_when_overlapped},
    net::{Run, train},
    ranks::{all_succeed, result},
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
