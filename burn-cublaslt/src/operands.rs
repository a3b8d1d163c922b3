//! Where the matrices of a product are: [`Operands`].

use cubecl::{client::Client, server::Handle};

#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
use crate::{Product, ProductError};

/// The memory of a product.
pub struct Operands<'a> {
    /// The client of the device, on whose stream of the output the product is computed.
    pub client: &'a Client,
    /// The left side.
    pub lhs: Handle,
    /// The right side.
    pub rhs: Handle,
    /// The output.
    pub output: Handle,
    /// In bytes, from where the left side, the right side and the output begin: once for each time that the product is computed.
    pub offsets: Vec<[u64; 3]>,
}

#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
impl Operands<'_> {
    /// Whether the product's matrices are where they may be.
    pub(crate) fn check(&self, product: &Product) -> Result<(), ProductError> {
        let alignment = product.alignment;
        let sides = [
            (&self.lhs, product.lhs),
            (&self.rhs, product.rhs),
            (&self.output, product.output),
        ];
        for (side, (handle, matrices)) in sides.into_iter().enumerate() {
            let offsets = self.offsets.iter().map(|offsets| offsets[side]);
            // Allocations are aligned to more than this.
            let mut starts = offsets.clone().chain([handle.offset_start.unwrap_or(0)]);
            if starts.any(|start| !start.is_multiple_of(alignment.into())) {
                return Err(ProductError::Unaligned { alignment });
            }
            let needed = offsets.max().unwrap_or(0) + matrices.bytes(product.batches);
            let size = handle.size_in_used();
            if needed > size {
                return Err(ProductError::TooLarge { needed, size });
            }
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::{Element, Matrices};
    use burn_cubecl::CubeDevice;
    use cubecl::cpu::CpuDevice;

    #[test]
    fn matrices_are_within_their_memory_and_aligned() {
        let client = CubeDevice::Cpu(CpuDevice).client();
        let matrices = |rows, columns| Matrices::by_rows(Element::BF16, rows, columns);
        let product = Product {
            lhs: matrices(4, 8),
            rhs: Matrices {
                order: crate::Order::Columns,
                leading: 16,
                stride: 0,
                ..matrices(8, 2)
            },
            output: matrices(4, 2),
            batches: 3,
            alignment: 16,
        };
        // Three of 4 by 8, one column of 16 and one of 8, three of 4 by 2.
        let exact = [3 * 4 * 8, 16 + 8, 3 * 4 * 2].map(|elements| 2 * elements);
        let check = |sizes: [usize; 3], offsets: Vec<[u64; 3]>| {
            let [lhs, rhs, output] = sizes.map(|size| client.empty(size));
            let client = &client;
            let operands = Operands {
                client,
                lhs,
                rhs,
                output,
                offsets,
            };
            operands.check(&product)
        };
        assert_eq!(check(exact, vec![[0; 3]]), Ok(()));
        for side in 0..3 {
            let mut sizes = exact;
            sizes[side] -= 2;
            let (needed, size) = (exact[side] as u64, sizes[side] as u64);
            let too_large = Err(ProductError::TooLarge { needed, size });
            assert_eq!(check(sizes, vec![[0; 3]]), too_large);
            let mut offset = [0; 3];
            offset[side] = 8;
            let larger = exact.map(|size| size + 16);
            let unaligned = Err(ProductError::Unaligned { alignment: 16 });
            assert_eq!(check(larger, vec![[0; 3], offset]), unaligned);
            offset[side] = 16;
            assert_eq!(check(larger, vec![[0; 3], offset]), Ok(()));
            assert!(check(exact, vec![[0; 3], offset]).is_err());
        }
    }
}
