//! Hands products to the library.

use std::sync::Arc;

use super::{
    Library,
    problem::{Addresses, Problem, WORKSPACE},
};
use crate::{Operands, Product, ProductError, stream};

impl Library {
    /// Enqueues products on CubeCL's own stream, in order with its kernels, so nothing waits. A graph that the stream records
    /// contains them too.
    ///
    /// # Errors
    /// If the library has no algorithm for such a product, an address is less aligned than the product says, or matrices reach further
    /// than their memory: then nothing was enqueued. An error that occurs when the stream reaches a product is found by the reader of the output, and the
    /// library [has refused](Self::has_refused) such products from then on.
    pub fn submit(
        self: &Arc<Self>,
        product: &Product,
        operands: Operands<'_>,
    ) -> Result<(), ProductError> {
        operands.check(product)?;
        let algorithm = self.algorithm(product);
        let algorithm = algorithm.map_err(|reason| ProductError::NoAlgorithm { reason })?;
        let workspace = operands.client.empty(WORKSPACE);
        let inputs = vec![operands.lhs, operands.rhs, workspace];
        let (library, product, offsets) = (self.clone(), *product, operands.offsets);
        let work = move |inputs: &[u64], output, stream| {
            let problem = Problem::new(&product)?;
            let done = offsets.iter().try_for_each(|offsets| {
                let addresses = Addresses {
                    lhs: inputs[0] + offsets[0],
                    rhs: inputs[1] + offsets[1],
                    output: output + offsets[2],
                    workspace: inputs[2],
                };
                // SAFETY: the addresses are of the stream's device. The tensors there hold the matrices, and the workspace
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
