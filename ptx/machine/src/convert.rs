//! Conversions between types, and from addresses in a space to generic ones.

use super::{
    decode::Function,
    fp8::Fp8,
    number::{Format, Round, to_odd},
    thread::{LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW, WINDOW},
};

/// A type that is converted from or to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Float(Format),
    Integer { signed: bool, bits: u32 },
}

pub(super) fn function(opcode: &str) -> Option<(usize, Function)> {
    if let Some(conversion) = opcode.strip_prefix("cvt.")
        && let Some(found) = packed(conversion).or_else(|| conversion_of(conversion))
    {
        return Some(found);
    }
    let function: fn(&[u64; 4]) -> Option<u64> = match opcode {
        // To nearest, ties away from zero, of which the lower 13 bits are none of tf32's.
        "cvt.rna.tf32.f32" => |x| {
            let bits = x[0] & 0xFFFF_FFFF;
            let finite = bits & 0x7F80_0000 != 0x7F80_0000;
            Some(if finite {
                (bits + 0x1000) & !0x1FFF
            } else {
                bits
            })
        },
        "cvta.to.global.u64" => |x| (x[0] < LOCAL_WINDOW).then_some(x[0]),
        "cvta.to.shared.u64" => |x| within(SHARED_WINDOW, x[0]),
        "cvta.to.local.u64" => |x| within(LOCAL_WINDOW, x[0]),
        "cvta.global.u64" => |x| Some(x[0]),
        "cvta.shared.u64" => |x| (x[0] < WINDOW).then_some(SHARED_WINDOW + x[0]),
        "cvta.local.u64" => |x| (x[0] < WINDOW).then_some(LOCAL_WINDOW + x[0]),
        "cvta.param.u64" => |x| (x[0] < WINDOW).then_some(PARAMETER_WINDOW + x[0]),
        _ => return None,
    };
    Some((1, Box::new(function)))
}

/// The offset of a generic address in a window.
pub(super) fn within(window: u64, address: u64) -> Option<u64> {
    address
        .checked_sub(window)
        .filter(|offset| *offset < WINDOW)
}

/// Two floats to codes or halves, of which the first operand becomes the upper one; and codes to halves.
fn packed(conversion: &str) -> Option<(usize, Function)> {
    fn pair(convert: impl Fn(f32) -> u64 + Send + Sync + 'static, bits: u32) -> (usize, Function) {
        let float = |bits: u64| f32::from_bits(bits as u32);
        let both = move |x: &[u64; 4]| Some(convert(float(x[0])) << bits | convert(float(x[1])));
        (2, Box::new(both))
    }
    if let Some(rest) = conversion.strip_prefix("rn.satfinite.") {
        let (format, from) = rest.split_once("x2.")?;
        let format = Fp8::named(format)?;
        return (from == "f32").then(|| pair(move |value| u64::from(format.nearest(value)), 8));
    }
    if let Some(format) = conversion.strip_prefix("rn.f16x2.") {
        let format = Fp8::named(format.strip_suffix("x2")?)?;
        let both = move |x: &[u64; 4]| {
            let half = |code: u64| Format::F16.bits(format.value(code as u8), Round::Nearest);
            Some(half(x[0] >> 8 & 0xFF) << 16 | half(x[0] & 0xFF))
        };
        return match conversion.ends_with(".f32") {
            true => None,
            false => Some((1, Box::new(both))),
        };
    }
    None
}

/// `[rounding.][ftz.][sat.]to.from`.
fn conversion_of(conversion: &str) -> Option<(usize, Function)> {
    let mut words: Vec<&str> = conversion.split('.').collect();
    let (from, to) = (words.pop()?, words.pop()?);
    let (mut round, mut flush, mut saturate) = (None, false, false);
    for word in words {
        match word {
            "ftz" => flush = true,
            "sat" => saturate = true,
            _ => round = Some((Round::named(word)?, word.len() == 3)),
        }
    }
    if let (Some(format), "f32") = (to.strip_suffix("x2"), from) {
        let (format, (round, _)) = (Format::named(format)?, round?);
        let both = move |x: &[u64; 4]| {
            let half = |bits: u64| format.bits(Format::F32.value(bits), round);
            Some(half(x[0]) << 16 | half(x[1]))
        };
        return Some((2, Box::new(both)));
    }
    let (to, from) = (kind(to)?, kind(from)?);
    let convert = move |bits: u64| -> u64 {
        match (from, to) {
            (Kind::Integer { .. }, Kind::Integer { .. }) => {
                let value = integer(from, bits);
                let value = match saturate {
                    true => clamped(to, value),
                    false => value,
                };
                truncated(to, value)
            }
            (Kind::Integer { .. }, Kind::Float(format)) => {
                let value = integer(from, bits);
                let nearest = value as f64;
                let error = (value - nearest as i128) as f64;
                match format {
                    Format::F64 => nearest.to_bits(),
                    _ => {
                        let round = round.map_or(Round::Nearest, |(round, _)| round);
                        format.bits(to_odd(nearest, error), round)
                    }
                }
            }
            (Kind::Float(format), Kind::Integer { bits: size, .. }) => {
                let bits = if flush { format.flushed(bits) } else { bits };
                let value = format.value(bits);
                if value.is_nan() {
                    // Zero, but in 64 bits the most negative number.
                    return if size == 64 || format == Format::F64 {
                        1 << (size - 1)
                    } else {
                        0
                    };
                }
                let round = round.map_or(Round::Zero, |(round, _)| round);
                truncated(to, clamped(to, round.integer(value) as i128))
            }
            (Kind::Float(from), Kind::Float(to)) => {
                let bits = if flush { from.flushed(bits) } else { bits };
                let value = from.value(bits);
                let result = match round {
                    Some((round, true)) => to.bits(round.integer(value), Round::Nearest),
                    Some((round, false)) => to.bits(value, round),
                    None => to.bits(value, Round::Nearest),
                };
                let result = if flush { to.flushed(result) } else { result };
                match saturate {
                    true if value.is_nan() => 0,
                    true => to.bits(to.value(result).clamp(0.0, 1.0) + 0.0, Round::Nearest),
                    false => result,
                }
            }
        }
    };
    Some((1, Box::new(move |x| Some(convert(x[0])))))
}

fn kind(name: &str) -> Option<Kind> {
    if let Some(format) = Format::named(name) {
        return Some(Kind::Float(format));
    }
    let signed = name.starts_with('s');
    let bits = name.strip_prefix(['s', 'u'])?.parse().ok()?;
    [8, 16, 32, 64]
        .contains(&bits)
        .then_some(Kind::Integer { signed, bits })
}

fn integer(kind: Kind, bits: u64) -> i128 {
    let Kind::Integer { signed, bits: size } = kind else {
        unreachable!("asked of integers");
    };
    let unused = 64 - size;
    match signed {
        true => i128::from((bits << unused) as i64 >> unused),
        false => i128::from(bits << unused >> unused),
    }
}

fn clamped(kind: Kind, value: i128) -> i128 {
    let Kind::Integer { signed, bits } = kind else {
        unreachable!("asked of integers");
    };
    match signed {
        true => value.clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        false => value.clamp(0, (1 << bits) - 1),
    }
}

/// The bits of an integer in its register. Registers are of 16 bits or more: narrower ones are extended by their sign.
fn truncated(kind: Kind, value: i128) -> u64 {
    let Kind::Integer { signed, bits } = kind else {
        unreachable!("asked of integers");
    };
    let extended = match (signed, bits) {
        (true, 8) => i128::from(value as i8),
        (false, 8) => i128::from(value as u8),
        _ => value,
    };
    let register = bits.max(16);
    extended as u64 & u64::MAX >> (64 - register)
}
