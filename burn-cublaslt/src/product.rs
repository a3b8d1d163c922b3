//! What is multiplied: [`Product`].

/// The element types of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    BF16,
    /// IEEE half precision.
    F16,
    /// 8 bits, 4 of exponent (OCP FP8).
    E4M3,
    /// 8 bits, 5 of exponent (OCP FP8).
    E5M2,
}

impl Element {
    /// The size of an element in bytes.
    ///
    /// ```
    /// assert_eq!(burn_cublaslt::Element::BF16.size(), 2);
    /// ```
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::E4M3 | Self::E5M2 => 1,
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

/// Products of matrices, sums and factors in f32: `output = lhs rhs`.
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
    /// Whether each side has a factor, one f32 on the device.
    pub scaled: bool,
    /// Whether a row of `n` elements of the output's type is added to each row of the output.
    pub bias: bool,
    /// Whether sums of fp8 products may be less precise.
    pub fast_sums: bool,
    /// Addresses of matrices are multiples of this, in bytes: a power of two, 16 at most.
    pub alignment: u32,
}
