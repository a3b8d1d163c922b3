//! Where the matrices of a product are: [`Operands`].

use cubecl::{client::Client, server::Handle};

#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
use crate::{Matrices, Product, ProductError};

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
    /// One f32 for the left and one for the right side, if the [product](crate::Product::factors) has factors.
    pub factors: Option<[Handle; 2]>,
    /// The elements of a bias, if the [product](crate::Product::bias) has one.
    pub bias: Option<Handle>,
    /// In bytes, from where the left side, the right side and the output begin: once for each time that the product is computed.
    pub offsets: Vec<[u64; 3]>,
}

#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
impl Operands<'_> {
    /// Whether the product's matrices are where they may be.
    pub(crate) fn check(&self, product: &Product) -> Result<(), ProductError> {
        let alignment = product.alignment;
        for (is_there, expected, what) in [
            (self.factors.is_some(), product.factors, "factors"),
            (self.bias.is_some(), product.bias, "a bias"),
        ] {
            if is_there != expected {
                return Err(ProductError::Disagreement { what });
            }
        }
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
            is_within(handle, needed)?;
        }
        for factor in self.factors.iter().flatten() {
            is_within(factor, size_of::<f32>() as u64)?;
        }
        if let Some(bias) = &self.bias {
            let start = bias.offset_start.unwrap_or(0);
            if !start.is_multiple_of(alignment.into()) {
                return Err(ProductError::Unaligned { alignment });
            }
            let Matrices {
                columns, element, ..
            } = product.output;
            is_within(bias, (columns * element.size()) as u64)?;
        }
        Ok(())
    }
}

/// Whether memory has so many bytes.
#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
fn is_within(handle: &Handle, needed: u64) -> Result<(), ProductError> {
    let size = handle.size_in_used();
    match needed <= size {
        true => Ok(()),
        false => Err(ProductError::TooLarge { needed, size }),
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::Element;
    use burn_cubecl::CubeDevice;
    use cubecl::cpu::CpuDevice;

    #[test]
    fn matrices_are_within_their_memory_and_aligned() {
        let client = CubeDevice::Cpu(CpuDevice).client();
        let matrices = |rows, columns| Matrices::by_rows(Element::BF16, rows, columns);
        let rhs = Matrices {
            order: crate::Order::Columns,
            leading: 16,
            stride: 0,
            ..matrices(8, 2)
        };
        let product = Product {
            batches: 3,
            ..Product::new(matrices(4, 8), rhs, matrices(4, 2))
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
                factors: None,
                bias: None,
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

    #[test]
    fn factors_and_a_bias_are_there_if_the_product_says_so() {
        let client = CubeDevice::Cpu(CpuDevice).client();
        let codes = |rows, columns| Matrices::by_rows(Element::E4M3, rows, columns);
        let rhs = Matrices {
            order: crate::Order::Columns,
            leading: 16,
            ..codes(16, 8)
        };
        let output = Matrices::by_rows(Element::BF16, 4, 8);
        let plain = Product::new(codes(4, 16), rhs, output);
        let check = |product: Product, factors: Option<[usize; 2]>, bias: Option<(usize, u64)>| {
            let operands = Operands {
                client: &client,
                lhs: client.empty(4 * 16),
                rhs: client.empty(16 * 8),
                output: client.empty(4 * 8 * 2),
                factors: factors.map(|sizes| sizes.map(|size| client.empty(size))),
                bias: bias.map(|(size, start)| client.empty(size).offset_start(start)),
                offsets: vec![[0; 3]],
            };
            operands.check(&product)
        };
        let [factors, bias] = [true, false].map(|factors| Product {
            factors,
            bias: !factors,
            ..plain
        });
        let disagreement = |what| Err(ProductError::Disagreement { what });
        assert_eq!(check(plain, None, None), Ok(()));
        assert_eq!(check(plain, Some([4; 2]), None), disagreement("factors"));
        assert_eq!(check(plain, None, Some((16, 0))), disagreement("a bias"));
        assert_eq!(check(factors, None, None), disagreement("factors"));
        assert_eq!(check(bias, None, None), disagreement("a bias"));
        let too_large = |needed, size| Err(ProductError::TooLarge { needed, size });
        assert_eq!(check(factors, Some([4; 2]), None), Ok(()));
        assert_eq!(check(factors, Some([4, 2]), None), too_large(4, 2));
        // Eight elements of the output's type.
        assert_eq!(check(bias, None, Some((16, 0))), Ok(()));
        assert_eq!(check(bias, None, Some((14, 0))), too_large(16, 14));
        assert_eq!(check(bias, None, Some((32, 16))), Ok(()));
        let unaligned = Err(ProductError::Unaligned { alignment: 16 });
        assert_eq!(check(bias, None, Some((32, 8))), unaligned);
    }
}
