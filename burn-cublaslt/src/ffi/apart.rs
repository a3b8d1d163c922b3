//! Products whose matrices are not all at equal distances, such as those of attention's heads, which lie in between each other: a call for
//! each group of matrices that are, or one for all, with arrays of their addresses. Which is faster is measured, once for each kind.

use std::cell::Cell;

use cudarc::{
    cublaslt::sys,
    driver::{result::memcpy_htod_async, sys::CUstream},
};

use super::{
    Library, clock,
    problem::{Addresses, Batches, Described, Problem},
    sample::Sample,
    text,
};
use crate::{Product, agreement::agree, arrays::addresses};

/// How products of a kind are computed by one call.
#[derive(Clone, Copy)]
pub(super) struct Apart {
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Whether that is faster than a call for each group.
    is_faster: bool,
}

/// Products of groups of matrices.
pub(super) struct Groups<'a> {
    /// The product of a group, which takes no factors and no bias.
    pub(super) product: &'a Product,
    /// Where each group begins.
    pub(super) starts: &'a [Addresses],
    /// The memory for [arrays](crate::arrays) of addresses.
    pub(super) arrays: u64,
}

impl Groups<'_> {
    /// The product of the matrices of all groups.
    fn whole(&self) -> Product {
        Product {
            batches: self.product.batches * self.starts.len(),
            ..*self.product
        }
    }

    /// The [arrays](crate::arrays).
    fn addresses(&self) -> Vec<u64> {
        let start = |start: &Addresses| [start.lhs, start.rhs, start.output];
        let starts: Vec<_> = self.starts.iter().map(start).collect();
        addresses(self.product, &starts)
    }
}

impl Library {
    /// Enqueues the products of all groups: by `one_by_one`, which does that for each, or by one call. If this is not known to be faster or
    /// slower, it is measured, which waits for the GPU, and some rows of the results are compared.
    ///
    /// # Safety
    ///
    /// That of [`enqueue`](Self::enqueue), for all groups. `arrays` must be memory for the addresses of all products, on the same
    /// device, that nobody else uses until the stream has done this.
    pub(super) unsafe fn enqueue_groups(
        &self,
        groups: &Groups<'_>,
        stream: CUstream,
        one_by_one: impl Fn() -> Result<(), String>,
    ) -> Result<(), String> {
        let whole = groups.whole();
        let is_done = Cell::new(false);
        let compare = || {
            let algorithm = self.advice(&whole, Batches::Apart)?;
            // SAFETY: by this function's contract.
            let at_once = || unsafe { self.enqueue_at_once(groups, &algorithm, stream) };
            // When they run first, both load their kernels.
            one_by_one()?;
            let outputs = &groups.addresses()[2 * whole.batches..];
            let sample = Sample::new(whole.output, outputs);
            // SAFETY: the outputs are there by this function's contract.
            let [expected, found] = unsafe {
                let expected = sample.read(stream)?;
                sample.clear(stream)?;
                at_once()?;
                [expected, sample.read(stream)?]
            };
            if !agree(&expected, &found) {
                log::warn!(
                    "burn-cublaslt: wrong with arrays of addresses, so computed without: {whole:?}"
                );
                return Err("the results differ".to_string());
            }
            // SAFETY: the stream is valid by this function's contract.
            let [groups, all] = unsafe { clock::fastest(stream, [&one_by_one, &at_once]) }?;
            is_done.set(true);
            log::debug!("burn-cublaslt: {all} ms at once, {groups} ms by groups: {whole:?}");
            Ok(Apart {
                algorithm,
                is_faster: all <= groups,
            })
        };
        let known = self.apart.lock().get(&whole, || {
            compare().inspect_err(|why| log::debug!("burn-cublaslt: not at once: {why}: {whole:?}"))
        });
        match known {
            Ok(_) if is_done.get() => Ok(()),
            Ok(Apart {
                algorithm,
                is_faster: true,
            }) => {
                // SAFETY: by this function's contract.
                let done = unsafe { self.enqueue_at_once(groups, &algorithm, stream) };
                done.or_else(|why| {
                    self.apart.lock().refuse(&whole, why);
                    one_by_one()
                })
            }
            _ => one_by_one(),
        }
    }

    /// # Safety
    ///
    /// That of [`enqueue_groups`](Self::enqueue_groups).
    unsafe fn enqueue_at_once(
        &self,
        groups: &Groups<'_>,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        stream: CUstream,
    ) -> Result<(), String> {
        let (whole, addresses) = (groups.whole(), groups.addresses());
        let described = Described {
            factors: None,
            bias: None,
        };
        let problem = Problem::new(&whole, &described, Batches::Apart)?;
        // SAFETY: the arrays have room for them by this function's contract. Memory that is not pinned is read before the call returns.
        unsafe { memcpy_htod_async(groups.arrays, &addresses, stream) }.map_err(text)?;
        let array =
            |number: usize| groups.arrays + (number * whole.batches * size_of::<u64>()) as u64;
        let arrays = Addresses {
            rhs: array(0),
            lhs: array(1),
            output: array(2),
            workspace: groups.starts[0].workspace,
        };
        // SAFETY: the arrays are on the stream's device, and hold the addresses of the matrices, for which this function's contract holds.
        unsafe { self.enqueue(&problem, &arrays, algorithm, stream) }
    }
}
