//! Runs calls over tensors that stay on their device.

use burn::tensor::Shape;

use super::DeviceStream;
use crate::{
    DdpError,
    collective::Collective,
    nccl::{
        link::{self, Link},
        plan::{Errand, Share, moves},
        wire::Wire,
    },
};

/// A tensor on a device. Its memory keeps its address while this value lives.
pub(crate) trait Resident: Sized {
    fn shape(&self) -> Shape;

    /// The address of its elements, which are contiguous.
    fn address(&self) -> u64;

    /// A new tensor on the same device, of the same type, with uninitialized elements.
    fn room(&mut self, shape: Shape) -> Result<Self, DdpError>;

    /// Makes a stream of its device wait until its elements have been computed or, for a new tensor, until nothing else uses
    /// its memory. The host does not wait.
    fn precede(&mut self, stream: &dyn DeviceStream) -> Result<(), DdpError>;
}

/// Runs this rank's part of a call over some tensors, as one NCCL group. For each tensor, `lens` has the number of elements
/// on each rank, and `shapes` the shape of the result. All elements have the type of `wire`.
pub(crate) fn run<T: Resident>(
    link: &Link,
    call: &Collective<'_>,
    errand: Errand,
    wire: Wire,
    sources: Vec<T>,
    lens: &[Vec<usize>],
    shapes: Vec<Shape>,
) -> Result<Vec<T>, DdpError> {
    let mut calls = Vec::new();
    let mut held = Vec::with_capacity(sources.len());
    for ((mut source, lens), shape) in sources.into_iter().zip(lens).zip(shapes) {
        let target = match errand.stays(call.rank) {
            true => None,
            false => Some(source.room(shape)?),
        };
        let share = Share {
            rank: call.rank,
            lens,
            from: source.address(),
            into: target.as_ref().unwrap_or(&source).address(),
            wire,
        };
        calls.extend(moves(errand, &share));
        held.push((source, target));
    }
    if !calls.is_empty() {
        let mut communicator = link.communicator();
        for (source, target) in &mut held {
            source.precede(communicator.stream())?;
            if let Some(target) = target {
                target.precede(communicator.stream())?;
            }
        }
        // SAFETY: sources and targets are on the link's device, and the planned calls stay within them:
        // counts are those of the tensors. The stream waits until nothing else uses them, and `held` keeps
        // their addresses until the calls have ended.
        unsafe { communicator.set_type(wire.code) };
        if let Err(error) = link::run(&mut communicator, call, errand, &calls) {
            // Aborted kernels may not have ended yet, so the memory is leaked. The job has failed anyway.
            std::mem::forget(held);
            return Err(error);
        }
    }
    let results = held
        .into_iter()
        .map(|(source, target)| target.unwrap_or(source));
    Ok(results.collect())
}
