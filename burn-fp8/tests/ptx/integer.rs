//! Integers, bits and predicates.

use super::decode::Function;

/// The number of operands of an opcode, and its function; the function gives `None` if the result is undefined.
pub(super) fn function(opcode: &str) -> Option<(usize, Function)> {
    if let Some(compare) = opcode.strip_prefix("setp.") {
        let (relation, kind) = compare.split_once('.')?;
        return comparison(relation, kind).map(|function| (2, function));
    }
    Some(match opcode {
        "add.s32" | "add.u32" => (2, |x| u32(x[0].wrapping_add(x[1]))),
        "add.s64" | "add.u64" => (2, |x| Some(x[0].wrapping_add(x[1]))),
        "sub.s32" | "sub.u32" => (2, |x| u32(x[0].wrapping_sub(x[1]))),
        "sub.s64" | "sub.u64" => (2, |x| Some(x[0].wrapping_sub(x[1]))),
        "neg.s32" => (1, |x| u32(x[0].wrapping_neg())),
        "mul.lo.s32" | "mul.lo.u32" => (2, |x| u32(x[0].wrapping_mul(x[1]))),
        "mul.lo.s64" | "mul.lo.u64" => (2, |x| Some(x[0].wrapping_mul(x[1]))),
        "mul.hi.u32" => (2, |x| Some((low(x[0]) * low(x[1])) >> 32)),
        "mul.wide.u32" => (2, |x| Some(low(x[0]) * low(x[1]))),
        "mul.wide.s32" => (2, |x| Some((signed(x[0]) * signed(x[1])) as u64)),
        "mad.lo.s32" | "mad.lo.u32" => (3, |x| u32(x[0].wrapping_mul(x[1]).wrapping_add(x[2]))),
        "mad.lo.s64" | "mad.lo.u64" => (3, |x| Some(x[0].wrapping_mul(x[1]).wrapping_add(x[2]))),
        "mad.wide.u32" => (3, |x| Some((low(x[0]) * low(x[1])).wrapping_add(x[2]))),
        "div.u32" => (2, |x| low(x[0]).checked_div(low(x[1]))),
        "rem.u32" => (2, |x| low(x[0]).checked_rem(low(x[1]))),
        "and.pred" | "and.b64" => (2, |x| Some(x[0] & x[1])),
        "or.pred" | "or.b64" => (2, |x| Some(x[0] | x[1])),
        "not.pred" => (1, |x| Some(x[0] ^ 1)),
        "and.b32" => (2, |x| u32(x[0] & x[1])),
        "or.b32" => (2, |x| u32(x[0] | x[1])),
        "xor.b32" => (2, |x| u32(x[0] ^ x[1])),
        "not.b32" => (1, |x| u32(!x[0])),
        // Larger shifts count as shifts by the width.
        "shl.b32" => (2, |x| u32(x[0].checked_shl(x[1] as u32).unwrap_or(0))),
        "shl.b64" => (2, |x| Some(x[0].checked_shl(x[1] as u32).unwrap_or(0))),
        "shr.u32" | "shr.b32" => (2, |x| Some(low(x[0]).checked_shr(x[1] as u32).unwrap_or(0))),
        "shr.u64" | "shr.b64" => (2, |x| Some(x[0].checked_shr(x[1] as u32).unwrap_or(0))),
        "shr.s32" => (2, |x| u32((signed(x[0]) >> low(x[1]).min(31)) as u64)),
        "shr.s64" => (2, |x| Some((x[0] as i64 >> low(x[1]).min(63)) as u64)),
        "min.u32" => (2, |x| Some(low(x[0]).min(low(x[1])))),
        "max.u32" => (2, |x| Some(low(x[0]).max(low(x[1])))),
        "min.s32" => (2, |x| u32(signed(x[0]).min(signed(x[1])) as u64)),
        "max.s32" => (2, |x| u32(signed(x[0]).max(signed(x[1])) as u64)),
        "selp.b32" | "selp.u32" | "selp.s32" | "selp.f32" => {
            (3, |x| u32(if x[2] != 0 { x[0] } else { x[1] }))
        }
        "selp.b16" => (3, |x| Some(if x[2] != 0 { x[0] } else { x[1] } & 0xFFFF)),
        "selp.b64" | "selp.u64" | "selp.s64" => (3, |x| Some(if x[2] != 0 { x[0] } else { x[1] })),
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
        "bfi.b32" => (4, |x| {
            let (position, length) = (x[2] & 0xFF, x[3] & 0xFF);
            let field = ((1u128 << length.min(64)) - 1) as u64;
            let (field, value) = match position {
                0..32 => (field << position, x[0] << position),
                _ => (0, 0),
            };
            u32(x[1] & !field | value & field)
        }),
        _ => return None,
    })
}

fn comparison(relation: &str, kind: &str) -> Option<Function> {
    macro_rules! of {
        ($value:expr) => {
            match relation {
                "eq" => |x| Some(u64::from($value(x[0]) == $value(x[1]))),
                "ne" => |x| Some(u64::from($value(x[0]) != $value(x[1]))),
                "lt" | "lo" => |x| Some(u64::from($value(x[0]) < $value(x[1]))),
                "le" | "ls" => |x| Some(u64::from($value(x[0]) <= $value(x[1]))),
                "gt" | "hi" => |x| Some(u64::from($value(x[0]) > $value(x[1]))),
                "ge" | "hs" => |x| Some(u64::from($value(x[0]) >= $value(x[1]))),
                _ => return None,
            }
        };
    }
    Some(match kind {
        "u16" | "b16" => of!(|x: u64| x as u16),
        "s16" => of!(|x: u64| x as i16),
        "u32" | "b32" => of!(low),
        "s32" => of!(signed),
        "u64" | "b64" => of!(|x: u64| x),
        "s64" => of!(|x: u64| x as i64),
        _ => return None,
    })
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
