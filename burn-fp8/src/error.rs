//! What can go wrong, and how to fix it.

use crate::{Fp8Format, Granularity};

/// An error of an fp8 operation.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Fp8Error {
    /// A scale that cannot be used: zero, negative, infinite or NaN.
    #[error(
        "the scale is {scale}, but a scale and its inverse must be positive and finite: compute one with `Fp8Format::scale_for(amax)`"
    )]
    InvalidScale {
        /// The scale as given.
        scale: f32,
    },
    /// The inner dimensions of a matrix product differ.
    #[error(
        "scaled_matmul of {lhs:?} by {rhs:?}: the last dimension of the left side ({inner_lhs}) must equal the \
         last but one of the right side ({inner_rhs}); transpose one of them"
    )]
    InnerDimension {
        /// Shape of the left side.
        lhs: Vec<usize>,
        /// Shape of the right side.
        rhs: Vec<usize>,
        /// Columns of the left side.
        inner_lhs: usize,
        /// Rows of the right side.
        inner_rhs: usize,
    },
    /// Batch dimensions that cannot be broadcast.
    #[error(
        "scaled_matmul of {lhs:?} by {rhs:?}: batch dimension {dim} must be equal on both sides, or 1 on one of them"
    )]
    BatchDimension {
        /// Shape of the left side.
        lhs: Vec<usize>,
        /// Shape of the right side.
        rhs: Vec<usize>,
        /// The dimension in question.
        dim: usize,
    },
    /// A matrix product of tensors that are not matrices.
    #[error(
        "scaled_matmul needs tensors of rank 2 or more, got rank {rank}; reshape or unsqueeze first"
    )]
    Rank {
        /// The rank that the tensors have.
        rank: usize,
    },
    /// Data whose rank differs from that of the tensor.
    #[error(
        "the data have rank {data}, but the tensor has rank {tensor}; read them as `Fp8Tensor<{data}>`"
    )]
    DataRank {
        /// The rank of the data.
        data: usize,
        /// The rank of the tensor that was asked for.
        tensor: usize,
    },
    /// Scales per column or block for a tensor of rank 1.
    #[error(
        "a tensor of rank {rank} has no columns or blocks ({granularity:?}); reshape it to a matrix, or take `Granularity::Row`"
    )]
    NoMatrix {
        /// Which elements were to share a scale.
        granularity: Granularity,
        /// The rank of the tensor.
        rank: usize,
    },
    /// Scales whose shape does not fit the codes.
    #[error(
        "scales of shape {scales:?} for codes of shape {codes:?}; {granularity:?} takes scales of shape {expected:?}"
    )]
    ScaleShape {
        /// Shape of the scales as given.
        scales: Vec<usize>,
        /// Shape of the codes.
        codes: Vec<usize>,
        /// Which elements share a scale.
        granularity: Granularity,
        /// The shape that the scales must have.
        expected: Vec<usize>,
    },
    /// A bias whose length is not the number of output columns.
    #[error(
        "the bias has {bias} elements, but the product has {columns} columns; a bias has one for each column"
    )]
    BiasLength {
        /// Elements of the bias.
        bias: usize,
        /// Columns of the product.
        columns: usize,
    },
    /// A dtype that an operation cannot produce.
    #[error("cannot produce {dtype}; ask for F32, BF16 or F16")]
    OutputDType {
        /// The dtype as asked for.
        dtype: String,
    },
    /// A dtype that the device does not support, such as bf16 on WebGPU.
    #[error("{device} cannot compute in {dtype}; it can in {}: ask for one of these", supported.join(", "))]
    UnsupportedDType {
        /// The device, as Burn prints it.
        device: String,
        /// The dtype as asked for.
        dtype: String,
        /// Which of F32, BF16 and F16 the device supports.
        supported: Vec<String>,
    },
    /// More elements than the kernels of a CubeCL device can count, which they do in 32 bits.
    ///
    /// A product may have 1,056,964,607 elements; twice as many if its columns are even and the device has a tensor-core routine; four
    /// times as many by cuBLASLt, if their number is a multiple of 4. A side of it may have four times as many, and so may a tensor to
    /// be cast, of f32 or narrower, whose elements (with one scale) or columns and blocks (with more) are multiples of 4. `scaled_matmul`
    /// and the casts that return a `Result` return this error; layers and the other casts panic.
    #[error(
        "{what}, {shape:?}, has {elements} elements, but the fp8 kernels of the device count up to {most}; split it, such as by \
         rows, and compute the parts one after the other"
    )]
    TooLarge {
        /// What is too large: a tensor to be cast, a product, or a side of one.
        what: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Its elements.
        elements: usize,
        /// The number of elements up to which this always works.
        most: usize,
    },
    /// Raw codes of the wrong length.
    #[error("{codes} codes do not fill the shape {shape:?}; one code is one byte is one element")]
    CodeLength {
        /// Codes given.
        codes: usize,
        /// Shape asked for.
        shape: Vec<usize>,
    },
    /// Scales of the wrong length.
    #[error(
        "{scales} scales do not fill the shape {shape:?}; give one for each tensor, row, column or block"
    )]
    ScaleLength {
        /// Scales given.
        scales: usize,
        /// Shape asked for.
        shape: Vec<usize>,
    },
    /// A scaling block without elements.
    #[error("a scaling block of {rows} x {columns} is empty; both sides must be at least 1")]
    EmptyBlock {
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        columns: usize,
    },
    /// A recipe with e5m2 in the forward pass.
    #[error(
        "{format:?} alone has too few mantissa bits for the forward pass (Transformer Engine refuses it too); \
         use `RecipeFormat::Hybrid` (e4m3 forward, e5m2 gradients) or `RecipeFormat::E4M3`"
    )]
    ForwardFormat {
        /// The format as asked for.
        format: Fp8Format,
    },
    /// A recipe field out of its range.
    #[error("{field} is {value}, but must be {expected}")]
    RecipeField {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: i64,
        /// What it must be.
        expected: &'static str,
    },
}
