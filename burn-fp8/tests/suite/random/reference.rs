//! The brute-force version: numbers of codes by the definition of their format, and everything else in f64.

use burn::tensor::FloatDType;
use burn_fp8::{Fp8Cast, Fp8Data, Fp8Format, Granularity};

use super::Outcome;
use proptest::test_runner::TestCaseError;

/// The number of a code.
pub(in crate::suite) fn decode(format: Fp8Format, code: u8) -> f64 {
    let (bits, bias) = match format {
        Fp8Format::E4M3 => (3, 7),
        Fp8Format::E5M2 => (2, 15),
    };
    let sign = if code >= 0x80 { -1.0 } else { 1.0 };
    let exponent = i32::from((code & 0x7F) >> bits);
    let mantissa = f64::from(code & ((1 << bits) - 1)) / f64::from(1 << bits);
    match (format, code & 0x7F) {
        (Fp8Format::E4M3, 0x7F) => f64::NAN,
        (Fp8Format::E5M2, 0x7C) => sign * f64::INFINITY,
        (Fp8Format::E5M2, 0x7D..) => f64::NAN,
        _ if exponent == 0 => sign * mantissa * 2f64.powi(1 - bias),
        _ => sign * (1.0 + mantissa) * 2f64.powi(exponent - bias),
    }
}

/// The code of the nearest number, the even one of two; `None` for NaN, which has several.
pub(super) fn encode(format: Fp8Format, value: f32) -> Option<u8> {
    let magnitude = f64::from(value.abs());
    let number = |code: u8| decode(format, code);
    let (mut low, mut high) = match format {
        Fp8Format::E4M3 => (0u8, 0x7Eu8),
        Fp8Format::E5M2 => (0, 0x7B),
    };
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match number(middle) <= magnitude {
            true => low = middle,
            false => high = middle,
        }
    }
    let [below, above] = [magnitude - number(low), number(high) - magnitude];
    let code = match below.partial_cmp(&above)? {
        core::cmp::Ordering::Less => low,
        core::cmp::Ordering::Greater => high,
        core::cmp::Ordering::Equal => low + low % 2,
    };
    Some(code | if value.is_sign_negative() { 0x80 } else { 0 })
}

/// The largest magnitude; NaN if there is a NaN, 0 if there is nothing.
pub(in crate::suite) fn amax(values: impl IntoIterator<Item = f32>) -> f32 {
    // NaN is not less than anything.
    let larger = |max: f32, value: f32| match max.is_nan() || value.abs() <= max {
        true => max,
        false => value.abs(),
    };
    values.into_iter().fold(0.0, larger)
}

/// The scale that an amax gives.
pub(super) fn scale(format: Fp8Format, amax: f32, power_of_two: bool) -> f32 {
    let top = match format {
        Fp8Format::E4M3 => 448.0f32,
        Fp8Format::E5M2 => 57344.0,
    };
    let scale = match amax.is_finite() && amax > 0.0 {
        true => (top / amax).min(f32::MAX),
        false => 1.0,
    };
    match power_of_two {
        true => {
            let mut powers = (-126..=127).map(|exponent| 2f32.powi(exponent));
            powers.rfind(|power| *power <= scale).unwrap()
        }
        false => scale,
    }
}

/// How many rows and columns share a scale.
fn sides(granularity: Granularity) -> [usize; 2] {
    match granularity {
        Granularity::Tensor => [usize::MAX; 2],
        Granularity::Row => [1, usize::MAX],
        Granularity::Column => [usize::MAX, 1],
        Granularity::Block { rows, columns } => [rows, columns],
    }
}

/// The shape of the scales, and for each element the number of its scale.
pub(in crate::suite) fn places(
    granularity: Granularity,
    shape: &[usize],
) -> (Vec<usize>, Vec<usize>) {
    let count: usize = shape.iter().product();
    if granularity == Granularity::Tensor {
        return (vec![1; shape.len()], vec![0; count]);
    }
    let [rows, columns] = sides(granularity);
    let mut scales = shape.to_vec();
    let blocks = |length: usize, side: usize| match side {
        usize::MAX => 1,
        _ => length.div_ceil(side),
    };
    let last = shape.len() - 1;
    scales[last] = blocks(shape[last], columns);
    let height = match last {
        0 => 1,
        _ => {
            scales[last - 1] = blocks(shape[last - 1], rows);
            shape[last - 1]
        }
    };
    let tall = if last == 0 { 1 } else { scales[last - 1] };
    let place = |index: usize| {
        let (line, column) = (index / shape[last], index % shape[last]);
        let (batch, row) = (line / height, line % height);
        (batch * tall + row / rows) * scales[last] + column / columns
    };
    let places = (0..count).map(place).collect();
    (scales, places)
}

/// What a cast gives, with scales from amaxes or with a given one. Codes of NaN have no sign.
pub(in crate::suite) fn cast(
    cast: Fp8Cast,
    given: Option<f32>,
    shape: &[usize],
    input: &[f32],
) -> Fp8Data {
    let Fp8Cast {
        format,
        granularity,
        power_of_two,
    } = cast;
    let (scale_shape, places) = places(granularity, shape);
    let mut amaxes = vec![0f32; scale_shape.iter().product()];
    for (&value, &place) in input.iter().zip(&places) {
        amaxes[place] = amax([amaxes[place], value]);
    }
    let scale = |amax: f32| given.unwrap_or_else(|| scale(format, amax, power_of_two));
    let scales: Vec<f32> = amaxes.into_iter().map(scale).collect();
    let codes = input.iter().zip(places);
    let codes = codes.map(|(value, place)| encode(format, value * scales[place]));
    Fp8Data {
        codes: codes
            .map(|code| code.unwrap_or(format.nan_code()))
            .collect(),
        shape: shape.to_vec(),
        scales,
        scale_shape,
        granularity,
        format,
    }
}

/// The numbers of an fp8 tensor.
pub(in crate::suite) fn numbers(data: &Fp8Data) -> Vec<f64> {
    let (_, places) = places(data.granularity, &data.shape);
    let codes = data.codes.iter().zip(places);
    codes
        .map(|(&code, place)| decode(data.format, code) / f64::from(data.scales[place]))
        .collect()
}

/// A sum, and the sum of the magnitudes of its terms, to which the error of an f32 sum is proportional.
#[derive(Clone, Copy, Debug)]
pub(in crate::suite) struct Sum {
    pub(super) sum: f64,
    pub(super) size: f64,
}

impl Sum {
    pub(in crate::suite) fn of(terms: impl Iterator<Item = f64>) -> Self {
        let none = Self {
            sum: 0.0,
            size: 0.0,
        };
        terms.fold(none, |Self { sum, size }, term| Self {
            sum: sum + term,
            size: size + term.abs(),
        })
    }
}

/// A matrix, or several, on the host.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    pub(super) shape: Vec<usize>,
    pub(super) numbers: Vec<f64>,
}

impl Matrix {
    pub(super) fn of(data: &Fp8Data) -> Self {
        Self {
            shape: data.shape.clone(),
            numbers: numbers(data),
        }
    }

    /// The transpose of a single matrix.
    pub(super) fn transposed(&self) -> Self {
        let [rows, columns] = [self.shape[0], self.shape[1]];
        let places = (0..columns).flat_map(|column| (0..rows).map(move |row| (row, column)));
        Self {
            numbers: places
                .map(|(row, column)| self.numbers[row * columns + column])
                .collect(),
            shape: vec![columns, rows],
        }
    }

    /// The product plus a bias, with batch dimensions broadcast.
    pub(super) fn times(&self, rhs: &Self, bias: Option<&[f64]>) -> (Vec<usize>, Vec<Sum>) {
        let (left, right) = (&self.shape, &rhs.shape);
        let last = left.len() - 1;
        let [m, k, n] = [left[last - 1], left[last], right[last]];
        let both = left.iter().zip(right).take(last - 1);
        let batch: Vec<usize> = both.map(|(&a, &b)| if a == 1 { b } else { a }).collect();
        let start = |shape: &[usize], mut index: usize| {
            let (mut start, mut stride) = (0, shape[last - 1] * shape[last]);
            for dim in (0..last - 1).rev() {
                start += index % batch[dim] % shape[dim] * stride;
                index /= batch[dim];
                stride *= shape[dim];
            }
            start
        };
        let mut sums = Vec::new();
        for index in 0..batch.iter().product() {
            let [a, b] = [(left, &self.numbers), (right, &rhs.numbers)]
                .map(|(shape, numbers)| &numbers[start(shape, index)..]);
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let terms = (0..k).map(|i| a[row * k + i] * b[i * n + column]);
                sums.push(Sum::of(terms.chain(bias.map(|bias| bias[column]))));
            }
        }
        let shape = batch.into_iter().chain([m, n]).collect();
        (shape, sums)
    }
}

/// What a number may be off by when it is rounded to a dtype: relative to it, and at least; and the largest finite number.
fn rounding(dtype: FloatDType) -> [f64; 3] {
    match dtype {
        FloatDType::F32 => [2f64.powi(-24), 2f64.powi(-149), f64::from(f32::MAX)],
        FloatDType::BF16 => [2f64.powi(-8), 2f64.powi(-133), 3.38953e38],
        _ => [2f64.powi(-11), 2f64.powi(-24), 65504.0],
    }
}

/// That a number is the sum, up to the error of a sum in f32 that is then rounded to `dtype`.
pub(in crate::suite) fn near(
    found: f32,
    Sum { sum, size }: Sum,
    relative: f64,
    dtype: FloatDType,
) -> Outcome {
    let [last_place, least, most] = rounding(dtype);
    // Below the least normal number, each term has that error.
    let terms = size + f64::from(f32::MIN_POSITIVE);
    let off = relative * terms + 1.01 * last_place * sum.abs() + 2.0 * least;
    let fits = match (sum.is_nan(), sum.is_infinite(), found.is_nan()) {
        (true, ..) => found.is_nan(),
        (_, true, _) => f64::from(found) == sum,
        (.., true) => false,
        _ if found.is_infinite() => {
            f64::from(found).signum() == sum.signum() && sum.abs() + off >= most
        }
        _ => (f64::from(found) - sum).abs() <= off,
    };
    match fits {
        true => Ok(()),
        false => Err(TestCaseError::fail(format!(
            "{found:e} is not {sum:e} (terms of {size:e})"
        ))),
    }
}

/// [`near`] for all of several sums.
pub(in crate::suite) fn all_near(
    found: &[f32],
    sums: &[Sum],
    relative: f64,
    dtype: FloatDType,
) -> Outcome {
    assert_eq!(found.len(), sums.len());
    found
        .iter()
        .zip(sums)
        .try_for_each(|(&found, &sum)| near(found, sum, relative, dtype))
}
