//! The bindings to cuBLASLt. All its unsafe code is in here.

mod library;
mod problem;
mod stream;

use std::{fmt::Display, sync::Arc};

use burn_cubecl::{CubeDevice, tensor::CubeTensor};

pub(super) use library::Library;

use super::{operands::Operands, plan::Plan};
use crate::MatmulSpec;
use problem::{ALIGNMENT, Addresses, Problem, WORKSPACE};

/// cuBLASLt for a device, if it can be used there.
pub(super) fn library(device: &CubeDevice) -> Option<Arc<Library>> {
    match device {
        CubeDevice::Cuda(device) => library::library(device.index),
        _ => None,
    }
}

/// Enqueues the computation of `operands.output` on CubeCL's stream. After an error here, another routine computes the product.
/// An error that occurs when the stream reaches it is found by the reader of the output, and the next such product is left to others.
pub(super) fn run(
    library: &Arc<Library>,
    plan: &Plan,
    spec: MatmulSpec,
    operands: &Operands,
) -> Result<(), String> {
    if !are_aligned(operands) {
        return Err(format!("an address that is no multiple of {ALIGNMENT}"));
    }
    let algorithm = library.algorithm(plan, spec)?;
    let handle = |tensor: &CubeTensor| tensor.handle.clone();
    let workspace = operands.output.client.empty(WORKSPACE);
    let mut inputs = vec![
        handle(&operands.lhs),
        handle(&operands.rhs),
        handle(&operands.lhs_factor),
        handle(&operands.rhs_factor),
        workspace,
    ];
    inputs.extend(operands.bias.as_ref().map(handle));
    let (library, plan) = (library.clone(), *plan);
    let work = move |inputs: &[u64], output, stream| {
        let addresses = Addresses {
            lhs: inputs[0],
            rhs: inputs[1],
            lhs_factor: inputs[2],
            rhs_factor: inputs[3],
            workspace: inputs[4],
            bias: inputs.get(5).copied(),
            output,
        };
        let problem = Problem::new(&plan, spec, &addresses)?;
        // SAFETY: the addresses are of the stream's device. The tensors there have the plan's shapes: codes in vectors of k
        // elements, `leading` apart, one f32 as each factor, n elements as a bias, m times n as the output, and `WORKSPACE`
        // bytes. They exist when the stream reaches this, and nobody else uses them until it is done, in each replay of a graph
        // too: see `stream`.
        let done = unsafe { library.enqueue(&problem, &addresses, &algorithm, stream) };
        done.inspect_err(|why| library.refuse(&plan, spec, why))
    };
    stream::enqueue(
        &operands.output.client,
        inputs,
        handle(&operands.output),
        work,
    );
    Ok(())
}

fn are_aligned(operands: &Operands) -> bool {
    // Allocations are aligned to more than this.
    let aligned = |tensor: &CubeTensor| {
        let offset = tensor.handle.offset_start.unwrap_or(0);
        offset.is_multiple_of(ALIGNMENT.into())
    };
    [&operands.lhs, &operands.rhs, &operands.output]
        .into_iter()
        .all(aligned)
        && operands.bias.iter().all(aligned)
}

fn text(error: impl Display) -> String {
    error.to_string()
}
