//! The outline of a product, which decides which routines can compute it: its sizes, but not its elements.

use burn::backend::TensorMetadata;
use burn::tensor::Shape;
use burn_cubecl::CubeDevice;
use serde::{Deserialize, Serialize};

use super::{Product, cublaslt, native};
use crate::{Fp8Error, Granularity, MatmulSpec, kernels::buffer, portable::matmul_shape};

/// The maximum number of codes of one side of a product, which kernels count in words of four.
pub(super) const MOST_CODES: usize = 4 * buffer::MOST;

/// The sizes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Size {
    /// Rows.
    pub(super) m: usize,
    /// Columns.
    pub(super) n: usize,
    /// The inner dimension.
    pub(super) k: usize,
    /// The number of matrices.
    pub(super) batches: usize,
}

impl Size {
    pub(super) fn of(lhs: &Shape, rhs: &Shape) -> Self {
        let shape = matmul_shape(lhs, rhs);
        let rank = shape.num_dims();
        Self {
            m: shape[rank - 2],
            n: shape[rank - 1],
            k: lhs[rank - 1],
            batches: shape.iter().take(rank - 2).product(),
        }
    }

    /// The number of multiplications for one matrix of the batch.
    pub(super) fn multiplications(self) -> usize {
        self.m * self.n * self.k
    }

    /// The number of elements of the product.
    pub(super) fn elements(self) -> usize {
        self.m * self.n * self.batches
    }
}

/// A product without its elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outline {
    pub(super) size: Size,
    /// The number of codes of each side. A side that is broadcast has fewer matrices than the product.
    pub(super) codes: [usize; 2],
    pub(super) granularities: [Granularity; 2],
    /// Whether cuBLASLt takes the product.
    pub(super) library: bool,
}

impl Outline {
    pub(super) fn of(product: &Product) -> Self {
        let (lhs, rhs) = (product.lhs.shape(), product.rhs.shape());
        let library = cublaslt::takes(product);
        Self::new(&lhs, &rhs, product.spec.granularities, library)
    }

    pub(super) fn new(
        lhs: &Shape,
        rhs: &Shape,
        granularities: [Granularity; 2],
        library: bool,
    ) -> Self {
        Self {
            size: Size::of(lhs, rhs),
            codes: [lhs, rhs].map(Shape::num_elements),
            granularities,
            library,
        }
    }

    /// Whether kernels can count the codes of copies along the inner dimension, padded to whole chunks.
    pub(super) fn can_be_copied(&self) -> bool {
        let k = self.size.k;
        let copied = |codes: usize| codes.checked_div(k).unwrap_or(0) * buffer::pitch(k);
        self.codes
            .into_iter()
            .all(|codes| copied(codes) <= MOST_CODES)
    }
}

/// Refuses a product that has more elements than any routine native to a device can count.
///
/// # Errors
/// [`Fp8Error::TooLarge`].
pub(crate) fn check_product(
    device: &CubeDevice,
    [lhs, rhs]: [Shape; 2],
    spec: MatmulSpec,
) -> Result<(), Fp8Error> {
    let size = Size::of(&lhs, &rhs);
    if size
        .elements()
        .max(lhs.num_elements())
        .max(rhs.num_elements())
        <= buffer::MOST
    {
        return Ok(());
    }
    let library = cublaslt::takes_size(device, size, spec);
    let outline = Outline::new(&lhs, &rhs, spec.granularities, library);
    match native(&outline, &device.client(), device)[..] {
        [] => Err(too_large(&outline, [lhs, rhs])),
        _ => Ok(()),
    }
}

fn too_large(outline: &Outline, [lhs, rhs]: [Shape; 2]) -> Fp8Error {
    let [left, right] = outline.codes;
    let (what, shape, most) = if left > MOST_CODES {
        ("the left side of the product", lhs, MOST_CODES)
    } else if right > MOST_CODES {
        ("the right side of the product", rhs, MOST_CODES)
    } else {
        ("the product", matmul_shape(&lhs, &rhs), buffer::MOST)
    };
    Fp8Error::TooLarge {
        what,
        shape: shape.to_vec(),
        elements: shape.num_elements(),
        most,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::MatmulRoutine::{
        self, CublasLt, Decoded, Direct, Mma, Wgmma, WgmmaTma, WgmmaTma256, WgmmaTmaMulticast,
    };

    const WHOLE: [Granularity; 2] = [Granularity::Tensor; 2];

    /// The outline of a product of `[m, k]` by `[k, n]`.
    fn outline([m, k, n]: [usize; 3], granularities: [Granularity; 2]) -> Outline {
        let shapes = [[m, k], [k, n]].map(Shape::from);
        Outline::new(&shapes[0], &shapes[1], granularities, true)
    }

    fn fitting(outline: &Outline) -> Vec<MatmulRoutine> {
        let mut fitting = MatmulRoutine::ALL.to_vec();
        fitting.retain(|routine| routine.fits(outline));
        fitting
    }

    /// The elements of an output are counted one by one, or in pairs if rows are whole pairs. cuBLASLt does not count them, but
    /// the kernel that finds their amax does, four at a time if they are whole fours.
    #[test]
    fn outputs_are_as_large_as_a_routine_counts() {
        let all = &MatmulRoutine::ALL[..];
        let in_pairs = &all[2..];
        for (columns, each, expected) in [
            (1024, 1, all),
            (1024, 2, in_pairs),
            (1023, 2, &[]),
            (1024, 4, &[CublasLt]),
        ] {
            let rows = each * buffer::MOST / columns;
            assert_eq!(fitting(&outline([rows, 64, columns], WHOLE)), expected);
        }
        for (columns, each, expected) in [
            (1024, 1, in_pairs),
            (1023, 1, &[]),
            (1024, 2, &[CublasLt]),
            (1024, 4, &[]),
        ] {
            let rows = each * buffer::MOST / columns + 1;
            assert_eq!(fitting(&outline([rows, 64, columns], WHOLE)), expected);
        }
    }

    /// Codes are counted in words where they are read as words, by values where they are decoded (four at a time or one by one),
    /// and with their padding where they are copied.
    #[test]
    fn operands_are_as_large_as_a_routine_counts() {
        let most = buffer::MOST;
        // The largest number of terms in rows of whole chunks.
        let terms = 4 * most / (1 << 10) / 16 * 16;
        // A tall tile does not take scales of each column that change along the sum.
        let not_tall = &[Direct, Decoded, Mma, Wgmma, WgmmaTma, CublasLt][..];
        let block = Granularity::Block {
            rows: 1,
            columns: 128,
        };
        let along = [block, Granularity::Column];
        for (shape, granularities, expected) in [
            ([1 << 10, terms, 129], WHOLE, &MatmulRoutine::ALL[..]),
            ([1 << 10, terms + 16, 129], WHOLE, &[]),
            (
                [1 << 10, terms, 129],
                along,
                &[Direct, Mma, Wgmma, WgmmaTma, CublasLt],
            ),
            (
                [1 << 10, terms - 15, 129],
                WHOLE,
                &[
                    Direct,
                    Mma,
                    Wgmma,
                    WgmmaTma,
                    WgmmaTma256,
                    WgmmaTmaMulticast,
                    CublasLt,
                ],
            ),
            ([1 << 10, terms / 4, 129], along, not_tall),
            ([1, 1, most >> 1], WHOLE, &[Direct, Decoded]),
        ] {
            assert_eq!(
                fitting(&outline(shape, granularities)),
                expected,
                "{shape:?}"
            );
        }
    }

    /// A tall tile needs more rows than half of its own, and registers enough for the scales of a step; a cluster of two needs more
    /// columns than one tile has.
    #[test]
    fn tall_tiles_are_for_some_products() {
        let by = |rows, columns| Granularity::Block { rows, columns };
        for (rows, granularities, expected) in [
            (128, WHOLE, false),
            (129, WHOLE, true),
            (129, [Granularity::Row, Granularity::Column], true),
            (129, [by(1, 128), by(128, 128)], true),
            (129, [by(1, 128), by(128, 1)], false),
        ] {
            for columns in [128, 129] {
                let outline = outline([rows, 256, columns], granularities);
                assert!(WgmmaTma.fits(&outline));
                assert_eq!(WgmmaTma256.fits(&outline), expected, "{granularities:?}");
                let paired = expected && columns > 128;
                assert_eq!(WgmmaTmaMulticast.fits(&outline), paired);
            }
        }
    }

    /// They consist of the bias alone.
    #[test]
    fn products_without_terms_are_for_the_direct_routine() {
        for shape in [[3, 0, 5], [0, 3, 5], [3, 5, 0]] {
            let outline = Outline {
                library: false,
                ..outline(shape, WHOLE)
            };
            assert_eq!(fitting(&outline), [Direct]);
        }
    }

    #[test]
    fn what_no_routine_counts_is_an_error() {
        let most = buffer::MOST;
        for (shapes, what, elements, limit) in [
            ([[1 << 16, 8], [8, 1 << 16]], "the product", 1 << 32, most),
            (
                [[1usize << 32, 2], [2, 1]],
                "the left side of the product",
                1 << 33,
                MOST_CODES,
            ),
            (
                [[1, 2], [2, 1 << 32]],
                "the right side of the product",
                1 << 33,
                MOST_CODES,
            ),
        ] {
            let shapes = shapes.map(Shape::from);
            let outline = Outline::new(&shapes[0], &shapes[1], WHOLE, false);
            assert!(fitting(&outline).is_empty());
            let Fp8Error::TooLarge {
                what: found,
                elements: counted,
                most,
                ..
            } = too_large(&outline, shapes)
            else {
                panic!("another error");
            };
            assert_eq!((found, counted, most), (what, elements, limit));
        }
    }
}
