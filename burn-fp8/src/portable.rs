//! Every fp8 op composed of Burn's standard ops: also bit-exact, slower, and usable on any backend.
//!
//! This is for backends that have no kernels of their own, such as layers around another backend.

use burn::backend::{
    Backend, Scalar, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{BoolDType, FloatDType, IntDType, Shape, Slice, TensorData};

use crate::{
    Bias, Fp8Format, Granularity, MatmulSpec, granular,
    provider::Provider,
    recipe::{AmaxCompute, ScaleUpdate},
};

fn bool_dtype<B: Backend>(tensor: &FloatTensor<B>) -> BoolDType {
    get_or_init_device_settings::<B>(&tensor.device()).bool_dtype
}

fn at_least<B: Backend>(tensor: &FloatTensor<B>, bound: f32) -> FloatTensor<B> {
    let mask = B::float_greater_equal_elem(tensor.clone(), bound.into(), bool_dtype::<B>(tensor));
    B::bool_into_float(mask, FloatDType::F32)
}

fn is_nan<B: Backend>(tensor: &FloatTensor<B>) -> BoolTensor<B> {
    // `float_is_nan` is not used, because only comparisons work alike on every backend.
    B::float_not_equal(tensor.clone(), tensor.clone(), bool_dtype::<B>(tensor))
}

fn f32<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    B::float_cast(tensor, FloatDType::F32)
}

/// See [`Fp8Ops::fp8_amax`](crate::Fp8Ops::fp8_amax).
pub(crate) fn amax<B: Backend>(input: FloatTensor<B>) -> FloatTensor<B> {
    if input.shape().num_elements() == 0 {
        return B::float_zeros(Shape::new([1]), &input.device(), FloatDType::F32);
    }
    let magnitude = B::float_abs(f32::<B>(input));
    let mask = is_nan::<B>(&magnitude);
    let dtype = bool_dtype::<B>(&magnitude);
    // Not every backend's maximum is NaN if one of the numbers is.
    let clean = B::float_mask_fill(magnitude, mask.clone(), 0f32.into());
    let max = B::float_reshape(B::float_max(clean), Shape::new([1]));
    let count = B::float_sum(B::bool_into_float(mask, FloatDType::F32));
    let any = B::float_greater_elem(count, 0f32.into(), dtype);
    B::float_mask_fill(max, any, f32::NAN.into())
}

/// See [`Fp8Ops::fp8_scales`](crate::Fp8Ops::fp8_scales).
pub(crate) fn scales<B: Backend>(
    amax: FloatTensor<B>,
    format: Fp8Format,
    power_of_two: bool,
) -> FloatTensor<B> {
    let (shape, device, dtype) = (amax.shape(), amax.device(), bool_dtype::<B>(&amax));
    let positive = B::float_greater_elem(amax.clone(), 0f32.into(), dtype);
    let finite = B::float_lower_equal_elem(amax.clone(), f32::MAX.into(), dtype);
    let top = B::float_full(shape.clone(), format.max().into(), &device, FloatDType::F32);
    let scale = B::float_clamp_max(B::float_div(top, amax), f32::MAX.into());
    let ones = B::float_ones(shape, &device, FloatDType::F32);
    let scale = B::float_mask_where(ones, B::bool_and(positive, finite), scale);
    match power_of_two {
        true => floor_power_of_two::<B>(scale),
        false => scale,
    }
}

/// For each of some normal positive numbers, the largest power of two that does not exceed it, by binary search.
fn floor_power_of_two<B: Backend>(value: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = bool_dtype::<B>(&value);
    let mut power = B::float_ones(value.shape(), &value.device(), FloatDType::F32);
    let mut rest = value;
    let times = |tensor: FloatTensor<B>, mask: &BoolTensor<B>, factor: f32| {
        let scaled = B::float_mul_scalar(tensor.clone(), factor.into());
        B::float_mask_where(tensor, mask.clone(), scaled)
    };
    let shifts = [64, 32, 16, 8, 4, 2, 1];
    for shift in shifts {
        let small = B::float_lower_elem(rest.clone(), 2f32.powi(1 - shift).into(), dtype);
        rest = times(rest, &small, 2f32.powi(shift));
        power = times(power, &small, 2f32.powi(-shift));
    }
    for shift in shifts {
        let large = B::float_greater_equal_elem(rest.clone(), 2f32.powi(shift).into(), dtype);
        rest = times(rest, &large, 2f32.powi(-shift));
        power = times(power, &large, 2f32.powi(shift));
    }
    power
}

/// See [`Fp8Ops::fp8_quantize`](crate::Fp8Ops::fp8_quantize).
pub(crate) fn quantize<B: Backend>(
    input: FloatTensor<B>,
    scale: FloatTensor<B>,
    format: Fp8Format,
) -> (IntTensor<B>, FloatTensor<B>) {
    let input = f32::<B>(input);
    let scaled = B::float_mul(input.clone(), broadcast::<B>(scale, &input.shape()));
    (encode::<B>(scaled, format), amax::<B>(input))
}

/// See [`Fp8Ops::fp8_quantize_transposed`](crate::Fp8Ops::fp8_quantize_transposed).
pub(crate) fn quantize_transposed<B: Backend, P: Provider<B>>(
    input: FloatTensor<B>,
    scale: FloatTensor<B>,
    format: Fp8Format,
) -> (IntTensor<B>, IntTensor<B>, FloatTensor<B>) {
    let rank = input.shape().num_dims();
    let (codes, amax) = P::quantize(input, scale, format);
    let transposed = B::int_swap_dims(codes.clone(), rank - 2, rank - 1);
    (codes, transposed, amax)
}

/// Casts by arithmetic alone: finds each element's binade by binary search, and rounds in units of its last place.
fn encode<B: Backend>(value: FloatTensor<B>, format: Fp8Format) -> IntTensor<B> {
    let dtype = bool_dtype::<B>(&value);
    let nan = is_nan::<B>(&value);
    let value = B::float_mask_fill(value, nan.clone(), 0f32.into());

    // 1 / -0 is -inf: this is the only comparison that sees the sign of zero.
    let negative = B::float_lower_elem(value.clone(), 0f32.into(), dtype);
    let negative_zero = B::float_lower_elem(B::float_recip(value.clone()), 0f32.into(), dtype);
    let sign = B::bool_into_float(B::bool_or(negative, negative_zero), FloatDType::F32);

    let magnitude = B::float_clamp(B::float_abs(value), 0f32.into(), format.max().into());
    // In units of the smallest subnormal. The first binade above the subnormals has the same last place.
    let mut steps = B::float_mul_scalar(magnitude, (1.0 / format.min_subnormal()).into());
    let binade = (2u32 << format.mantissa_bits()) as f32;
    let mut binades = B::float_mul_scalar(steps.clone(), 0f32.into());
    let exponent_bits = 7 - format.mantissa_bits();
    for shift in (0..exponent_bits).rev().map(|bit| 1i32 << bit) {
        let above = at_least::<B>(&steps, binade * 2f32.powi(shift - 1));
        let factor = B::float_add_scalar(
            B::float_mul_scalar(above.clone(), (2f32.powi(-shift) - 1.0).into()),
            1f32.into(),
        );
        steps = B::float_mul(steps, factor);
        binades = B::float_add(binades, B::float_mul_scalar(above, (shift as f32).into()));
    }
    let rounded = round_ties_even::<B>(steps);
    // Each binade has as many codes as the subnormals, and a carry leads into the next binade by itself.
    let per_binade = (1u32 << format.mantissa_bits()) as f32;
    let code = B::float_add(B::float_mul_scalar(binades, per_binade.into()), rounded);
    let code = B::float_mask_fill(code, nan, (format.nan_code() as f32).into());
    let code = B::float_add(code, B::float_mul_scalar(sign, 128f32.into()));
    B::int_cast(B::float_into_int(code, IntDType::I32), IntDType::U8)
}

/// Rounds numbers in `0..2^22` to the nearest integer, ties to even. `float_round` is not used, because not every backend rounds
/// ties to even.
fn round_ties_even<B: Backend>(value: FloatTensor<B>) -> FloatTensor<B> {
    let floor = B::float_floor(value.clone());
    let fraction = B::float_sub(value, floor.clone());
    let half = B::float_mul_scalar(floor.clone(), 0.5f32.into());
    let odd = B::float_mul_scalar(
        B::float_sub(half.clone(), B::float_floor(half)),
        2f32.into(),
    );
    let at_half = at_least::<B>(&fraction, 0.5);
    let above_half = at_least::<B>(&fraction, 0.5f32.next_up());
    // Round up above one half, and at one half if the integer below is odd.
    let tie_up = B::float_mul(B::float_sub(at_half, above_half.clone()), odd);
    B::float_add(floor, B::float_add(above_half, tie_up))
}

/// See [`Fp8Ops::fp8_dequantize`](crate::Fp8Ops::fp8_dequantize).
pub(crate) fn dequantize<B: Backend, P: Provider<B>>(
    codes: IntTensor<B>,
    scale: FloatTensor<B>,
    granularity: Granularity,
    format: Fp8Format,
    dtype: FloatDType,
) -> FloatTensor<B> {
    if granularity != Granularity::Tensor {
        return granular::dequantize::<B, P>(codes, scale, granularity, format, dtype);
    }
    let values = decode::<B>(codes, format);
    let inverse = broadcast::<B>(B::float_recip(scale), &values.shape());
    B::float_cast(B::float_mul(values, inverse), dtype)
}

/// The values of codes, looked up in a table of 256.
fn decode<B: Backend>(codes: IntTensor<B>, format: Fp8Format) -> FloatTensor<B> {
    let (shape, device) = (codes.shape(), codes.device());
    if shape.num_elements() == 0 {
        return B::float_zeros(shape, &device, FloatDType::F32);
    }
    let table = TensorData::new(format.values().to_vec(), [256]);
    let table = B::float_from_data(table, &device);
    let flat = B::int_reshape(codes, Shape::new([shape.num_elements()]));
    let indices = B::int_cast(flat, IntDType::I32);
    B::float_reshape(B::float_select(table, 0, indices), shape)
}

/// See [`Fp8Ops::fp8_matmul`](crate::Fp8Ops::fp8_matmul).
pub(crate) fn matmul<B: Backend, P: Provider<B>>(
    lhs: IntTensor<B>,
    rhs: IntTensor<B>,
    lhs_scale: FloatTensor<B>,
    rhs_scale: FloatTensor<B>,
    bias: Bias<B>,
    spec: MatmulSpec,
) -> FloatTensor<B> {
    if spec.granularities != [Granularity::Tensor; 2] {
        return granular::matmul::<B, P>(lhs, rhs, lhs_scale, rhs_scale, bias, spec);
    }
    let lhs = decode::<B>(lhs, spec.lhs);
    let rhs = decode::<B>(rhs, spec.rhs);
    let product = f32::<B>(product::<B>(lhs, rhs));
    let shape = product.shape();
    let product = B::float_mul(product, broadcast::<B>(B::float_recip(lhs_scale), &shape));
    let product = B::float_mul(product, broadcast::<B>(B::float_recip(rhs_scale), &shape));
    finished::<B>(product, bias, spec.output)
}

/// The product of two matrices of floats, or of several. Burn's own reads beyond a side without elements on Flex, and is not written
/// without terms on some devices.
pub(crate) fn product<B: Backend>(lhs: FloatTensor<B>, rhs: FloatTensor<B>) -> FloatTensor<B> {
    let (left, right) = (lhs.shape(), rhs.shape());
    if left.num_elements() > 0 && right.num_elements() > 0 {
        return B::float_matmul(lhs, rhs);
    }
    let shape = matmul_shape(&left, &right);
    B::float_zeros(shape, &lhs.device(), FloatDType::F32)
}

/// The shape of a matrix product with broadcast batch dimensions.
pub(crate) fn matmul_shape(lhs: &Shape, rhs: &Shape) -> Shape {
    let rank = lhs.num_dims();
    let mut dims: Vec<_> = lhs
        .iter()
        .zip(rhs.iter())
        .map(|(&lhs, &rhs)| if lhs == 1 { rhs } else { lhs })
        .collect();
    dims[rank - 2] = lhs[rank - 2];
    dims[rank - 1] = rhs[rank - 1];
    Shape::from(dims)
}

/// Scaled sums in f32 as a product: with the bias, and in the output's dtype.
pub(crate) fn finished<B: Backend>(
    sums: FloatTensor<B>,
    bias: Bias<B>,
    output: FloatDType,
) -> FloatTensor<B> {
    let product = match bias {
        Bias::None => sums,
        Bias::Row(bias) => {
            let shape = sums.shape();
            let mut row = vec![1; shape.num_dims()];
            row[shape.num_dims() - 1] = shape[shape.num_dims() - 1];
            B::float_add(sums, B::float_reshape(f32::<B>(bias), Shape::from(row)))
        }
    };
    B::float_cast(product, output)
}

/// See [`Fp8Ops::fp8_matmul_amax`](crate::Fp8Ops::fp8_matmul_amax).
pub(crate) fn matmul_amax<B: Backend, P: Provider<B>>(
    lhs: IntTensor<B>,
    rhs: IntTensor<B>,
    lhs_scale: FloatTensor<B>,
    rhs_scale: FloatTensor<B>,
    bias: Bias<B>,
    spec: MatmulSpec,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let product = P::matmul(lhs, rhs, lhs_scale, rhs_scale, bias, spec);
    let amax = P::amax(product.clone());
    (product, amax)
}

/// See [`Fp8Ops::fp8_update_scale`](crate::Fp8Ops::fp8_update_scale).
pub(crate) fn update_scale<B: Backend>(
    history: FloatTensor<B>,
    scale: FloatTensor<B>,
    amax: FloatTensor<B>,
    update: ScaleUpdate,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let length = history.shape()[0];
    let dtype = bool_dtype::<B>(&history);
    let device = history.device();

    // Slot 0 is where the current amax is staged. The other slots hold earlier amaxes, oldest first.
    let tail = |start: usize| {
        (start < length).then(|| B::float_slice(history.clone(), &[Slice::from(start..length)]))
    };
    let with_amax: Vec<_> = [amax.clone()].into_iter().chain(tail(1)).collect();
    let zero = B::float_zeros(Shape::new([1]), &device, FloatDType::F32);
    let rolled: Vec<_> = match length {
        1 => vec![zero],
        _ => [zero]
            .into_iter()
            .chain(tail(2))
            .chain([amax.clone()])
            .collect(),
    };
    let rolled = B::float_cat(rolled, 0);

    let window = match update.algorithm {
        AmaxCompute::Max => {
            let window = B::float_cat(with_amax, 0);
            let nan = is_nan::<B>(&window);
            let numbers = B::float_mask_fill(window, nan, 0f32.into());
            B::float_reshape(B::float_max(numbers), Shape::new([1]))
        }
        AmaxCompute::MostRecent => amax.clone(),
    };
    let top = B::float_full(
        Shape::new([1]),
        update.scaled_max().into(),
        &device,
        FloatDType::F32,
    );
    let new = B::float_div(top, window.clone());
    let overflow = B::float_greater_elem(new.clone(), f32::MAX.into(), dtype);
    let new = B::float_mask_fill(new, overflow, f32::MAX.into());

    let positive = B::float_greater_elem(window.clone(), 0f32.into(), dtype);
    let finite = B::float_lower_equal_elem(window, f32::MAX.into(), dtype);
    let usable = B::bool_and(positive, finite);
    let new = B::float_mask_where(scale.clone(), usable, new);

    // An amax of exactly 0 means that the tensor was not used: history and scale stay.
    let idle = B::float_equal_elem(amax, Scalar::from(0f32), dtype);
    let scale = B::float_mask_where(new, idle.clone(), scale);
    let idle = B::bool_expand(idle, Shape::new([length]));
    (B::float_mask_where(rolled, idle, history), scale)
}

/// A tensor of one element, in a shape that broadcasts to `shape`.
pub(crate) fn broadcast<B: Backend>(scalar: FloatTensor<B>, shape: &Shape) -> FloatTensor<B> {
    B::float_reshape(scalar, Shape::from(vec![1; shape.num_dims()]))
}
