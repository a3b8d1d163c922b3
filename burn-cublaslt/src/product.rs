//! What is multiplied: [`Product`].

/// The element types of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// bfloat16.
    BF16,
    /// IEEE half precision.
    F16,
}

impl Element {
    /// The size of an element in bytes.
    ///
    /// ```
    /// assert_eq!(burn_cublaslt::Element::BF16.size(), 2);
    /// ```
    pub fn size(self) -> usize {
        match self {
            Self::BF16 | Self::F16 => 2,
        }
    }
}

/// Which elements of a matrix lie next to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Those of a row.
    Rows,
    /// Those of a column.
    Columns,
}

/// The matrices of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrices {
    /// The type of their elements.
    pub element: Element,
    /// The rows of each.
    pub rows: usize,
    /// The columns of each.
    pub columns: usize,
    /// Which of their elements lie next to each other.
    pub order: Order,
    /// From one row (or column, by the order) to the next, in elements. Not less than a row (or column) has.
    pub leading: usize,
    /// From one matrix to the next, in elements; 0 for one matrix that is taken again and again.
    pub stride: usize,
}

impl Matrices {
    /// Matrices without gaps, one after the other, by rows.
    ///
    /// ```
    /// use burn_cublaslt::{Element, Matrices};
    ///
    /// let matrices = Matrices::by_rows(Element::F16, 2, 3);
    /// assert_eq!([matrices.leading, matrices.stride], [3, 6]);
    /// ```
    pub fn by_rows(element: Element, rows: usize, columns: usize) -> Self {
        Self {
            element,
            rows,
            columns,
            order: Order::Rows,
            leading: columns,
            stride: rows * columns,
        }
    }
}

impl Matrices {
    /// The bytes up to the end of the last of so many.
    #[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
    pub(crate) fn bytes(&self, batches: usize) -> u64 {
        let (outer, inner) = match self.order {
            Order::Rows => (self.rows, self.columns),
            Order::Columns => (self.columns, self.rows),
        };
        let before = batches.saturating_sub(1) * self.stride;
        let elements = before + outer.saturating_sub(1) * self.leading + inner;
        (elements * self.element.size()) as u64
    }
}

/// Products of matrices, with sums in f32: `output = lhs rhs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// `[m, k]`.
    pub lhs: Matrices,
    /// `[k, n]`.
    pub rhs: Matrices,
    /// `[m, n]`, by rows.
    pub output: Matrices,
    /// The number of products.
    pub batches: usize,
    /// Addresses of matrices are multiples of this, in bytes: a power of two, 16 at most.
    pub alignment: u32,
}
