//! How a product is given to cuBLASLt, and which products cannot be.
//!
//! cuBLASLt stores matrices by columns, and takes fp8 only as "TN": both operands with the inner dimension contiguous. So it is
//! asked for the product's transpose, `Dᵀ = Bᵀ Aᵀ`. Its first operand is our right side, with the elements of a column next to
//! each other. Its second is our left side, with the elements of a row next to each other. Its result by columns is our result by
//! rows.
//!
//! The inner dimension and our columns must be multiples of 16. Where they are not, operands are copied with zeros, or with more
//! columns, up to the next multiple, and the product has columns that are not shown.

use burn::tensor::FloatDType;
use burn_cublaslt::{Element, Matrices, Order};

use super::{ALIGNMENT, is_padded};
use crate::{Fp8Format, MatmulSpec};

/// A matrix of codes in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

/// Where cuBLASLt finds an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// In place, with the vectors along the inner dimension `leading` codes apart.
    AsIs {
        /// The leading dimension.
        leading: usize,
    },
    /// In a copy with the inner dimension contiguous, padded to the plan's sizes.
    Copied,
}

impl Source {
    /// The leading dimension, for an inner dimension of `k`.
    pub(super) fn leading(self, k: usize) -> usize {
        match self {
            Self::AsIs { leading } => leading,
            Self::Copied => k,
        }
    }
}

/// When the bias is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BiasPlan {
    None,
    /// By cuBLASLt, before the product is rounded.
    Epilogue,
    /// To the finished product, because cuBLASLt has no f32 bias.
    Afterwards,
}

/// A product for cuBLASLt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Rows of the product.
    pub(super) m: usize,
    /// Columns of the product, padded to a multiple of 16.
    pub(super) n: usize,
    /// The inner dimension, padded to a multiple of 16.
    pub(super) k: usize,
    pub(super) lhs: Source,
    pub(super) rhs: Source,
    /// See [`MatmulSpec::fast_accumulation`].
    pub(super) fast: bool,
    pub(super) bias: BiasPlan,
}

impl Plan {
    /// The product, as the library is asked for it.
    pub(super) fn product(&self, spec: MatmulSpec) -> burn_cublaslt::Product {
        let output = match spec.output {
            FloatDType::BF16 => Element::BF16,
            FloatDType::F16 => Element::F16,
            _ => Element::F32,
        };
        let lhs = Matrices {
            leading: self.lhs.leading(self.k),
            ..Matrices::by_rows(code(spec.lhs), self.m, self.k)
        };
        let rhs = Matrices {
            order: Order::Columns,
            leading: self.rhs.leading(self.k),
            ..Matrices::by_rows(code(spec.rhs), self.k, self.n)
        };
        burn_cublaslt::Product {
            alignment: ALIGNMENT as u32,
            factors: true,
            bias: self.bias == BiasPlan::Epilogue,
            fast_accumulation: self.fast,
            ..burn_cublaslt::Product::new(lhs, rhs, Matrices::by_rows(output, self.m, self.n))
        }
    }
}

fn code(format: Fp8Format) -> Element {
    match format {
        Fp8Format::E4M3 => Element::E4M3,
        Fp8Format::E5M2 => Element::E5M2,
    }
}

/// How the product of `lhs` (`[m, k]`) and `rhs` (`[k, n]`) is given to cuBLASLt, or why it cannot be.
pub(super) fn plan(
    lhs: Matrix,
    rhs: Matrix,
    spec: MatmulSpec,
    has_bias: bool,
) -> Result<Plan, &'static str> {
    if spec.lhs == Fp8Format::E5M2 && spec.rhs == Fp8Format::E5M2 {
        return Err("both operands are E5M2");
    }
    let bias = match (spec.output, has_bias) {
        (FloatDType::F32 | FloatDType::BF16 | FloatDType::F16, false) => BiasPlan::None,
        (FloatDType::BF16 | FloatDType::F16, true) => BiasPlan::Epilogue,
        (FloatDType::F32, true) => BiasPlan::Afterwards,
        _ => return Err("there is no such output"),
    };
    let (m, n, k) = (lhs.rows, rhs.columns, lhs.columns);
    if m * n * k == 0 {
        return Err("no elements or no terms");
    }
    let in_place = |inner: usize, outer: usize| {
        inner == 1 && outer >= k && outer.is_multiple_of(ALIGNMENT) && !is_padded(k)
    };
    let source = |in_place, leading| match in_place {
        true => Source::AsIs { leading },
        false => Source::Copied,
    };
    Ok(Plan {
        m,
        n: n.next_multiple_of(ALIGNMENT),
        k: k.next_multiple_of(ALIGNMENT),
        lhs: source(in_place(lhs.column_stride, lhs.row_stride), lhs.row_stride),
        rhs: source(
            in_place(rhs.row_stride, rhs.column_stride) && !is_padded(n),
            rhs.column_stride,
        ),
        fast: spec.fast_accumulation,
        bias,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use Fp8Format::{E4M3, E5M2};

    fn spec(lhs: Fp8Format, rhs: Fp8Format, output: FloatDType) -> MatmulSpec {
        MatmulSpec::new(lhs, rhs, output)
    }

    /// A matrix by rows without gaps.
    fn by_rows(rows: usize, columns: usize) -> Matrix {
        Matrix {
            rows,
            columns,
            row_stride: columns,
            column_stride: 1,
        }
    }

    /// The transpose of a matrix by rows without gaps.
    fn by_columns(rows: usize, columns: usize) -> Matrix {
        Matrix {
            rows,
            columns,
            row_stride: 1,
            column_stride: rows,
        }
    }

    #[test]
    fn operands_are_copied_unless_the_inner_dimension_is_contiguous() {
        let forward = spec(E4M3, E4M3, FloatDType::BF16);
        // x W of a linear layer, with W as [d_input, d_output]: W has to be transposed.
        let x_w = plan(by_rows(32, 48), by_rows(48, 64), forward, false).unwrap();
        assert_eq!((x_w.m, x_w.n, x_w.k), (32, 64, 48));
        assert_eq!(
            (x_w.lhs, x_w.rhs),
            (Source::AsIs { leading: 48 }, Source::Copied)
        );
        assert_eq!((x_w.lhs.leading(48), x_w.rhs.leading(48)), (48, 48));
        // dy Wᵀ: W in place.
        let dy_wt = plan(by_rows(32, 64), by_columns(64, 48), forward, false).unwrap();
        assert_eq!(
            (dy_wt.lhs, dy_wt.rhs),
            (Source::AsIs { leading: 64 }, Source::AsIs { leading: 64 })
        );
        // xᵀ dy: both have to be transposed.
        let xt_dy = plan(by_columns(48, 32), by_rows(32, 64), forward, false).unwrap();
        assert_eq!((xt_dy.lhs, xt_dy.rhs), (Source::Copied, Source::Copied));
    }

    #[test]
    fn gaps_between_rows_do_where_they_are_aligned() {
        let gap = |row_stride| Matrix {
            row_stride,
            ..by_rows(16, 32)
        };
        let forward = spec(E4M3, E4M3, FloatDType::F16);
        let lhs = |stride| {
            plan(gap(stride), by_rows(32, 16), forward, false)
                .unwrap()
                .lhs
        };
        assert_eq!(lhs(64), Source::AsIs { leading: 64 });
        assert_eq!(lhs(40), Source::Copied);
        // One row for all rows: broadcast.
        assert_eq!(lhs(0), Source::Copied);
    }

    #[test]
    fn operands_are_padded_where_sizes_are_no_multiples_of_16() {
        const AS_IS: Source = Source::AsIs { leading: 48 };
        let forward = spec(E4M3, E4M3, FloatDType::BF16);
        // Rows in memory that lie 48 codes apart, of which `k` are multiplied.
        let planned = |m, k, n| {
            let lhs = Matrix {
                row_stride: 48,
                ..by_rows(m, k)
            };
            let rhs = Matrix {
                column_stride: 48,
                ..by_columns(k, n)
            };
            plan(lhs, rhs, forward, false).unwrap()
        };
        for (m, k, n, padded, sources) in [
            (7, 48, 32, [48, 32], [AS_IS, AS_IS]),
            (7, 48, 33, [48, 48], [AS_IS, Source::Copied]),
            (7, 47, 32, [48, 32], [Source::Copied, Source::Copied]),
            (7, 1, 1, [16, 16], [Source::Copied, Source::Copied]),
        ] {
            let plan = planned(m, k, n);
            assert_eq!(plan.m, m);
            assert_eq!([plan.k, plan.n], padded);
            assert_eq!([plan.lhs, plan.rhs], sources);
        }
    }

    #[test]
    fn what_the_hardware_does_not_have_is_refused() {
        let small = || (by_rows(16, 32), by_rows(32, 16));
        for (lhs, rhs) in [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)] {
            let (a, b) = small();
            let result = plan(a, b, spec(lhs, rhs, FloatDType::F32), false);
            match (lhs, rhs) {
                (E5M2, E5M2) => assert_eq!(result, Err("both operands are E5M2")),
                _ => assert!(result.is_ok()),
            }
        }
        let forward = spec(E4M3, E4M3, FloatDType::F32);
        for (m, k, n) in [(0, 32, 16), (16, 0, 16), (16, 32, 0)] {
            let result = plan(by_rows(m, k), by_rows(k, n), forward, false);
            assert_eq!(result, Err("no elements or no terms"));
        }
        let (a, b) = small();
        let double = plan(a, b, spec(E4M3, E4M3, FloatDType::F64), false);
        assert_eq!(double, Err("there is no such output"));
    }

    /// Gradients may be E4M3 too, so the formats do not say which product it is.
    #[test]
    fn sums_are_fast_where_the_product_says_so() {
        for formats in [(E4M3, E4M3), (E4M3, E5M2)] {
            for fast in [false, true] {
                let spec = spec(formats.0, formats.1, FloatDType::BF16);
                let spec = spec.with_fast_accumulation(fast);
                let plan = plan(by_rows(16, 32), by_rows(32, 16), spec, false).unwrap();
                assert_eq!(plan.fast, fast);
            }
        }
    }

    #[test]
    fn only_16_bit_products_take_a_bias_along() {
        for (output, expected) in [
            (FloatDType::BF16, BiasPlan::Epilogue),
            (FloatDType::F16, BiasPlan::Epilogue),
            (FloatDType::F32, BiasPlan::Afterwards),
        ] {
            let bias = |has_bias| {
                let spec = spec(E4M3, E4M3, output);
                plan(by_rows(16, 16), by_rows(16, 16), spec, has_bias)
                    .unwrap()
                    .bias
            };
            assert_eq!((bias(false), bias(true)), (BiasPlan::None, expected));
        }
    }
}
