//! Hands products to the library.

use std::sync::Arc;

use cubecl::server::Handle;

use super::{
    Library,
    problem::{Addresses, Problem, WORKSPACE},
};
use crate::{Operands, Product, stream};

impl Library {
    /// Enqueues products on CubeCL's own stream, in order with its kernels, so nothing waits. A graph that the stream records
    /// contains them too.
    ///
    /// # Errors
    /// If the library has no algorithm for such a product, or an address is less aligned than the product says: then nothing was
    /// enqueued. An error that occurs when the stream reaches a product is found by the reader of the output, and the
    /// library [has refused](Self::has_refused) such products from then on.
    ///
    /// The caller answers for the memory: the handles must be as large as the product's matrices, at all offsets.
    ///
    /// # Panics
    /// If the operands lack scales or a bias that the product has, or have others.
    pub fn submit(
        self: &Arc<Self>,
        product: &Product,
        operands: Operands<'_>,
    ) -> Result<(), String> {
        assert_eq!(product.scaled, operands.scales.is_some(), "{product:?}");
        assert_eq!(product.bias, operands.bias.is_some(), "{product:?}");
        let alignment = product.alignment;
        let starts = [&operands.lhs, &operands.rhs, &operands.output];
        // Allocations are aligned to more than this.
        let start = |handle: &Handle| handle.offset_start.unwrap_or(0);
        let offsets = operands.offsets.iter().flatten().copied();
        if starts
            .map(start)
            .into_iter()
            .chain(offsets)
            .any(|at| !at.is_multiple_of(alignment.into()))
        {
            return Err(format!("an address that is no multiple of {alignment}"));
        }
        let algorithm = self.algorithm(product)?;
        let workspace = operands.client.empty(WORKSPACE);
        let mut inputs = vec![operands.lhs, operands.rhs, workspace];
        inputs.extend(operands.scales.into_iter().flatten());
        inputs.extend(operands.bias);
        let (library, product, offsets) = (self.clone(), *product, operands.offsets);
        let work = move |inputs: &[u64], output, stream| {
            let scales = product.scaled.then(|| [inputs[3], inputs[4]]);
            let addresses = Addresses {
                lhs: inputs[0],
                rhs: inputs[1],
                output,
                scales,
                bias: inputs.last().copied().filter(|_| product.bias),
                workspace: inputs[2],
            };
            let problem = Problem::new(&product, &addresses)?;
            let done = offsets.iter().try_for_each(|[lhs, rhs, output]| {
                let addresses = Addresses {
                    lhs: addresses.lhs + lhs,
                    rhs: addresses.rhs + rhs,
                    output: addresses.output + output,
                    ..addresses
                };
                // SAFETY: the addresses are of the stream's device. The tensors there are what the caller says, and the workspace
                // has `WORKSPACE` bytes. They exist when the stream reaches this, and nobody else uses them until it is done, in
                // each replay of a graph too: see `stream`.
                unsafe { library.enqueue(&problem, &addresses, &algorithm, stream) }
            });
            done.inspect_err(|why| library.refuse(&product, why))
        };
        stream::enqueue(operands.client, inputs, operands.output, work);
        Ok(())
    }
}
