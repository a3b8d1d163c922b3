//! What is multiplied: [`Product`].

/// The element types of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// fp8 with 4 bits of exponent and 3 of mantissa, without infinities.
    E4M3,
    /// fp8 with 5 bits of exponent and 2 of mantissa.
    E5M2,
    /// bfloat16.
    BF16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl Element {
    /// The size of an element in bytes.
    ///
    /// ```
    /// assert_eq!(burn_cublaslt::Element::BF16.size(), 2);
    /// ```
    pub fn size(self) -> usize {
        match self {
            Self::E4M3 | Self::E5M2 => 1,
            Self::BF16 | Self::F16 => 2,
            Self::F32 => 4,
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

/// Products of matrices, with sums in f32: `output = lhs rhs`, times the factors of both sides, plus a bias, if there are any.
///
/// cuBLASLt takes fp8 only as "TN": a left side by rows and a right side by columns, of which one at least is [`Element::E4M3`],
/// at addresses, distances and inner dimensions that are multiples of 16.
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
    /// Addresses of matrices and of the bias are multiples of this, in bytes: a power of two, 16 at most.
    pub alignment: u32,
    /// Whether both sides are fp8 with a factor each, an f32 by which the product is multiplied: `CUBLASLT_MATMUL_DESC_A_SCALE_POINTER`
    /// and that of B.
    pub factors: bool,
    /// Whether a bias of `n` elements, of the output's type, is added to each row before it is rounded: `CUBLASLT_EPILOGUE_BIAS`. Not
    /// if the output is in f32 and the sides in fp8.
    pub bias: bool,
    /// Whether sums of fp8 may keep fewer bits than f32 has: `CUBLASLT_MATMUL_DESC_FAST_ACCUM`.
    pub fast_accumulation: bool,
}

impl Product {
    /// The product of two matrices, at addresses that are multiples of 16, without factors and a bias.
    ///
    /// ```
    /// use burn_cublaslt::{Element, Matrices, Product};
    ///
    /// let [x, y, z] = [[2, 3], [3, 4], [2, 4]].map(|[m, n]| Matrices::by_rows(Element::BF16, m, n));
    /// let with_bias = Product { bias: true, ..Product::new(x, y, z) };
    /// assert_eq!([with_bias.batches, with_bias.alignment as usize], [1, 16]);
    /// ```
    pub fn new(lhs: Matrices, rhs: Matrices, output: Matrices) -> Self {
        Self {
            lhs,
            rhs,
            output,
            batches: 1,
            alignment: 16,
            factors: false,
            bias: false,
            fast_accumulation: false,
        }
    }
}
