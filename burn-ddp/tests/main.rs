//! The tests of burn-ddp. One binary, since each links a compiler.

#[path = "suite/collectives.rs"]
mod collectives;
#[path = "suite/faults.rs"]
mod faults;
#[path = "suite/ranks.rs"]
mod ranks;
#[path = "suite/sampler.rs"]
mod sampler;
