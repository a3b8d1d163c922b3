//! Integers, bits and predicates.

use super::decode::Function;

type Plain = fn(&[u64; 4]) -> Option<u64>;

/// The number of operands of an opcode, and its function; the function gives `None` if the result is undefined.
pub(super) fn function(opcode: &str) -> Option<(usize, Function)> {
    if let Some(compare) = opcode.strip_prefix("setp.") {
        return comparison(compare);
    }
    let (name, kind) = opcode.rsplit_once('.')?;
    if let Some(kind @ ("u16" | "s16")) = kind.strip_suffix("x2") {
        let (count, function) = function(&format!("{name}.{kind}"))?;
        return Some((count, halves(function)));
    }
    let found = logic(name, kind)
        .or_else(|| arithmetic(name, kind))
        .or_else(|| bits_of(opcode));
    found.map(|(count, plain)| (count, Box::new(plain) as Function))
}

/// The function of two numbers of 16 bits, side by side.
pub(super) fn halves(function: Function) -> Function {
    Box::new(move |x| {
        let low = function(&x.map(|bits| bits & 0xFFFF))?;
        let high = function(&x.map(|bits| bits >> 16 & 0xFFFF))?;
        Some(high << 16 | low)
    })
}

/// What acts on each bit alone, and moves bits as they are.
fn logic(name: &str, kind: &str) -> Option<(usize, Plain)> {
    macro_rules! of {
        ($mask:expr) => {
            match name {
                "and" => (2, |x| Some(x[0] & x[1] & $mask)),
                "or" => (2, |x| Some((x[0] | x[1]) & $mask)),
                "xor" => (2, |x| Some((x[0] ^ x[1]) & $mask)),
                "not" => (1, |x| Some(!x[0] & $mask)),
                "selp" => (3, |x| Some(if x[2] != 0 { x[0] } else { x[1] } & $mask)),
                _ => return None,
            }
        };
    }
    Some(match kind {
        "pred" => of!(1),
        "b16" | "u16" | "s16" | "f16" => of!(0xFFFF),
        "b32" | "u32" | "s32" | "f32" => of!(0xFFFF_FFFF),
        "b64" | "u64" | "s64" | "f64" => of!(u64::MAX),
        _ => return None,
    })
}

/// What is the same for all widths.
fn arithmetic(name: &str, kind: &str) -> Option<(usize, Plain)> {
    macro_rules! of {
        ($kind:ty, $unsigned:ty, $wide:ty) => {{
            const BITS: u32 = <$unsigned>::BITS;
            fn of(x: u64) -> $kind {
                x as $kind
            }
            fn to(x: $kind) -> Option<u64> {
                Some(u64::from(x as $unsigned))
            }
            fn high(x: &[u64; 4]) -> $kind {
                ((of(x[0]) as $wide * of(x[1]) as $wide) >> BITS) as $kind
            }
            match name {
                "add" => (2, |x| to(of(x[0]).wrapping_add(of(x[1])))),
                "sub" => (2, |x| to(of(x[0]).wrapping_sub(of(x[1])))),
                "neg" => (1, |x| to(of(x[0]).wrapping_neg())),
                "mul.lo" => (2, |x| to(of(x[0]).wrapping_mul(of(x[1])))),
                "mul.hi" => (2, |x| to(high(x))),
                "mad.lo" => (3, |x| {
                    to(of(x[0]).wrapping_mul(of(x[1])).wrapping_add(of(x[2])))
                }),
                "mad.hi" => (3, |x| to(high(x).wrapping_add(of(x[2])))),
                "mul.wide" => (2, |x| {
                    wide(
                        (of(x[0]) as $wide).wrapping_mul(of(x[1]) as $wide) as u64,
                        2 * BITS,
                    )
                }),
                "mad.wide" => (3, |x| {
                    let product = (of(x[0]) as $wide).wrapping_mul(of(x[1]) as $wide) as u64;
                    wide(product.wrapping_add(x[2]), 2 * BITS)
                }),
                "div" => (2, |x| to(of(x[0]).checked_div(of(x[1]))?)),
                "rem" => (2, |x| to(of(x[0]).checked_rem(of(x[1]))?)),
                "min" => (2, |x| to(of(x[0]).min(of(x[1])))),
                "max" => (2, |x| to(of(x[0]).max(of(x[1])))),
                // Larger shifts count as shifts by the width.
                "shl" => (2, |x| to(of(x[0]).checked_shl(amount(x[1])).unwrap_or(0))),
                "shr" => (2, |x| {
                    to(match amount(x[1]) {
                        amount if amount < BITS => of(x[0]) >> amount,
                        _ => of(x[0]) >> (BITS - 1) >> 1,
                    })
                }),
                _ => return None,
            }
        }};
    }
    Some(match kind {
        "u16" | "b16" => of!(u16, u16, u32),
        "s16" => of!(i16, u16, i32),
        "u32" | "b32" => of!(u32, u32, u64),
        "s32" => of!(i32, u32, i64),
        "u64" | "b64" => of!(u64, u64, u128),
        "s64" => of!(i64, u64, i128),
        _ => return None,
    })
}

/// The low bits of a product of twice the width.
fn wide(value: u64, bits: u32) -> Option<u64> {
    Some(value & u64::MAX >> 64u32.saturating_sub(bits))
}

/// By how much is shifted: 32 bits count.
fn amount(value: u64) -> u32 {
    value as u32
}

fn bits_of(opcode: &str) -> Option<(usize, Plain)> {
    Some(match opcode {
        "abs.s32" => (1, |x| u32(signed(x[0]).unsigned_abs())),
        "abs.s64" => (1, |x| Some((x[0] as i64).unsigned_abs())),
        "popc.b32" => (1, |x| Some(u64::from(low(x[0]).count_ones()))),
        "popc.b64" => (1, |x| Some(u64::from(x[0].count_ones()))),
        "clz.b32" => (1, |x| Some(u64::from((low(x[0]) as u32).leading_zeros()))),
        "clz.b64" => (1, |x| Some(u64::from(x[0].leading_zeros()))),
        "brev.b32" => (1, |x| Some(u64::from((x[0] as u32).reverse_bits()))),
        "brev.b64" => (1, |x| Some(x[0].reverse_bits())),
        // Some bits of a value, from a position on; of signed values, with the sign of the uppermost.
        "bfe.u32" => (3, |x| Some(field(low(x[0]), x))),
        "bfe.u64" => (3, |x| Some(field(x[0], x))),
        "bfe.s32" => (3, |x| u32(signed_field(signed(x[0]), x) as u64)),
        // Two registers side by side, shifted by less than 32 or, with `clamp`, by up to 32.
        "shf.l.wrap.b32" => (3, |x| u32((x[1] << 32 | low(x[0])) << (x[2] & 31) >> 32)),
        "shf.r.wrap.b32" => (3, |x| u32((x[1] << 32 | low(x[0])) >> (x[2] & 31))),
        "shf.l.clamp.b32" => (3, |x| {
            u32((u128::from(x[1] << 32 | low(x[0])) << low(x[2]).min(32) >> 32) as u64)
        }),
        "shf.r.clamp.b32" => (3, |x| u32((x[1] << 32 | low(x[0])) >> low(x[2]).min(32))),
        // The bits of three operands choose one of eight in a table.
        "lop3.b32" => (4, |x| {
            let bit = |place: u32| {
                let index = [0, 1, 2].map(|i| x[i] >> place & 1);
                (x[3] >> (index[0] << 2 | index[1] << 1 | index[2]) & 1) << place
            };
            Some((0..32).fold(0, |word, place| word | bit(place)))
        }),
        // Selects four of the eight bytes of two registers, or their signs.
        "prmt.b32" => (3, |x| {
            let bytes = low(x[0]) | low(x[1]) << 32;
            let byte = |place: u64| {
                let selector = x[2] >> (4 * place);
                let byte = (bytes >> (8 * (selector & 7))) as u8;
                u64::from(match selector & 8 {
                    0 => byte,
                    _ => ((byte as i8) >> 7) as u8,
                })
            };
            Some((0..4).fold(0, |word, place| word | byte(place) << (8 * place)))
        }),
        // Inserts some low bits of a value into another, from a position on.
        "bfi.b32" => (4, |x| u32(inserted(x, 32))),
        "bfi.b64" => (4, |x| Some(inserted(x, 64))),
        _ => return None,
    })
}

/// `setp`. With `and`, `or` or `xor`, the result is combined with a third operand.
fn comparison(words: &str) -> Option<(usize, Function)> {
    let mut words = words.split('.');
    let relation = words.next()?;
    let (combined, kind) = match (words.next()?, words.next()) {
        (kind, None) => (None, kind),
        (combined, Some(kind)) => (Some(combined), kind),
    };
    macro_rules! of {
        ($value:expr) => {
            match relation {
                "eq" => |x: &[u64; 4]| u64::from($value(x[0]) == $value(x[1])),
                "ne" => |x: &[u64; 4]| u64::from($value(x[0]) != $value(x[1])),
                "lt" | "lo" => |x: &[u64; 4]| u64::from($value(x[0]) < $value(x[1])),
                "le" | "ls" => |x: &[u64; 4]| u64::from($value(x[0]) <= $value(x[1])),
                "gt" | "hi" => |x: &[u64; 4]| u64::from($value(x[0]) > $value(x[1])),
                "ge" | "hs" => |x: &[u64; 4]| u64::from($value(x[0]) >= $value(x[1])),
                _ => return None,
            }
        };
    }
    let compare: fn(&[u64; 4]) -> u64 = match kind {
        "u16" | "b16" => of!(|x: u64| x as u16),
        "s16" => of!(|x: u64| x as i16),
        "u32" | "b32" => of!(low),
        "s32" => of!(signed),
        "u64" | "b64" => of!(|x: u64| x),
        "s64" => of!(|x: u64| x as i64),
        _ => return None,
    };
    combination(compare, combined)
}

/// A comparison, whose result may be combined with a third operand.
pub(super) fn combination(
    compare: impl Fn(&[u64; 4]) -> u64 + Send + Sync + 'static,
    combined: Option<&str>,
) -> Option<(usize, Function)> {
    Some(match combined {
        None => (2, Box::new(move |x| Some(compare(x)))),
        Some("and") => (3, Box::new(move |x| Some(compare(x) & x[2]))),
        Some("or") => (3, Box::new(move |x| Some(compare(x) | x[2]))),
        Some("xor") => (3, Box::new(move |x| Some(compare(x) ^ x[2]))),
        Some(_) => return None,
    })
}

/// The low bits of `x[0]`, as many as `x[3]`, in `x[1]` from position `x[2]` on, in a register of so many bits.
fn inserted(x: &[u64; 4], width: u64) -> u64 {
    let (position, length) = (x[2] & 0xFF, x[3] & 0xFF);
    if position >= width {
        return x[1];
    }
    let field = (((1u128 << length.min(64)) - 1) as u64) << position;
    x[1] & !field | x[0] << position & field
}

/// The bits of a value from position `x[1]` on, as many as `x[2]`.
fn field(value: u64, x: &[u64; 4]) -> u64 {
    let (position, length) = (x[1] & 0xFF, x[2] & 0xFF);
    let mask = ((1u128 << length.min(64)) - 1) as u64;
    value.checked_shr(position as u32).unwrap_or(0) & mask
}

fn signed_field(value: i64, x: &[u64; 4]) -> i64 {
    let (position, length) = (x[1] & 0xFF, (x[2] & 0xFF).min(64));
    match length {
        0 => 0,
        _ => value >> position.min(63) << (64 - length) >> (64 - length),
    }
}

fn u32(value: u64) -> Option<u64> {
    Some(low(value))
}

fn low(value: u64) -> u64 {
    value & 0xFFFF_FFFF
}

fn signed(value: u64) -> i64 {
    i64::from(value as u32 as i32)
}
