//! Hands products to the library.

use std::sync::Arc;

use super::{
    Library,
    apart::Groups,
    problem::{Addresses, Batches, Described, Problem, WORKSPACE},
};
use crate::{
    Operands, Product, ProductError,
    arrays::bytes_of_arrays,
    stream::{self, Stream},
};

impl Library {
    /// Enqueues products on CubeCL's own stream, in order with its kernels, so nothing waits. A graph that the stream records
    /// contains them too. Products at several [offsets](Operands::offsets) are computed by a call for each, or by one for all, if the
    /// library can do that: which is faster is measured when the first of a kind are computed, for which the device's thread waits once.
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
        // fp8 has its factors, and a bias an epilogue, which products with arrays of addresses are not known to have.
        let is_apart = operands.offsets.len() > 1 && !product.factors && !product.bias;
        let bytes = bytes_of_arrays(product.batches * operands.offsets.len());
        inputs.extend(is_apart.then(|| operands.client.empty(bytes)));
        let (library, product, offsets) = (self.clone(), *product, operands.offsets);
        let work = move |inputs: &[u64], output, stream: Stream| {
            let mut inputs = inputs.iter().copied();
            let mut next = || inputs.next().expect("as many as were given");
            let [lhs, rhs, workspace] = [(); 3].map(|()| next());
            let described = Described {
                factors: product.factors.then(|| [(); 2].map(|()| next())),
                bias: product.bias.then(&mut next),
            };
            let arrays = is_apart.then(next);
            let problem = Problem::new(&product, &described, Batches::Strided)?;
            let start = |offsets: &[u64; 3]| Addresses {
                lhs: lhs + offsets[0],
                rhs: rhs + offsets[1],
                output: output + offsets[2],
                workspace,
            };
            let starts: Vec<_> = offsets.iter().map(start).collect();
            let each = |addresses: &Addresses| {
                // SAFETY: the addresses are of the stream's device. They hold the matrices, the factors and the bias, and the
                // workspace has `WORKSPACE` bytes. They exist when the stream reaches this, and nobody else uses them until it is
                // done, in each replay of a graph too: see `stream`.
                unsafe { library.enqueue(&problem, addresses, &algorithm, stream.raw) }
            };
            let one_by_one = || starts.iter().try_for_each(each);
            let done = match arrays.filter(|_| !stream.is_recorded) {
                Some(arrays) => {
                    let groups = Groups {
                        product: &product,
                        starts: &starts,
                        arrays,
                    };
                    // SAFETY: as above, and the arrays have room for the addresses of all.
                    unsafe { library.enqueue_groups(&groups, stream.raw, one_by_one) }
                }
                None => one_by_one(),
            };
            done.inspect_err(|why| library.refuse(&product, why))
        };
        stream::enqueue(operands.client, inputs, operands.output, work);
        Ok(())
    }
}
