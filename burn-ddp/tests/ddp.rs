//! The tests of burn-ddp. One binary, since each links a compiler.

#[path = "suite/accumulation.rs"]
mod accumulation;
#[path = "suite/buckets.rs"]
mod buckets;
#[path = "suite/checkpoint.rs"]
mod checkpoint;
#[path = "suite/checkpoint_states.rs"]
mod checkpoint_states;
#[path = "suite/collectives.rs"]
mod collectives;
#[path = "suite/convert.rs"]
mod convert;
#[path = "suite/ddp.rs"]
mod ddp;
#[path = "suite/devices.rs"]
mod devices;
#[path = "suite/diverged.rs"]
mod diverged;
#[path = "suite/early.rs"]
mod early;
#[path = "suite/equal.rs"]
mod equal;
#[path = "suite/faults.rs"]
mod faults;
#[path = "suite/first_failure.rs"]
mod first_failure;
#[path = "suite/fp8.rs"]
mod fp8;
#[path = "suite/fp8_training.rs"]
mod fp8_training;
#[path = "suite/handles.rs"]
mod handles;
#[path = "suite/hook.rs"]
mod hook;
#[path = "suite/join.rs"]
mod join;
#[path = "suite/large.rs"]
mod large;
#[path = "suite/launch.rs"]
mod launch;
#[path = "suite/launchers.rs"]
mod launchers;
#[path = "suite/learner/mod.rs"]
mod learner;
#[path = "suite/loader.rs"]
mod loader;
#[path = "suite/messages.rs"]
mod messages;
#[path = "suite/mistakes.rs"]
mod mistakes;
#[path = "suite/model/mod.rs"]
mod model;
#[path = "suite/nan.rs"]
mod nan;
#[path = "suite/nccl.rs"]
mod nccl;
#[path = "suite/net.rs"]
mod net;
#[path = "suite/network.rs"]
mod network;
#[path = "suite/overflow.rs"]
mod overflow;
#[path = "suite/overlapped.rs"]
mod overlapped;
#[path = "suite/partly.rs"]
mod partly;
#[path = "suite/quantized.rs"]
mod quantized;
#[path = "suite/ranks.rs"]
mod ranks;
#[path = "suite/sampler.rs"]
mod sampler;
#[path = "suite/signals.rs"]
mod signals;
#[path = "suite/simulate.rs"]
mod simulate;
#[path = "suite/static_graph.rs"]
mod static_graph;
#[path = "suite/stopped.rs"]
mod stopped;
#[path = "suite/subgroup.rs"]
mod subgroup;
#[path = "suite/sync_batch_norm.rs"]
mod sync_batch_norm;
#[path = "suite/sync_batch_norm_16_bit.rs"]
mod sync_batch_norm_16_bit;
#[path = "suite/tensors.rs"]
mod tensors;
#[path = "suite/terminal.rs"]
mod terminal;
#[path = "suite/tied.rs"]
mod tied;
#[path = "suite/training.rs"]
mod training;
#[path = "suite/turns.rs"]
mod turns;
#[path = "suite/whole_run.rs"]
mod whole_run;
