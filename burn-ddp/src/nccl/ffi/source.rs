//! Tensors on their way through NCCL.
//!
//! CubeCL's streams are private, and do not order with others. So the host waits twice: until the streams
//! have made a call's inputs, before NCCL starts, and until NCCL is done, before anyone gets its results.
//! The first wait is for an event that is recorded when the call is submitted: behind the work of that
//! thread up to there and, by CubeCL's own rules for tensors that threads share, behind what made the
//! inputs. What is submitted later (the rest of backward, while an asynchronous call waits for its turn) is
//! not waited for.

use burn::{backend::TensorMetadata, tensor::Shape};
use burn_cubecl::{kernel::into_contiguous, tensor::CubeTensor};
use cubecl::{
    client::Client,
    cuda::CudaRuntime,
    future::{DynFut, block_on},
    server::{Handle, ServerError},
};
use cubecl_runtime::{
    runtime::Runtime,
    server::ServerStorage,
    storage::{ComputeStorage, ManagedResource},
};

use crate::{
    DdpError, TensorOp,
    collective::Collective,
    nccl::{
        link::{self, Link},
        plan::{Errand, Share, moves},
        wire::Wire,
    },
};

type Storage = <<CudaRuntime as Runtime>::Server as ServerStorage>::Storage;

/// Device memory that stays where it is while this lives.
type Memory = ManagedResource<<Storage as ComputeStorage>::Resource>;

/// A tensor that a call takes, and the moment from which its elements are there.
pub(crate) struct Source {
    tensor: CubeTensor,
    memory: Memory,
    made: DynFut<Result<(), ServerError>>,
}

impl Source {
    /// To be made where the call is submitted.
    pub(crate) fn new(tensor: CubeTensor) -> Result<Self, DdpError> {
        let tensor = into_contiguous(tensor);
        // Makes this thread's stream wait for the one that the tensor was made on.
        let memory = memory(&tensor.client, &tensor.handle)?;
        let made = tensor.client.sync();
        Ok(Self {
            tensor,
            memory,
            made,
        })
    }

    pub(crate) fn shape(&self) -> Shape {
        self.tensor.shape()
    }
}

/// A new tensor on the same device, of the same type.
fn target(like: &CubeTensor, shape: Shape) -> Result<(CubeTensor, Memory), DdpError> {
    let client = like.client.clone();
    let handle = client.empty(shape.num_elements() * like.dtype.size());
    let memory = memory(&client, &handle)?;
    let tensor = CubeTensor::new_contiguous(client, like.device.clone(), shape, handle, like.dtype);
    Ok((tensor, memory))
}

fn memory(client: &Client, handle: &Handle) -> Result<Memory, DdpError> {
    client
        .get_resource::<<CudaRuntime as Runtime>::Server>(handle.clone())
        .map_err(device)
}

fn device(error: ServerError) -> DdpError {
    DdpError::Device(error.to_string())
}

/// Runs this rank's part of a call over some tensors, as one group of NCCL's. `lens` are the elements that
/// each rank brings of each tensor, `shapes` those of the results; elements are in one type, that of
/// `wire`.
pub(crate) fn run(
    link: &Link,
    call: &Collective<'_>,
    errand: Errand,
    wire: Wire,
    sources: Vec<Source>,
    lens: &[Vec<usize>],
    shapes: Vec<Shape>,
) -> Result<Vec<CubeTensor>, DdpError> {
    let mut calls = Vec::new();
    let mut held = Vec::with_capacity(sources.len());
    for ((source, lens), shape) in sources.into_iter().zip(lens).zip(shapes) {
        let Source {
            tensor,
            memory: from,
            made,
        } = source;
        block_on(made).map_err(device)?;
        // Where a rank's own elements are the result, they stay where they are.
        let stays = match errand {
            Errand::All(TensorOp::Broadcast { root }) => root == call.rank,
            Errand::All(TensorOp::Reduce { root, .. }) => root != call.rank,
            Errand::Send { .. } => true,
            _ => false,
        };
        let target = match stays {
            true => None,
            false => Some(target(&tensor, shape)?),
        };
        let into = target.as_ref().map_or(&from, |(_, into)| into);
        let share = Share {
            rank: call.rank,
            lens,
            from: from.resource().ptr,
            into: into.resource().ptr,
            wire,
        };
        calls.extend(moves(errand, &share));
        held.push((tensor, from, target));
    }
    // What used the new memory before may still be under way.
    if let Some((tensor, ..)) = held.first() {
        block_on(tensor.client.sync()).map_err(device)?;
    }
    if !calls.is_empty() {
        let mut communicator = link.communicator();
        // SAFETY: sources and targets are of the link's device, where the planned calls stay within them:
        // counts are those of the tensors. The host has waited until nobody else uses them, and `held`
        // keeps them where they are until the calls have ended.
        unsafe { communicator.set_type(wire.code) };
        if let Err(error) = link::run(&mut communicator, call, errand, &calls) {
            // Kernels that were aborted may not have ended yet. The memory is lost, as is the job.
            std::mem::forget(held);
            return Err(error);
        }
    }
    let results = held
        .into_iter()
        .map(|(tensor, _, target)| target.map_or(tensor, |(tensor, _)| tensor));
    Ok(results.collect())
}
