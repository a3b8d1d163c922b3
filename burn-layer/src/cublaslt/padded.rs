//! Large products of odd sizes, such as those with a vocabulary of 50,257.
//!
//! cuBLASLt's fast kernels load 16 bytes at a time along rows or columns as they lie. Where these are no multiples of that, it has only
//! kernels that load element by element: on an H200 the three products of GPT-2's vocabulary take 15 ms a step, at 110
//! to 150 TFLOP/s, where those of its linear layers reach 700.
//! Here the factors are copied with zeros up to the next multiple, and the product without what the zeros make.

use burn_cublaslt::{Matrices, Order, Product};

/// The elements of 16 bits in 16 bytes.
const STEP: usize = 8;

/// How many operations are worth copying a byte, with room. A byte takes an H200 about 0.3 ps; an operation takes 7.7 fs where elements
/// are loaded one by one, and 1.4 fs in a linear layer.
const WORTH: usize = 64;

/// Which of a product's matrices are copied, and the product of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Padded {
    pub(super) product: Product,
    pub(super) lhs: bool,
    pub(super) rhs: bool,
    pub(super) output: bool,
}

impl Padded {
    /// If the library would be so much slower without that it is worth the copies.
    pub(super) fn of(product: &Product) -> Option<Self> {
        let padded = Self::by_size(product);
        let wide = &padded.product;
        let copied = [
            (padded.lhs, wide.lhs),
            (padded.rhs, wide.rhs),
            (padded.output, wide.output),
        ];
        let copied = copied.into_iter().filter(|(copied, _)| *copied);
        // Read and written.
        let bytes = copied.map(|(_, wide)| 2 * wide.rows * wide.columns * wide.element.size());
        let bytes: usize = bytes.sum();
        let operations = 2 * product.lhs.rows * product.lhs.columns * product.rhs.columns;
        let worth = bytes > 0 && operations > WORTH * bytes;
        (worth && product.batches == 1).then_some(padded)
    }

    fn by_size(product: &Product) -> Self {
        let Product {
            lhs, rhs, output, ..
        } = product;
        let [m, k, n] = [lhs.rows, lhs.columns, rhs.columns];
        let along = |matrices: &Matrices, order| matrices.order == order;
        // Only sizes along which elements lie next to each other matter.
        let padded = |size: usize, lies: bool| match lies {
            true => size.next_multiple_of(STEP),
            false => size,
        };
        let [wide_m, wide_k, wide_n] = [
            padded(m, along(lhs, Order::Columns)),
            padded(k, along(lhs, Order::Rows) || along(rhs, Order::Columns)),
            padded(n, true),
        ];
        let wider = |matrices: &Matrices, rows, columns| {
            let copied = [matrices.rows, matrices.columns] != [rows, columns]
                || !matrices.leading.is_multiple_of(STEP);
            let wide = Matrices {
                rows,
                columns,
                leading: match matrices.order {
                    Order::Rows => columns,
                    Order::Columns => rows,
                }
                .next_multiple_of(STEP),
                ..*matrices
            };
            match copied {
                true => (wide, true),
                false => (*matrices, false),
            }
        };
        let (lhs, copies_lhs) = wider(lhs, wide_m, wide_k);
        let (rhs, copies_rhs) = wider(rhs, wide_k, wide_n);
        let (output, copies_output) = wider(output, wide_m, wide_n);
        Self {
            product: Product {
                lhs,
                rhs,
                output,
                alignment: 16,
                ..*product
            },
            lhs: copies_lhs,
            rhs: copies_rhs,
            output: copies_output,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cublaslt::repacked::Lines;
    use burn_cublaslt::Element;

    fn rows(rows: usize, columns: usize, leading: usize) -> Matrices {
        Matrices {
            leading,
            ..Matrices::by_rows(Element::BF16, rows, columns)
        }
    }

    fn columns(rows: usize, columns: usize, leading: usize) -> Matrices {
        Matrices {
            order: Order::Columns,
            leading,
            ..Matrices::by_rows(Element::BF16, rows, columns)
        }
    }

    fn product(lhs: Matrices, rhs: Matrices) -> Product {
        Product::new(lhs, rhs, rows(lhs.rows, rhs.columns, rhs.columns))
    }

    #[test]
    fn the_products_of_a_vocabulary_are_padded() {
        let vocabulary = 50_257;
        let of = |lhs, rhs| Padded::of(&product(lhs, rhs)).unwrap();
        let copies = |padded: &Padded| [padded.lhs, padded.rhs, padded.output];
        // Logits, from a weight [768, 50257].
        let weight = rows(768, vocabulary, vocabulary);
        let logits = of(rows(8192, 768, 768), weight);
        assert_eq!(copies(&logits), [false, true, true]);
        assert_eq!(
            logits.product.rhs,
            Matrices {
                stride: weight.stride,
                ..rows(768, 50_264, 50_264)
            }
        );
        assert_eq!(
            [logits.product.output.columns, logits.product.output.leading],
            [50_264; 2]
        );
        // The gradient of their input.
        let input = of(
            rows(8192, vocabulary, vocabulary),
            columns(vocabulary, 768, vocabulary),
        );
        assert_eq!(copies(&input), [true, true, false]);
        assert_eq!(
            [input.product.lhs.columns, input.product.rhs.rows],
            [50_264; 2]
        );
        // That of the weight.
        let gradient = of(columns(768, 8192, 768), rows(8192, vocabulary, vocabulary));
        assert_eq!(copies(&gradient), [false, true, true]);
        assert_eq!(
            [
                gradient.product.output.rows,
                gradient.product.output.columns
            ],
            [768, 50_264]
        );
    }

    #[test]
    fn others_are_not() {
        let padded = |lhs, rhs| Padded::of(&product(lhs, rhs));
        // All sizes fit.
        assert_eq!(
            padded(rows(8192, 768, 768), rows(768, 50_304, 50_304)),
            None
        );
        // Rows of any number, and an inner dimension along which nothing lies.
        assert_eq!(padded(rows(8191, 768, 768), rows(768, 3072, 3072)), None);
        assert_eq!(
            padded(columns(768, 8191, 768), rows(8191, 3072, 3072)),
            None
        );
        // Heads of attention over 197 patches, and a few classes.
        assert_eq!(padded(rows(197, 197, 197), rows(197, 64, 64)), None);
        assert_eq!(padded(rows(256, 768, 768), rows(768, 10, 10)), None);
        // However many rows there are, a vocabulary is.
        let logits = padded(rows(80_000, 768, 768), rows(768, 50_257, 50_257));
        assert_eq!(logits.unwrap().product.rhs.columns, 50_264);
        let several = Product {
            batches: 2,
            ..product(rows(8192, 768, 768), rows(768, 50_257, 50_257))
        };
        assert_eq!(Padded::of(&several), None);
    }

    /// The elements of a matrix as they lie, row by row.
    fn elements(matrix: &Matrices, memory: &[i64]) -> Vec<i64> {
        let at = |row: usize, column: usize| match matrix.order {
            Order::Rows => memory[row * matrix.leading + column],
            Order::Columns => memory[row + column * matrix.leading],
        };
        let all =
            (0..matrix.rows).flat_map(|row| (0..matrix.columns).map(move |column| (row, column)));
        all.map(|(row, column)| at(row, column)).collect()
    }

    fn multiplied(product: &Product, lhs: &[i64], rhs: &[i64]) -> Vec<i64> {
        let [m, k, n] = [product.lhs.rows, product.lhs.columns, product.rhs.columns];
        assert_eq!(
            [
                product.rhs.rows,
                product.output.rows,
                product.output.columns
            ],
            [k, m, n]
        );
        let (x, y) = (elements(&product.lhs, lhs), elements(&product.rhs, rhs));
        let mut output = vec![-1; m * product.output.leading];
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            output[i * product.output.leading + j] =
                (0..k).map(|l| x[i * k + l] * y[l * n + j]).sum();
        }
        output
    }

    /// What [`repacked`](super::super::repacked::repacked) does, line by line.
    fn copied(memory: &[i64], from: Lines, to: Lines) -> Vec<i64> {
        let mut all = vec![0; to.lines * to.leading];
        for line in 0..from.lines.min(to.lines) {
            for place in 0..from.length.min(to.length) {
                all[line * to.leading + place] = memory[line * from.leading + place];
            }
        }
        all
    }

    #[test]
    fn the_product_of_what_is_padded_is_the_product() {
        let orders: [fn(usize, usize) -> Matrices; 4] = [
            |m, n| rows(m, n, n),
            |m, n| columns(m, n, m),
            |m, n| rows(m, n, n + 3),
            |m, n| columns(m, n, m + 5),
        ];
        for [m, k, n] in [[3, 5, 9], [8, 16, 8], [9, 8, 7], [1, 13, 8]] {
            for (lhs, rhs) in orders
                .iter()
                .flat_map(|lhs| orders.map(|rhs| (lhs(m, k), rhs(k, n))))
            {
                let product = product(lhs, rhs);
                let memory = |matrix: &Matrices, step: usize| -> Vec<i64> {
                    let lines = Lines::of(matrix);
                    (0..lines.lines * lines.leading)
                        .map(|at| (at * step % 17) as i64 - 8)
                        .collect()
                };
                let (x, y) = (memory(&lhs, 5), memory(&rhs, 7));
                let padded = Padded::by_size(&product);
                let wide = &padded.product;
                let factor = |is_copied, memory: &[i64], [from, to]: [&Matrices; 2]| match is_copied
                {
                    true => copied(memory, Lines::of(from), Lines::of(to)),
                    false => memory.to_vec(),
                };
                let wide_x = factor(padded.lhs, &x, [&lhs, &wide.lhs]);
                let wide_y = factor(padded.rhs, &y, [&rhs, &wide.rhs]);
                let computed = multiplied(wide, &wide_x, &wide_y);
                let found = factor(padded.output, &computed, [&wide.output, &product.output]);
                assert_eq!(found[..m * n], multiplied(&product, &x, &y), "{product:?}");
                for matrix in [wide.lhs, wide.rhs, wide.output] {
                    assert!(matrix.leading.is_multiple_of(STEP), "{padded:?}");
                }
            }
        }
    }
}
