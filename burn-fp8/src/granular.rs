//! The ops on tensors with a scale per row, column or block, composed of the per-tensor ops and Burn's own.

use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{FloatDType, Shape, Slice};

use crate::{Bias, Fp8Cast, Fp8Format, Granularity, MatmulSpec, portable, provider::Provider};

/// See [`Fp8Ops::fp8_quantize_blocks`](crate::Fp8Ops::fp8_quantize_blocks).
pub(crate) fn quantize<B: Backend, P: Provider<B>>(
    input: FloatTensor<B>,
    cast: Fp8Cast,
) -> (IntTensor<B>, FloatTensor<B>) {
    cast.assert_several_scales();
    let Fp8Cast {
        format,
        granularity,
        power_of_two,
    } = cast;
    let input = B::float_cast(input, FloatDType::F32);
    let shape = input.shape();
    let rank = shape.num_dims();
    let mut amax = maxima::<B>(B::float_abs(input.clone()), rank - 1, granularity.columns());
    if rank > 1 {
        amax = maxima::<B>(amax, rank - 2, granularity.rows());
    }
    let scale = P::scales(amax, format, power_of_two);
    let scaled = B::float_mul(input, stretch::<B>(scale.clone(), granularity, &shape));
    let (codes, _) = P::quantize(scaled, unit::<B>(&scale), format);
    (codes, scale)
}

/// [`Fp8Ops::fp8_dequantize`](crate::Fp8Ops::fp8_dequantize) with several scales.
pub(crate) fn dequantize<B: Backend, P: Provider<B>>(
    codes: IntTensor<B>,
    scale: FloatTensor<B>,
    granularity: Granularity,
    format: Fp8Format,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let shape = codes.shape();
    let (whole, f32) = (Granularity::Tensor, FloatDType::F32);
    let values = P::dequantize(codes, unit::<B>(&scale), whole, format, f32);
    let values = B::float_div(values, stretch::<B>(scale, granularity, &shape));
    B::float_cast(values, dtype)
}

/// [`Fp8Ops::fp8_matmul`](crate::Fp8Ops::fp8_matmul) with several scales on at least one side.
pub(crate) fn matmul<B: Backend, P: Provider<B>>(
    lhs: IntTensor<B>,
    rhs: IntTensor<B>,
    lhs_scale: FloatTensor<B>,
    rhs_scale: FloatTensor<B>,
    bias: Bias<B>,
    spec: MatmulSpec,
) -> FloatTensor<B> {
    let (left, right) = (lhs.shape(), rhs.shape());
    let rank = left.num_dims();
    let [rows, inner, columns] = [left[rank - 2], left[rank - 1], right[rank - 1]];
    let one = unit::<B>(&lhs_scale);
    let whole = spec.with_granularities([Granularity::Tensor; 2]);
    // Without elements on a side there may be no scales, and there is nothing to scale.
    if left.num_elements() == 0 || right.num_elements() == 0 {
        return P::matmul(lhs, rhs, one.clone(), one, bias, whole);
    }
    let raw = MatmulSpec {
        output: FloatDType::F32,
        ..whole
    };
    let [lhs_granularity, rhs_granularity] = spec.granularities;
    let of_rank = |scale, granularity| match granularity {
        Granularity::Tensor => portable::broadcast::<B>(scale, &left),
        _ => scale,
    };
    let lhs_scale = of_rank(lhs_scale, lhs_granularity);
    let rhs_scale = of_rank(rhs_scale, rhs_granularity);
    // For each block of the inner dimension: multiply the codes, then scale the partial sum in f32.
    let step = scaled_together(spec.granularities).unwrap_or(inner);
    let mut sum: Option<FloatTensor<B>> = None;
    for start in (0..inner).step_by(step) {
        let range = start..(start + step).min(inner);
        let part = P::matmul(
            slice_int::<B>(lhs.clone(), rank - 1, range.clone()),
            slice_int::<B>(rhs.clone(), rank - 2, range),
            one.clone(),
            one.clone(),
            Bias::None,
            raw,
        );
        let column = lhs_granularity.columns().map_or(0, |size| start / size);
        let row = rhs_granularity.rows().map_or(0, |size| start / size);
        let row_scales = slice::<B>(lhs_scale.clone(), rank - 1, column..column + 1);
        let row_scales = repeat::<B>(row_scales, rank - 2, lhs_granularity.rows(), rows);
        let column_scales = slice::<B>(rhs_scale.clone(), rank - 2, row..row + 1);
        let column_scales =
            repeat::<B>(column_scales, rank - 1, rhs_granularity.columns(), columns);
        let part = B::float_div(B::float_div(part, row_scales), column_scales);
        sum = Some(match sum {
            Some(sum) => B::float_add(sum, part),
            None => part,
        });
    }
    let sums = sum.expect("there is at least one block");
    portable::finished::<B>(sums, bias, spec.output)
}

/// The number of consecutive terms of a sum that share their scales; `None` if all terms do.
pub(crate) fn scaled_together([left, right]: [Granularity; 2]) -> Option<usize> {
    match (left.columns(), right.rows()) {
        (Some(left), Some(right)) => Some(gcd(left, right)),
        (left, right) => left.or(right),
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A scale of 1.
fn unit<B: Backend>(like: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_ones(Shape::new([1]), &like.device(), FloatDType::F32)
}

/// The maximum of every `size` neighbors along `dim`; of the whole dimension for `None`.
fn maxima<B: Backend>(tensor: FloatTensor<B>, dim: usize, size: Option<usize>) -> FloatTensor<B> {
    let mut shape = tensor.shape();
    let length = shape[dim];
    let size = match size {
        None if length == 0 => {
            shape[dim] = 1;
            return B::float_zeros(shape, &tensor.device(), FloatDType::F32);
        }
        None => return B::float_max_dim(tensor, dim),
        Some(1) => return tensor,
        Some(size) => size.min(length.max(1)),
    };
    let blocks = length.div_ceil(size);
    shape[dim] = blocks * size - length;
    let padded = match shape[dim] {
        0 => tensor,
        _ => {
            let padding = B::float_zeros(shape.clone(), &tensor.device(), FloatDType::F32);
            B::float_cat(vec![tensor, padding], dim)
        }
    };
    shape[dim] = blocks;
    let [outer, inner] = around(&shape, dim);
    let grouped = B::float_reshape(padded, Shape::new([outer, blocks, size, inner]));
    B::float_reshape(B::float_max_dim(grouped, 2), shape)
}

/// Repeats every scale over the rows and columns that share it. Dimensions with a single scale are left to broadcasting.
fn stretch<B: Backend>(
    scale: FloatTensor<B>,
    granularity: Granularity,
    shape: &Shape,
) -> FloatTensor<B> {
    let last = shape.num_dims() - 1;
    let scale = repeat::<B>(scale, last, granularity.columns(), shape[last]);
    match last {
        0 => scale,
        _ => repeat::<B>(scale, last - 1, granularity.rows(), shape[last - 1]),
    }
}

/// Repeats every element `times` times along `dim`, then cuts to `length`.
fn repeat<B: Backend>(
    tensor: FloatTensor<B>,
    dim: usize,
    times: Option<usize>,
    length: usize,
) -> FloatTensor<B> {
    let mut shape = tensor.shape();
    let size = shape[dim];
    let Some(times) = times.filter(|&times| times > 1 && size > 1) else {
        return tensor;
    };
    let [outer, inner] = around(&shape, dim);
    shape[dim] *= times;
    let single = B::float_reshape(tensor, Shape::new([outer, size, 1, inner]));
    let repeated = B::float_expand(single, Shape::new([outer, size, times, inner]));
    slice::<B>(B::float_reshape(repeated, shape), dim, 0..length)
}

/// The number of elements before and after a dimension.
fn around(shape: &Shape, dim: usize) -> [usize; 2] {
    let outer = shape.iter().take(dim).product();
    let inner = shape.iter().skip(dim + 1).product();
    [outer, inner]
}

fn ranges(shape: &Shape, dim: usize, range: core::ops::Range<usize>) -> Vec<Slice> {
    let all = |(index, &size): (usize, &usize)| match index == dim {
        true => Slice::from(range.clone()),
        false => Slice::from(0..size),
    };
    shape.iter().enumerate().map(all).collect()
}

fn slice<B: Backend>(
    tensor: FloatTensor<B>,
    dim: usize,
    range: core::ops::Range<usize>,
) -> FloatTensor<B> {
    let shape = tensor.shape();
    match range.len() == shape[dim] {
        true => tensor,
        false => B::float_slice(tensor, &ranges(&shape, dim, range)),
    }
}

fn slice_int<B: Backend>(
    tensor: IntTensor<B>,
    dim: usize,
    range: core::ops::Range<usize>,
) -> IntTensor<B> {
    let shape = tensor.shape();
    match range.len() == shape[dim] {
        true => tensor,
        false => B::int_slice(tensor, &ranges(&shape, dim, range)),
    }
}
