//! Calls over tensors that stay on their device.

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

/// A tensor on a device. Its memory stays where it is while this lives.
pub(crate) trait Resident: Sized {
    fn shape(&self) -> Shape;

    /// Where its elements are, one after the other.
    fn address(&self) -> u64;

    /// A new tensor on the same device, of the same type, whose elements are whatever was in its memory.
    fn room(&mut self, shape: Shape) -> Result<Self, DdpError>;

    /// Makes a stream of its device wait until its elements are there, or, for a new tensor, until nobody uses its memory
    /// for anything else. The host goes on.
    fn precede(&mut self, stream: &dyn DeviceStream) -> Result<(), DdpError>;
}

/// Runs this rank's part of a call over some tensors, as one group of NCCL's. `lens` are the elements that
/// each rank brings of each tensor, `shapes` those of the results; elements are in one type, that of
/// `wire`.
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
        // SAFETY: sources and targets are of the link's device, where the planned calls stay within them:
        // counts are those of the tensors. The stream waits until nobody else uses them, and `held` keeps
        // them where they are until the calls have ended.
        unsafe { communicator.set_type(wire.code) };
        if let Err(error) = link::run(&mut communicator, call, errand, &calls) {
            // Kernels that were aborted may not have ended yet. The memory is lost, as is the job.
            std::mem::forget(held);
            return Err(error);
        }
    }
    let results = held
        .into_iter()
        .map(|(source, target)| target.unwrap_or(source));
    Ok(results.collect())
}
