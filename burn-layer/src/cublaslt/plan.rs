//! How the product of two tensors is given to cuBLASLt: as products of matrices at equal distances, once or several times.

use burn_cublaslt::{Element, Matrices, Order, Product};
use std::cmp::Reverse;

/// The most times that the library is called for one product of tensors, unless copies of both would not make it fewer. With more,
/// copying costs less.
const LAUNCHES: usize = 16;

/// How a tensor lies in memory.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

/// A product for the library.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) product: Product,
    /// In bytes, from where both factors and the output begin, for each call.
    pub(super) offsets: Vec<[u64; 3]>,
    /// How the output lies, without gaps.
    pub(super) output: View,
}

/// A dimension of a batch, with the distances between the matrices of both factors and the output.
#[derive(Clone, Copy, Debug)]
struct Batch {
    size: usize,
    strides: [usize; 3],
}

impl Batch {
    /// Whether this, outside of `inner`, makes one dimension with it.
    fn continues(&self, inner: &Self) -> bool {
        let both = self.strides.iter().zip(inner.strides);
        both.into_iter()
            .all(|(outer, stride)| *outer == inner.size * stride)
    }
}

/// The product of `x` and `y`, or which of them must be copied first, without gaps. `None` if there is nothing to multiply. If they
/// are `copied`, the library may be called more often.
pub(super) fn plan(
    x: &View,
    y: &View,
    element: Element,
    copied: bool,
) -> Option<Result<Plan, [bool; 2]>> {
    let row = x.shape.len().checked_sub(2)?;
    let (m, k, n) = (x.shape[row], x.shape[row + 1], y.shape[row + 1]);
    if m * k * n == 0 {
        return None;
    }
    let sides = [x, y].map(|side| matrices(side, element));
    let [Some(mut lhs), Some(rhs)] = sides else {
        return Some(Err(sides.map(|side| side.is_none())));
    };

    let batch = (0..row).map(|dim| match x.shape[dim] {
        1 => y.shape[dim],
        size => size,
    });
    let shape: Vec<_> = batch.chain([m, n]).collect();
    if shape.contains(&0) {
        return None;
    }
    let lies = View::like(y, shape);
    let mut output = Matrices {
        leading: lies.strides[row],
        ..Matrices::by_rows(element, m, n)
    };
    // From the last dimension of the batch to the first.
    let mut batches: Vec<Batch> = Vec::new();
    for dim in (0..row).rev() {
        let size = lies.shape[dim];
        let stride = |side: &View| match side.shape[dim] {
            1 => 0,
            _ => side.strides[dim],
        };
        let batch = Batch {
            size,
            strides: [stride(x), stride(y), lies.strides[dim]],
        };
        match batches.last_mut() {
            _ if size == 1 => {}
            Some(inner) if batch.continues(inner) => inner.size *= size,
            _ => batches.push(batch),
        }
    }
    // Matrices one below the other are one matrix, if all are multiplied by the same.
    let below = |batch: &Batch, lhs: &Matrices| {
        lhs.order == Order::Rows
            && batch.strides[0] == lhs.rows * lhs.leading
            && batch.strides[1] == 0
    };
    while let Some(batch) = batches.first().copied().filter(|batch| below(batch, &lhs)) {
        lhs.rows *= batch.size;
        output.rows *= batch.size;
        batches.remove(0);
    }

    let largest = (0..batches.len()).max_by_key(|&dim| batches[dim].size);
    let inner = largest.map(|dim| batches.remove(dim));
    if !copied && batches.iter().map(|batch| batch.size).product::<usize>() > LAUNCHES {
        return Some(Err([true; 2]));
    }
    let mut starts = vec![[0; 3]];
    for batch in batches {
        let next = |start: &[usize; 3]| {
            let start = *start;
            (0..batch.size)
                .map(move |index| [0, 1, 2].map(|side| start[side] + index * batch.strides[side]))
        };
        starts = starts.iter().flat_map(next).collect();
    }
    let bytes = |elements: usize| (elements * element.size()) as u64;
    let offsets: Vec<[u64; 3]> = starts.into_iter().map(|start| start.map(bytes)).collect();
    let strides = inner.map_or([0; 3], |inner| inner.strides);
    // Whatever the distances are multiples of.
    let distances = strides
        .map(bytes)
        .into_iter()
        .chain(offsets.iter().flatten().copied());
    let alignment = 1 << distances.map(u64::trailing_zeros).min().unwrap_or(4).min(4);
    let [lhs, rhs, output] = [(lhs, 0), (rhs, 1), (output, 2)].map(|(matrices, side)| Matrices {
        stride: strides[side],
        ..matrices
    });
    let product = Product {
        batches: inner.map_or(1, |inner| inner.size),
        alignment,
        ..Product::new(lhs, rhs, output)
    };
    Some(Ok(Plan {
        product,
        offsets,
        output: lies,
    }))
}

impl View {
    /// An output of that shape, without gaps. If the right factor `y` is [interleaved](Self::is_interleaved), the output is too.
    fn like(y: &Self, shape: Vec<usize>) -> Self {
        let mut order: Vec<usize> = (0..shape.len()).collect();
        if y.is_interleaved(&shape) {
            order = y.order();
        }
        let mut strides = vec![0; shape.len()];
        let mut distance = 1;
        for dim in order.into_iter().rev() {
            strides[dim] = distance;
            distance *= shape[dim];
        }
        Self { shape, strides }
    }

    /// Whether the rows of this batch of matrices lie in between those of others, and the batch is as large as that of `output`. So do those
    /// of attention's heads, of which a linear layer computes all for one position at once. What is computed of them is for
    /// such a layer again: it takes the rows of an output that lies in the same way as they are.
    pub(super) fn is_interleaved(&self, output: &[usize]) -> bool {
        let row = self.shape.len() - 2;
        let by_rows = self.shape[row] > 1 && self.strides[row + 1] == 1;
        let repeats = (0..=row).any(|dim| self.strides[dim] == 0);
        let between = |dim: usize| self.shape[dim] > 1 && self.strides[dim] < self.strides[row];
        by_rows && !repeats && self.shape[..row] == output[..row] && (0..row).any(between)
    }

    /// The dimensions as they lie, the last one innermost. Where one of size 1 lies makes no difference.
    fn order(&self) -> Vec<usize> {
        let last = self.shape.len() - 1;
        let mut order: Vec<usize> = (0..=last).collect();
        order[..last].sort_by_key(|&dim| Reverse(self.strides[dim]));
        order
    }

    /// The transpositions of all matrices.
    pub(super) fn turned(&self) -> Self {
        let mut turned = self.clone();
        let last = turned.shape.len() - 1;
        turned.shape.swap(last - 1, last);
        turned.strides.swap(last - 1, last);
        turned
    }

    /// All rows of a batch as one matrix, if they are at equal distances.
    pub(super) fn rows(&self) -> Option<Self> {
        let row = self.shape.len().checked_sub(2)?;
        let (mut rows, down) = (self.shape[row], self.strides[row]);
        // Of one row it does not matter where the next would be.
        let mut down = (rows > 1).then_some(down);
        for dim in (0..row).rev().filter(|&dim| self.shape[dim] != 1) {
            let stride = self.strides[dim];
            match down {
                Some(down) if stride != rows * down => return None,
                Some(_) => {}
                None => down = Some(stride),
            }
            rows *= self.shape[dim];
        }
        let columns = self.shape[row + 1];
        Some(Self {
            shape: vec![rows, columns],
            strides: vec![down.unwrap_or(columns), self.strides[row + 1]],
        })
    }
}

/// The matrices of a tensor, if the library takes them as they lie.
fn matrices(tensor: &View, element: Element) -> Option<Matrices> {
    let row = tensor.shape.len() - 2;
    let [rows, columns] = [tensor.shape[row], tensor.shape[row + 1]];
    let [down, along] = [tensor.strides[row], tensor.strides[row + 1]];
    // Of one row or column it does not matter where the next would be.
    let lies = |next: usize, inner: usize, leading: usize, outer: usize| {
        (next == 1 || inner == 1) && (leading >= inner || outer == 1)
    };
    let leading = |leading: usize, inner: usize, outer: usize| match outer {
        1 => inner,
        _ => leading,
    };
    let (order, leading) = if lies(along, columns, down, rows) {
        (Order::Rows, leading(down, columns, rows))
    } else if lies(down, rows, along, columns) {
        (Order::Columns, leading(along, rows, columns))
    } else {
        return None;
    };
    Some(Matrices {
        element,
        rows,
        columns,
        order,
        leading,
        stride: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shapes of a batch's dimensions, and the order of the dimensions in memory, outermost first.
    struct Case {
        x: (Vec<usize>, Vec<usize>),
        y: (Vec<usize>, Vec<usize>),
        calls: usize,
        batches: usize,
        rows: usize,
    }

    fn view((shape, order): &(Vec<usize>, Vec<usize>)) -> View {
        let mut strides = vec![0; shape.len()];
        let mut size = 1;
        for &dim in order.iter().rev() {
            strides[dim] = size;
            size *= shape[dim];
        }
        View {
            shape: shape.clone(),
            strides,
        }
    }

    fn memory(view: &View) -> Vec<f64> {
        let size: usize = view.shape.iter().product();
        (0..size)
            .map(|index| (index * 7 % 11) as f64 - 5.0)
            .collect()
    }

    /// The element of a matrix of a batch, by broadcasting.
    fn element(view: &View, memory: &[f64], batch: &[usize], row: usize, column: usize) -> f64 {
        let index = batch.iter().copied().chain([row, column]);
        let at = index.zip(&view.shape).zip(&view.strides);
        memory[at
            .map(|((index, size), stride)| (index % size) * stride)
            .sum::<usize>()]
    }

    /// The product by its definition, one element after the other.
    fn by_definition(x: &View, y: &View) -> Vec<f64> {
        let row = x.shape.len() - 2;
        let batch: Vec<usize> = (0..row).map(|dim| x.shape[dim].max(y.shape[dim])).collect();
        let (m, k, n) = (x.shape[row], x.shape[row + 1], y.shape[row + 1]);
        let (xs, ys) = (memory(x), memory(y));
        let mut all = Vec::new();
        for matrix in 0..batch.iter().product() {
            let mut rest = matrix;
            let mut index = vec![0; row];
            for dim in (0..row).rev() {
                index[dim] = rest % batch[dim];
                rest /= batch[dim];
            }
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let terms =
                    (0..k).map(|l| element(x, &xs, &index, i, l) * element(y, &ys, &index, l, j));
                all.push(terms.sum());
            }
        }
        all
    }

    /// What cuBLASLt computes, by its documentation, of matrices that lie by columns: `D = op(A) op(B)`, with our right side as A and
    /// our left side as B.
    fn by_documentation(plan: &Plan, x: &View, y: &View) -> Vec<f64> {
        let Product {
            lhs,
            rhs,
            output,
            batches,
            ..
        } = plan.product;
        let (xs, ys) = (memory(x), memory(y));
        let mut all = vec![f64::NAN; plan.output.shape.iter().product()];
        let op = |matrices: &Matrices, memory: &[f64], start: usize, row: usize, column: usize| {
            match matrices.order {
                // `CUBLAS_OP_N`, of the transpose.
                Order::Rows => memory[start + column + row * matrices.leading],
                Order::Columns => memory[start + row + column * matrices.leading],
            }
        };
        for [a, b, d] in &plan.offsets {
            for batch in 0..batches {
                let start = |offset: u64, matrices: &Matrices| {
                    offset as usize / 2 + batch * matrices.stride
                };
                for (i, j) in
                    (0..output.rows).flat_map(|i| (0..output.columns).map(move |j| (i, j)))
                {
                    let terms = (0..lhs.columns).map(|l| {
                        op(&lhs, &xs, start(*a, &lhs), i, l) * op(&rhs, &ys, start(*b, &rhs), l, j)
                    });
                    all[start(*d, &output) + i * output.leading + j] = terms.sum();
                }
            }
        }
        let View { shape, strides } = &plan.output;
        let elements = (0..all.len()).map(|mut rest| {
            let mut place = 0;
            for (size, stride) in shape.iter().zip(strides).rev() {
                place += rest % size * stride;
                rest /= size;
            }
            all[place]
        });
        elements.collect()
    }

    #[test]
    fn what_the_library_computes_is_the_product() {
        let plain = |shape: &[usize]| (shape.to_vec(), (0..shape.len()).collect::<Vec<_>>());
        let lies = |shape: &[usize], order: &[usize]| (shape.to_vec(), order.to_vec());
        let case = |x, y, calls, batches, rows| Case {
            x,
            y,
            calls,
            batches,
            rows,
        };
        for Case {
            x,
            y,
            calls,
            batches,
            rows,
        } in [
            case(plain(&[3, 4]), plain(&[4, 5]), 1, 1, 3),
            case(lies(&[3, 4], &[1, 0]), lies(&[4, 5], &[1, 0]), 1, 1, 3),
            // A linear layer, and its weight as a view: all rows are multiplied at once.
            case(plain(&[2, 3, 4]), plain(&[1, 4, 5]), 1, 1, 6),
            case(plain(&[2, 3, 4]), lies(&[1, 4, 5], &[0, 2, 1]), 1, 1, 6),
            case(plain(&[2, 2, 1, 4]), plain(&[1, 1, 4, 5]), 1, 1, 4),
            // Rows that do not follow each other.
            case(lies(&[2, 3, 4], &[1, 0, 2]), plain(&[1, 4, 5]), 1, 2, 3),
            // Batches, and attention's heads, of which the larger number is computed at once.
            case(plain(&[2, 3, 2, 4]), plain(&[2, 3, 4, 5]), 1, 6, 2),
            case(
                lies(&[2, 3, 5, 4], &[0, 2, 1, 3]),
                lies(&[2, 3, 4, 5], &[0, 3, 1, 2]),
                2,
                3,
                5,
            ),
            case(
                lies(&[4, 3, 5, 4], &[0, 2, 1, 3]),
                lies(&[4, 3, 4, 5], &[0, 3, 1, 2]),
                3,
                4,
                5,
            ),
            // Values of attention, in a batch of which the heads or the texts are more.
            case(
                plain(&[2, 3, 5, 4]),
                lies(&[2, 3, 4, 8], &[0, 2, 1, 3]),
                2,
                3,
                5,
            ),
            case(
                plain(&[4, 3, 5, 4]),
                lies(&[4, 3, 4, 8], &[0, 2, 1, 3]),
                3,
                4,
                5,
            ),
            // Broadcasting.
            case(plain(&[1, 3, 4]), plain(&[6, 4, 5]), 1, 6, 3),
            case(plain(&[2, 1, 3, 4]), plain(&[1, 3, 4, 5]), 2, 3, 3),
            // Rows and columns of one.
            case(plain(&[2, 1, 4]), plain(&[2, 4, 1]), 1, 2, 1),
            case(lies(&[1, 4], &[1, 0]), lies(&[4, 1], &[1, 0]), 1, 1, 1),
            case(plain(&[3, 1]), plain(&[1, 5]), 1, 1, 3),
        ] {
            let (x, y) = (view(&x), view(&y));
            let found = plan(&x, &y, Element::BF16, false).unwrap().unwrap();
            let expected = by_definition(&x, &y);
            let name = format!("{x:?} by {y:?}: {found:?}");
            assert_eq!(by_documentation(&found, &x, &y), expected, "{name}");
            assert_eq!(found.offsets.len(), calls, "{name}");
            assert_eq!(
                [found.product.batches, found.product.lhs.rows],
                [batches, rows],
                "{name}"
            );
        }
    }

    /// As attention's values do: the rows of all heads, for each position, next to each other. Otherwise without regard to the factors.
    #[test]
    fn the_output_lies_as_the_rows_of_the_right_factor() {
        let strides = |x: (&[usize], &[usize]), y: (&[usize], &[usize])| {
            let [x, y] = [x, y].map(|(shape, order)| view(&(shape.to_vec(), order.to_vec())));
            let found = plan(&x, &y, Element::BF16, false).unwrap().unwrap();
            found.output.strides
        };
        let plain: &[usize] = &[0, 1, 2, 3];
        // Weights of 5 positions by 4, and values of 3 heads, of 8 each.
        let (weights, values): (&[usize], &[usize]) = (&[2, 3, 5, 4], &[2, 3, 4, 8]);
        let (heads, turned): (&[usize], &[usize]) = (&[0, 2, 1, 3], &[0, 3, 1, 2]);
        assert_eq!(strides((weights, plain), (values, heads)), [120, 8, 24, 1]);
        assert_eq!(strides((weights, turned), (values, heads)), [120, 8, 24, 1]);
        assert_eq!(strides((weights, plain), (values, plain)), [120, 40, 8, 1]);
        // Scores, of queries and keys.
        let (queries, keys): (&[usize], &[usize]) = (&[2, 3, 5, 8], &[2, 3, 8, 4]);
        assert_eq!(strides((queries, heads), (keys, turned)), [60, 20, 4, 1]);
        // By values that all heads share, and by heads that lie one after the other, before the texts.
        let shared: &[usize] = &[2, 1, 4, 8];
        assert_eq!(strides((weights, plain), (shared, heads)), [120, 40, 8, 1]);
        let (before, outer): (&[usize], &[usize]) = (&[1, 0, 2, 3], &[3, 5, 4, 8]);
        let others: &[usize] = &[3, 5, 6, 4];
        assert_eq!(strides((others, plain), (outer, before)), [240, 48, 8, 1]);
    }

    #[test]
    fn transpositions_are_views_of_the_same_memory() {
        let it = view(&(vec![2, 3, 4, 8], vec![0, 2, 1, 3]));
        let turned = it.turned();
        assert_eq!(turned.shape, [2, 3, 8, 4]);
        for (row, column) in (0..4).flat_map(|row| (0..8).map(move |column| (row, column))) {
            let memory = memory(&it);
            let own = element(&it, &memory, &[1, 2], row, column);
            assert_eq!(element(&turned, &memory, &[1, 2], column, row), own);
        }
        assert!(it.is_interleaved(&[2, 3, 5, 8]) && !turned.is_interleaved(&[2, 3, 5, 4]));
        assert!(!it.is_interleaved(&[1, 3, 5, 8]));
    }

    #[test]
    fn rows_at_equal_distances_are_a_matrix() {
        let rows = |shape: &[usize], strides: &[usize]| {
            let (shape, strides) = (shape.to_vec(), strides.to_vec());
            let rows = View { shape, strides }.rows()?;
            Some((rows.shape, rows.strides))
        };
        let matrix =
            |rows, columns, strides: [usize; 2]| Some((vec![rows, columns], strides.into()));
        assert_eq!(rows(&[2, 3, 4], &[12, 4, 1]), matrix(6, 4, [4, 1]));
        // With gaps, of which all are alike, or not.
        assert_eq!(rows(&[2, 3, 4], &[24, 8, 1]), matrix(6, 4, [8, 1]));
        assert_eq!(rows(&[2, 3, 4], &[32, 8, 1]), None);
        assert_eq!(rows(&[2, 3, 4], &[4, 8, 1]), None);
        // Dimensions of one.
        assert_eq!(rows(&[1, 3, 1, 4], &[7, 8, 99, 1]), matrix(3, 4, [8, 1]));
        assert_eq!(rows(&[1, 1, 4], &[5, 6, 1]), matrix(1, 4, [4, 1]));
        // None at all.
        assert_eq!(rows(&[0, 3, 4], &[12, 4, 1]), matrix(0, 4, [4, 1]));
        // By columns.
        assert_eq!(rows(&[2, 3, 4], &[3, 1, 6]), matrix(6, 4, [1, 6]));
        assert_eq!(rows(&[4], &[1]), None);
    }

    #[test]
    fn what_does_not_lie_by_rows_or_columns_is_copied() {
        let plain = |shape: &[usize]| view(&(shape.to_vec(), (0..shape.len()).collect()));
        let strided = View {
            shape: vec![3, 4],
            strides: vec![8, 2],
        };
        let copied = plan(&strided, &plain(&[4, 5]), Element::F16, false).unwrap();
        assert_eq!(copied.unwrap_err(), [true, false]);
        // The same row again.
        let again = View {
            shape: vec![4, 5],
            strides: vec![0, 1],
        };
        let copied = plan(&plain(&[3, 4]), &again, Element::F16, false).unwrap();
        assert_eq!(copied.unwrap_err(), [false, true]);
        // 20 times 20 matrices that have no common distance.
        let heads = view(&(vec![20, 20, 3, 4], vec![0, 2, 1, 3]));
        let copied = plan(&heads, &plain(&[20, 20, 4, 5]), Element::F16, false).unwrap();
        assert_eq!(copied.unwrap_err(), [true; 2]);
        let found = plan(&heads, &plain(&[20, 20, 4, 5]), Element::F16, true);
        assert_eq!(found.unwrap().unwrap().offsets.len(), 20);
    }

    #[test]
    fn there_may_be_nothing_to_multiply() {
        let plain = |shape: &[usize]| view(&(shape.to_vec(), (0..shape.len()).collect()));
        for (x, y) in [
            (vec![0, 4], vec![4, 5]),
            (vec![3, 0], vec![0, 5]),
            (vec![0, 3, 4], vec![0, 4, 5]),
            (vec![0, 3, 4], vec![1, 4, 5]),
            (vec![1, 3, 4], vec![0, 4, 5]),
            (vec![4], vec![4]),
        ] {
            assert!(plan(&plain(&x), &plain(&y), Element::F16, false).is_none());
        }
    }

    #[test]
    fn addresses_are_as_aligned_as_distances_are() {
        for (columns, alignment) in [(8, 16), (12, 8), (2, 4), (3, 2)] {
            let x = view(&(vec![2, 1, columns], vec![0, 1, 2]));
            let y = view(&(vec![2, columns, 16], vec![0, 1, 2]));
            let found = plan(&x, &y, Element::BF16, false).unwrap().unwrap();
            assert_eq!(found.product.alignment, alignment);
        }
    }
}
