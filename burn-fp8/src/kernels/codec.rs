//! Encoding and decoding in registers.

use burn::tensor::DType;
use cubecl::{client::Client, prelude::*};

use super::ptx;
use crate::Fp8Format;

const MANTISSA_BITS: u32 = f32::MANTISSA_DIGITS - 1;
const BIAS: u32 = 127;
const INFINITY: u32 = f32::INFINITY.to_bits();

/// Four floats, one for each code of a word.
pub(in crate::kernels) type Four = Vector<f32, Const<4>>;

/// How a device encodes floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::kernels) struct Codec {
    format: Fp8Format,
    /// Whether the GPU's own instruction is used, which encodes two floats at a time; otherwise bit operations are used.
    native: bool,
}

impl Codec {
    pub(in crate::kernels) fn of(client: &Client, format: Fp8Format) -> Self {
        // PTX ISA, `cvt`: "requires sm_89 or higher".
        let native = ptx::capability(client).is_some_and(|capability| capability >= 89);
        Self { format, native }
    }
}

/// The codes of four values, the first in the low byte.
#[cube]
pub(in crate::kernels) fn encode(values: Four, #[comptime] codec: Codec) -> u32 {
    if comptime!(codec.native) {
        let word = convert(
            values.extract(0usize),
            values.extract(1usize),
            values.extract(2usize),
            values.extract(3usize),
            codec.format,
        );
        if comptime!(codec.format == Fp8Format::E5M2) {
            // For NaN the instruction writes 0x7F, which no finite value has. All other casts write 0x7E, so 1 is subtracted.
            word - (((word & 0x7F7F_7F7Fu32) + 0x0101_0101u32) & 0x8080_8080u32) / 128u32
        } else {
            word
        }
    } else {
        let codes = round(values, codec.format);
        codes.extract(0usize)
            | (codes.extract(1usize) << 8u32)
            | (codes.extract(2usize) << 16u32)
            | (codes.extract(3usize) << 24u32)
    }
}

/// [`encode`] by `cvt`, which takes the value of its upper code first.
#[cube]
fn convert(a: f32, b: f32, c: f32, d: f32, #[comptime] format: Fp8Format) -> u32 {
    let name = comptime!(ptx_name(format));
    let word: u32;
    gpu_asm!(
        "{{",
        ".reg .b16 low, high;",
        "cvt.rn.satfinite.{name}x2.f32 low, {b}, {a};",
        "cvt.rn.satfinite.{name}x2.f32 high, {d}, {c};",
        "mov.b32 {word}, {{low, high}};",
        "}}",
        word = out(_) word, a = in(_) a, b = in(_) b, c = in(_) c, d = in(_) d,
        options(pure, nomem)
    );
    word
}

/// The codes of values, each in a low byte, as in [`Fp8Format::encode`].
#[cube]
fn round(values: Four, #[comptime] format: Fp8Format) -> Vector<u32, Const<4>> {
    let shift = comptime!(MANTISSA_BITS - format.mantissa_bits());
    // The last place of the anchor is the step between subnormals.
    let anchor = comptime!(format.min_subnormal() * (1u32 << MANTISSA_BITS) as f32);
    let rebias = comptime!((BIAS - format.bias()) << MANTISSA_BITS);
    let rounding = comptime!(((1u32 << (shift - 1)) - 1).wrapping_sub(rebias));

    let bits = Vector::<u32, Const<4>>::reinterpret(values);
    let sign = (bits >> Vector::new(24u32)) & Vector::new(0x80u32);
    let magnitude = bits & Vector::new(0x7FFF_FFFFu32);
    let finite = min(magnitude, Vector::new(comptime!(format.max().to_bits())));

    let anchored = Four::reinterpret(finite) + Vector::new(anchor);
    let subnormal =
        Vector::<u32, Const<4>>::reinterpret(anchored) - Vector::new(comptime!(anchor.to_bits()));
    let odd = (finite >> Vector::new(shift)) & Vector::new(1u32);
    let normal = (finite + odd + Vector::new(rounding)) >> Vector::new(shift);

    let smallest = Vector::new(comptime!(format.min_positive().to_bits()));
    let code = select_many(finite.less_than(&smallest), subnormal, normal);
    let nan = Vector::new(comptime!(format.nan_code() as u32));
    select_many(magnitude.greater_than(&Vector::new(INFINITY)), nan, code) | sign
}

/// The values of codes, each in a low byte, as in [`Fp8Format::decode`].
#[cube]
fn values<N: Size>(codes: Vector<u32, N>, #[comptime] format: Fp8Format) -> Vector<f32, N> {
    let shift = comptime!(MANTISSA_BITS - format.mantissa_bits());
    let rebias = comptime!((BIAS - format.bias()) << MANTISSA_BITS);
    let sign = (codes & Vector::new(0x80u32)) << Vector::new(24u32);
    let code = codes & Vector::new(0x7Fu32);
    let place = code << Vector::new(shift);

    let normal = place + Vector::new(rebias);
    // Decoded with the exponent that subnormals have, minus the hidden bit.
    let hidden =
        Vector::<f32, N>::reinterpret(normal + Vector::new(comptime!(1u32 << MANTISSA_BITS)));
    let subnormal = hidden - Vector::new(comptime!(format.min_positive()));
    let smallest = Vector::new(comptime!(1u32 << format.mantissa_bits()));
    let finite = select_many(
        code.less_than(&smallest),
        Vector::<u32, N>::reinterpret(subnormal),
        normal,
    );
    // The mantissa stays: it is empty for infinities, and not empty for NaN.
    let special = place | Vector::new(INFINITY);
    let largest = Vector::new(comptime!(format.max_code() as u32));
    let value = select_many(code.greater_than(&largest), special, finite);
    Vector::<f32, N>::reinterpret(value | sign)
}

/// The value of the code in the low byte.
#[cube]
pub(in crate::kernels) fn decode(code: u32, #[comptime] format: Fp8Format) -> f32 {
    values::<Const<1>>(Vector::new(code), format).extract(0usize)
}

/// The values of a word's four codes.
#[cube]
pub(in crate::kernels) fn decode_word(word: u32, #[comptime] format: Fp8Format) -> Four {
    let mut codes = Vector::<u32, Const<4>>::new(word);
    #[unroll]
    for lane in 1..4usize {
        codes.insert(lane, word >> comptime!(8 * lane as u32));
    }
    values::<Const<4>>(codes, format)
}

/// The value of code number `index` of an array of words.
#[cube]
pub(in crate::kernels) fn load(words: &[u32], index: usize, #[comptime] format: Fp8Format) -> f32 {
    decode(words[index / 4] >> (8 * (index % 4) as u32), format)
}

/// The bits of a value without its sign. They are ordered like the magnitudes, with NaN above infinity.
#[cube]
pub(in crate::kernels) fn magnitude_bits(value: f32) -> u32 {
    u32::reinterpret(value) & 0x7FFF_FFFFu32
}

/// The [`magnitude_bits`] of four values.
#[cube]
pub(in crate::kernels) fn magnitudes(values: Four) -> Vector<u32, Const<4>> {
    Vector::<u32, Const<4>>::reinterpret(values) & Vector::new(0x7FFF_FFFFu32)
}

/// The largest of four numbers.
#[cube]
pub(in crate::kernels) fn largest_lane(four: Vector<u32, Const<4>>) -> u32 {
    let first = u32::max(four.extract(0usize), four.extract(1usize));
    let second = u32::max(four.extract(2usize), four.extract(3usize));
    u32::max(first, second)
}

/// The largest [`magnitude_bits`] of four values, or `max`.
#[cube]
pub(in crate::kernels) fn largest_of(values: Four, max: u32) -> u32 {
    u32::max(max, largest_lane(magnitudes(values)))
}

/// Whether [`float_to`] has to round to a dtype by itself. If the processor has no instruction for bf16, CubeCL 0.11's CPU
/// runtime fails to link LLVM's function (`__truncsfbf2`), and gives zeros.
pub(in crate::kernels) fn by_hand(client: &Client, dtype: DType) -> bool {
    dtype == DType::BF16 && client.properties().hardware.num_cpu_cores.is_some()
}

/// A value in the dtype of an output. With `by_hand`, it is rounded to bf16 by bit operations.
#[cube]
pub(in crate::kernels) fn float_to<F: Numeric>(value: f32, #[comptime] by_hand: bool) -> F {
    if by_hand {
        let bits = u32::reinterpret(value);
        let odd = (bits >> 16u32) & 1u32;
        let rounded = (bits + 0x7FFFu32 + odd) >> 16u32;
        // Rounding a NaN could carry into the sign. It is cut off and made quiet instead.
        let nan = (bits >> 16u32) | 0x40u32;
        let word = select(magnitude_bits(value) > INFINITY, nan, rounded);
        F::reinterpret(u16::cast_from(word))
    } else {
        F::cast_from(value)
    }
}

/// The name of a format in PTX.
pub(in crate::kernels) fn ptx_name(format: Fp8Format) -> &'static str {
    match format {
        Fp8Format::E4M3 => "e4m3",
        Fp8Format::E5M2 => "e5m2",
    }
}
