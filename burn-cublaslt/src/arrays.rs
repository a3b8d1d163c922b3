//! The arrays of addresses by which the library finds matrices that are not all at equal distances.

use crate::{Matrices, Product};

/// The bytes that the arrays for so many products take.
pub(crate) fn bytes_of_arrays(products: usize) -> usize {
    3 * products * size_of::<u64>()
}

/// The addresses of all right sides, then of all left sides, then of all outputs, for a product of groups. `starts` are where the left
/// sides, the right sides and the outputs of each group begin.
pub(crate) fn addresses(product: &Product, starts: &[[u64; 3]]) -> Vec<u64> {
    let array = |matrices: &Matrices, side: usize| {
        let stride = (matrices.stride * matrices.element.size()) as u64;
        let of_group = move |start: &[u64; 3]| {
            let start = start[side];
            (0..product.batches as u64).map(move |at| start + at * stride)
        };
        starts.iter().flat_map(of_group).collect::<Vec<_>>()
    };
    let [rhs, lhs] = [array(&product.rhs, 1), array(&product.lhs, 0)];
    [rhs, lhs, array(&product.output, 2)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Element;

    /// Heads of attention, two texts of three heads each: a group is the texts of a head, and the output has all heads of a text.
    #[test]
    fn each_product_has_the_addresses_of_its_matrices() {
        let matrices = |stride| Matrices {
            stride,
            ..Matrices::by_rows(Element::BF16, 4, 4)
        };
        let product = Product {
            batches: 2,
            ..Product::new(matrices(48), matrices(0), matrices(100))
        };
        let start = |head: u64| [1000 + 8 * head, 5000 + head, 9000 + 32 * head];
        let starts: Vec<[u64; 3]> = (0..3).map(start).collect();
        let found = addresses(&product, &starts);
        assert_eq!(bytes_of_arrays(6), size_of_val(found.as_slice()));
        for (head, text) in (0..3).flat_map(|head| (0..2).map(move |text| (head, text))) {
            let of = |array: u64| found[(array * 6 + head * 2 + text) as usize];
            let [rhs, lhs, output] = [of(0), of(1), of(2)];
            assert_eq!(rhs, 5000 + head);
            assert_eq!(lhs, 1000 + 8 * head + 96 * text);
            assert_eq!(output, 9000 + 32 * head + 200 * text);
        }
    }
}
