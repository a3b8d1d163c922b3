//! Predicts the cost of data parallel training on more machines than are at hand, by the alpha-beta model, in which
//! a message of `S` bytes takes `alpha + S / B` seconds.
//!
//! [`Network::fit`] fits alpha and beta to measured messages, and [`calibrate()`] measures them on this machine.
//!
//! The model ignores congestion, stragglers, and fabrics that have less bandwidth in the middle than
//! at the edges: real jobs are slower. `burn-ddp simulate` prints tables of its predictions.
//!
//! ```
//! use burn_ddp::simulate::{AllReduce, Network, Step};
//! use std::time::Duration;
//!
//! let network = Network { latency: 10e-6, bandwidth: 12.5e9 }; // 100 Gbit/s
//! let step = Step::new(Duration::from_millis(250), 100 << 20);
//! for ranks in [8, 64, 512, 4096] {
//!     let efficiency = step.efficiency(|bytes| AllReduce::Ring.seconds(network, ranks, bytes));
//!     println!("{ranks} ranks: {:.1} %", efficiency * 100.0);
//! }
//! ```

mod calibrate;
mod fit;
mod step;

pub use self::{
    calibrate::{Calibration, Case, calibrate},
    step::Step,
};
use crate::collective::Way;

/// A network between ranks, each of which sends and receives at the same time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Alpha: the seconds that even the shortest message takes.
    pub latency: f64,
    /// The bytes that a rank sends in a second: the inverse of beta.
    pub bandwidth: f64,
}

impl Network {
    /// The seconds that one message takes.
    pub fn message(self, bytes: f64) -> f64 {
        self.latency + bytes / self.bandwidth
    }
}

/// The algorithm of an all-reduce of `S` bytes over `N` ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AllReduce {
    /// Every rank sends everything to all others: `alpha + (N - 1) S / B`. For the smallest messages of few ranks.
    Direct,
    /// Around a ring, a share at a time: `2 (N - 1) alpha + 2 (N - 1) / N S / B` (Patarasuk and Yuan
    /// 2009). Has the least traffic, but its latency grows with the number of ranks.
    Ring,
    /// Up a binomial tree and down again: `2 ceil(log2 N) (alpha + S / B)`. For small messages.
    Tree,
    /// A reduce-scatter within each machine, then one ring over the machines for each share, then an all-gather
    /// within each machine. The network between machines is that of a whole machine, which its ranks share.
    Hierarchical {
        /// The number of ranks on a machine.
        per_machine: usize,
        /// The network within a machine.
        inside: Network,
    },
}

impl AllReduce {
    /// The algorithm that [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce) uses for `bytes` bytes of `f32`.
    ///
    /// # Panics
    ///
    /// Panics if there are no ranks.
    pub fn chosen(ranks: usize, bytes: u64) -> Self {
        assert!(ranks > 0, "at least one rank");
        match Way::of(ranks, bytes as usize) {
            Way::Direct => Self::Direct,
            Way::Tree => Self::Tree,
            Way::Ring => Self::Ring,
        }
    }

    /// The seconds of an all-reduce of `bytes` bytes over `ranks` ranks.
    ///
    /// # Panics
    ///
    /// Panics if there are no ranks, or if `ranks` is no multiple of a hierarchy's `per_machine`.
    pub fn seconds(self, network: Network, ranks: usize, bytes: u64) -> f64 {
        assert!(ranks > 0, "at least one rank");
        let bytes = bytes as f64;
        match self {
            Self::Direct if ranks == 1 => 0.0,
            Self::Direct => network.message((ranks - 1) as f64 * bytes),
            Self::Ring => 2.0 * half_ring(network, ranks, bytes),
            Self::Tree => {
                let depth = ranks.next_power_of_two().trailing_zeros();
                2.0 * f64::from(depth) * network.message(bytes)
            }
            Self::Hierarchical {
                per_machine,
                inside,
            } => {
                assert!(
                    per_machine > 0 && ranks.is_multiple_of(per_machine),
                    "{ranks} ranks are no multiple of {per_machine} a machine"
                );
                let machines = ranks / per_machine;
                // The ranks of a machine send their shares at the same time. Together, these are the whole.
                2.0 * half_ring(inside, per_machine, bytes)
                    + 2.0 * half_ring(network, machines, bytes)
            }
        }
    }
}

/// The seconds of a reduce-scatter or an all-gather around a ring.
fn half_ring(network: Network, ranks: usize, bytes: f64) -> f64 {
    (ranks - 1) as f64 * network.message(bytes / ranks as f64)
}
