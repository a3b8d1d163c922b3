//! A few rows of a product's output, by which two ways of computing it are compared.

use cudarc::driver::{
    result::{memcpy_dtoh_sync, memset_d8_async, stream::synchronize},
    sys::CUstream,
};

use super::text;
use crate::{Matrices, agreement::values};

/// The most matrices of which a row is taken.
const MOST: usize = 64;

/// Rows of an output.
pub(super) struct Sample {
    output: Matrices,
    /// Where they begin.
    rows: Vec<u64>,
}

impl Sample {
    /// Takes a row of some of the matrices at these addresses.
    pub(super) fn new(output: Matrices, addresses: &[u64]) -> Self {
        let step = addresses.len().div_ceil(MOST).max(1);
        let down = (output.leading * output.element.size()) as u64;
        let row = |(at, address): (usize, &u64)| address + (at % output.rows) as u64 * down;
        let rows = addresses.iter().enumerate().step_by(step).map(row);
        Self {
            output,
            rows: rows.collect(),
        }
    }

    fn bytes(&self) -> usize {
        self.output.columns * self.output.element.size()
    }

    /// Fills the rows with NaN.
    ///
    /// # Safety
    ///
    /// The addresses must be those of matrices as `output` says, on the thread's current device, to which the stream must belong.
    pub(super) unsafe fn clear(&self, stream: CUstream) -> Result<(), String> {
        self.rows.iter().try_for_each(|row| {
            // SAFETY: a row is within its matrix, which is there by this function's contract.
            unsafe { memset_d8_async(*row, u8::MAX, self.bytes(), stream) }.map_err(text)
        })
    }

    /// The elements, after all that the stream does.
    ///
    /// # Safety
    ///
    /// That of [`clear`](Self::clear).
    pub(super) unsafe fn read(&self, stream: CUstream) -> Result<Vec<f32>, String> {
        // SAFETY: the stream is valid by this function's contract.
        unsafe { synchronize(stream) }.map_err(text)?;
        let mut bytes = vec![0; self.bytes()];
        let mut all = Vec::new();
        for row in &self.rows {
            // SAFETY: as above, and `bytes` has the size of a row.
            unsafe { memcpy_dtoh_sync(&mut bytes, *row) }.map_err(text)?;
            all.extend(values(&bytes, self.output.element));
        }
        Ok(all)
    }
}
