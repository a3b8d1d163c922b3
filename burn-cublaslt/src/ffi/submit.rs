//! Hands products to the library.

use std::sync::Arc;

use super::{
    Library,
    problem::{Addresses, Described, Problem, WORKSPACE},
};
use crate::{Operands, Product, ProductError, stream};

impl Library {
    /// Enqueues products on CubeCL's own stream, in order with its kernels, so nothing waits. A graph that the stream records
    /// contains them too.
    ///
    /// # Errors
    /// If the library has no algorithm for such a product, an address is less aligned than the product says, operands reach further
    /// than their memory, or are others than the product says: then nothing was enqueued. An error that occurs when the stream reaches
    /// a product is found by the reader of the output, and the library [has refused](Self::has_refused) such products from then on.
    pub fn submit(
        self: &Arc<Self>,
        product: &Product,
        operands: Operands<'_>,
    ) -> Result<(), ProductError> {
        operands.check(product)?;
        let algorithm = self.algorithm(product);
        let algorithm = algorithm.map_err(|reason| ProductError::NoAlgorithm { reason })?;
        let workspace = operands.client.empty(WORKSPACE);
        let mut inputs = vec![operands.lhs, operands.rhs, workspace];
        inputs.extend(operands.factors.into_iter().flatten());
        inputs.extend(operands.bias);
        let (library, product, offsets) = (self.clone(), *product, operands.offsets);
        let work = move |inputs: &[u64], output, stream| {
            let mut inputs = inputs.iter().copied();
            let mut next = || inputs.next().expect("as many as were given");
            let [lhs, rhs, workspace] = [(); 3].map(|()| next());
            let described = Described {
                factors: product.factors.then(|| [(); 2].map(|()| next())),
                bias: product.bias.then(next),
            };
            let problem = Problem::new(&product, &described)?;
            let done = offsets.iter().try_for_each(|offsets| {
                let addresses = Addresses {
                    lhs: lhs + offsets[0],
                    rhs: rhs + offsets[1],
                    output: output + offsets[2],
                    workspace,
                };
                // SAFETY: the addresses are of the stream's device. They hold the matrices, the factors and the bias, and the
                // workspace has `WORKSPACE` bytes. They exist when the stream reaches this, and nobody else uses them until it is
                // done, in each replay of a graph too: see `stream`.
                unsafe { library.enqueue(&problem, &addresses, &algorithm, stream) }
            });
            done.inspect_err(|why| library.refuse(&product, why))
        };
        stream::enqueue(operands.client, inputs, operands.output, work);
        Ok(())
    }
}
