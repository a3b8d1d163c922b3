//! What can go wrong in a process group, and which rank caused it.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{Call, NcclError};

/// An error of a process group, or of something built on one.
///
/// Errors that concern the whole job ([`is_fault`](Self::is_fault)) reach every rank: the first one
/// ends the group, and each later call returns it again.
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DdpError {
    /// An environment variable is missing or has no usable value.
    #[error("environment variable {variable}: {problem}")]
    Environment {
        /// The variable.
        variable: String,
        /// What is wrong with it, and what was expected.
        problem: String,
    },
    /// A rendezvous address could not be understood.
    #[error("rendezvous `{url}`: {problem}; expected tcp://HOST:PORT, file:///PATH or env://")]
    Url {
        /// The address as given.
        url: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The port that rank 0 has to listen on is taken by another program.
    #[error(
        "address {address} is already in use; choose another MASTER_PORT or stop the program that holds it"
    )]
    PortInUse {
        /// The address.
        address: SocketAddr,
    },
    /// A connection to the master (rank 0), or to another rank that had met it, could not be made in time.
    #[error("no connection to {} at {address} within {after:?}: {problem}", whom(*rank))]
    Connect {
        /// The rank that was called.
        rank: usize,
        /// Its address, or the place where it was looked for.
        address: String,
        /// How long it was attempted.
        after: Duration,
        /// The last failure.
        problem: String,
    },
    /// Some ranks did not appear at the rendezvous in time.
    #[error(
        "ranks {missing:?} of {world_size} did not appear within {after:?}; were they started, with the same master and world size?"
    )]
    MissingRanks {
        /// The ranks that are missing.
        missing: Vec<usize>,
        /// The number of ranks expected.
        world_size: usize,
        /// How long they were waited for.
        after: Duration,
    },
    /// The other side refused the handshake.
    #[error("rank {rank} was refused at the rendezvous: {reason}")]
    Refused {
        /// The rank that asked to join.
        rank: usize,
        /// Why it was refused.
        reason: String,
    },
    /// A rank's process ended, or its connection broke.
    #[error(
        "rank {rank} died: its connections closed without a goodbye (killed, crashed, or ended before its last handle was \
         dropped: `process::exit`, or a handle in a `static`)"
    )]
    RankDied {
        /// The rank that died.
        rank: usize,
    },
    /// A rank left a communicator properly (its last handle was dropped) while others still needed it there.
    #[error(
        "rank {rank} left the group after {calls} calls, but {call} still needs it; all ranks must make the same calls (if it had \
         fewer batches, see Ddp::join)"
    )]
    RankLeft {
        /// The rank that left.
        rank: usize,
        /// The calls that it made, not counting messages between two ranks.
        calls: u64,
        /// The call that needs it.
        call: Call,
    },
    /// A call did not finish in time.
    #[error("{call} did not finish within {after:?}, waiting for ranks {ranks:?}: {why}")]
    Timeout {
        /// The ranks that held it up.
        ranks: Vec<usize>,
        /// The call.
        call: Call,
        /// The time limit.
        after: Duration,
        /// What is known of those ranks.
        why: String,
    },
    /// Two ranks made different calls, or the same call with another shape.
    #[error(
        "ranks diverged: rank {rank} called {call}{}, but rank {other} called {other_call}{}",
        over(shapes, 0),
        over(shapes, 1)
    )]
    Diverged {
        /// The rank that noticed.
        rank: usize,
        /// Its call.
        call: Call,
        /// The rank that disagrees.
        other: usize,
        /// That rank's call.
        other_call: Call,
        /// The shapes of the tensors of `rank` and of `other`, if the calls differ in nothing else. `_` stands
        /// for a dimension that may differ.
        shapes: Option<Box<[String; 2]>>,
    },
    /// A rank sent something that is not a message of this protocol.
    #[error("rank {rank} sent what is no message of this protocol: {problem}")]
    Protocol {
        /// The rank that sent it.
        rank: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A rank aborted the job.
    #[error("rank {rank} aborted: {reason}")]
    Aborted {
        /// The rank that aborted.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// The models of two ranks differ.
    #[error("rank {rank} has another model than the first rank: {problem}")]
    ModelMismatch {
        /// The rank that differs.
        rank: usize,
        /// The first parameter that differs, and how.
        problem: String,
    },
    /// A call was made with arguments that cannot work.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// A tensor could not be read from its device.
    #[error("reading a tensor: {0}")]
    Device(String),
    /// The machine has no device of the kind that a rank is to use.
    #[error(
        "no device of the kind {kind}: is its driver installed? (for NVIDIA's GPUs, also check CUDA_VISIBLE_DEVICES)"
    )]
    NoDevice {
        /// The kind, as Burn's `DeviceType` names it.
        kind: String,
    },
    /// NCCL was requested, but a rank cannot use it.
    #[error(
        "rank {rank} cannot use NCCL: {reason} (or ask for the backend `host`, which stages tensors \
         through the host)"
    )]
    Nccl {
        /// The rank.
        rank: usize,
        /// Why it cannot.
        reason: NcclError,
    },
    /// NCCL failed during a call.
    #[error("NCCL failed on rank {rank} in {call}: {problem}")]
    NcclFailed {
        /// The rank.
        rank: usize,
        /// The call.
        call: Call,
        /// NCCL's error message. With NCCL_DEBUG=WARN, NCCL says more.
        problem: String,
    },
    /// A checkpoint could not be written or read.
    #[error("checkpoint {path}: {problem}")]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// What went wrong.
        problem: String,
    },
    /// A rank's process failed, as its launcher reports.
    #[error("rank {rank} failed: {status}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its exit status or signal, in words, and why there was no restart if one was left.
        status: String,
        /// Its exit code, unless a signal killed it.
        code: Option<i32>,
    },
    /// The operating system refused something.
    #[error("{context}: {source}")]
    #[serde(skip)]
    Io {
        /// What was being done.
        context: String,
        /// The system's error.
        #[source]
        source: Arc<io::Error>,
    },
}

impl DdpError {
    /// Whether the job could not be set up (environment, address, port, device, NCCL), rather than failed later.
    /// Programs usually exit with code 2 in this case.
    pub fn is_setup(&self) -> bool {
        matches!(
            self,
            Self::Environment { .. }
                | Self::Url { .. }
                | Self::PortInUse { .. }
                | Self::Connect { .. }
                | Self::MissingRanks { .. }
                | Self::Refused { .. }
                | Self::NoDevice { .. }
                | Self::Nccl { .. }
        )
    }

    /// Whether the error ends the job on every rank: a rank that died, left, diverged, aborted,
    /// failed or did not come in time.
    pub fn is_fault(&self) -> bool {
        matches!(
            self,
            Self::RankDied { .. }
                | Self::RankLeft { .. }
                | Self::Timeout { .. }
                | Self::Diverged { .. }
                | Self::Protocol { .. }
                | Self::Aborted { .. }
                | Self::NcclFailed { .. }
        )
    }

    pub(crate) fn io(context: impl Into<String>, source: io::Error) -> Self {
        Self::Io {
            context: context.into(),
            source: Arc::new(source),
        }
    }
}

/// The rank that was called, for the text of an error.
fn whom(rank: usize) -> String {
    match rank {
        0 => "the master".into(),
        rank => format!("rank {rank}"),
    }
}

/// The shapes of one of the two calls, for the text of an error.
fn over(shapes: &Option<Box<[String; 2]>>, which: usize) -> String {
    let shapes = shapes.as_ref().map(|both| format!(" over {}", both[which]));
    shapes.unwrap_or_default()
}

impl From<burn_std::ExecutionError> for DdpError {
    fn from(error: burn_std::ExecutionError) -> Self {
        Self::Device(error.to_string())
    }
}

/// CubeCL's devices read data when they are first used, and may fail only then.
impl From<burn_std::DataError> for DdpError {
    fn from(error: burn_std::DataError) -> Self {
        Self::Device(error.to_string())
    }
}

/// The same for their bytes.
impl From<burn_std::AccessError> for DdpError {
    fn from(error: burn_std::AccessError) -> Self {
        Self::Device(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CallKind, ElementType, ReduceOp};

    /// As the README's table of what goes wrong has them.
    #[test]
    fn what_ends_the_job_and_what_comes_before_it() {
        let call = Call {
            sequence: 0,
            kind: CallKind::AllReduce,
            dtype: ElementType::F32,
            op: ReduceOp::Sum,
            len: 1,
            root: 0,
            by_nccl: false,
            flaw: None,
        };
        let (text, rank) = (String::new, 1);
        let (problem, reason, after) = (text(), text(), Duration::from_secs(1));
        let address = ([127, 0, 0, 1], 1).into();
        let faults = [
            DdpError::RankDied { rank },
            DdpError::RankLeft {
                rank,
                calls: 2,
                call,
            },
            DdpError::Timeout {
                ranks: vec![rank],
                call,
                after,
                why: text(),
            },
            DdpError::Diverged {
                rank,
                call,
                other: 0,
                other_call: call,
                shapes: None,
            },
            DdpError::Protocol {
                rank,
                problem: text(),
            },
            DdpError::Aborted {
                rank,
                reason: reason.clone(),
            },
            DdpError::NcclFailed {
                rank,
                call,
                problem: text(),
            },
        ];
        let setup = [
            DdpError::Environment {
                variable: text(),
                problem: text(),
            },
            DdpError::Url {
                url: text(),
                problem: text(),
            },
            DdpError::PortInUse { address },
            DdpError::Connect {
                rank,
                address: text(),
                after,
                problem: text(),
            },
            DdpError::MissingRanks {
                missing: vec![rank],
                world_size: 2,
                after,
            },
            DdpError::Refused { rank, reason },
            DdpError::NoDevice { kind: text() },
            DdpError::Nccl {
                rank,
                reason: NcclError::NotAsked,
            },
        ];
        let others = [
            DdpError::ModelMismatch { rank, problem },
            DdpError::InvalidArgument(text()),
            DdpError::Device(text()),
            DdpError::Checkpoint {
                path: PathBuf::new(),
                problem: text(),
            },
            DdpError::RankFailed {
                rank,
                status: text(),
                code: None,
            },
            DdpError::io("writing", io::Error::other("a disk")),
        ];
        let expected = [
            (faults.to_vec(), [true, false]),
            (setup.to_vec(), [false, true]),
            (others.to_vec(), [false; 2]),
        ];
        for (errors, [fault, setup]) in expected {
            for error in errors {
                assert_eq!(
                    [error.is_fault(), error.is_setup()],
                    [fault, setup],
                    "{error}"
                );
            }
        }
    }
}
