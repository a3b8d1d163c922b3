//! The tests of burn-ddp. One binary, since each links a compiler.

#[path = "suite/bucketer.rs"]
mod bucketer;
#[path = "suite/checkpoint.rs"]
mod checkpoint;
#[path = "suite/collectives.rs"]
mod collectives;
#[path = "suite/ddp.rs"]
mod ddp;
#[path = "suite/faults.rs"]
mod faults;
#[path = "suite/fp8.rs"]
mod fp8;
#[path = "suite/hook.rs"]
mod hook;
#[path = "suite/join.rs"]
mod join;
#[path = "suite/launch.rs"]
mod launch;
#[path = "suite/loader.rs"]
mod loader;
#[path = "suite/nccl.rs"]
mod nccl;
#[path = "suite/ranks.rs"]
mod ranks;
#[path = "suite/sampler.rs"]
mod sampler;
#[path = "suite/simulate.rs"]
mod simulate;
#[path = "suite/subgroup.rs"]
mod subgroup;
#[path = "suite/sync_batch_norm.rs"]
mod sync_batch_norm;
#[path = "suite/tensors.rs"]
mod tensors;
#[path = "suite/training.rs"]
mod training;
