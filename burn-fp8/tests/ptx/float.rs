//! f32 arithmetic: rounded to nearest, with subnormals kept (no `.ftz`).

use std::cmp::Ordering::{self, Equal, Greater, Less};

use super::decode::Function;

pub(super) fn function(opcode: &str) -> Option<(usize, Function)> {
    if let Some(relation) = opcode
        .strip_prefix("setp.")
        .and_then(|rest| rest.strip_suffix(".f32"))
    {
        return comparison(relation).map(|function| (2, function));
    }
    Some(match opcode {
        "add.f32" | "add.rn.f32" => (2, |x| bits(float(x[0]) + float(x[1]))),
        "sub.f32" | "sub.rn.f32" => (2, |x| bits(float(x[0]) - float(x[1]))),
        "mul.f32" | "mul.rn.f32" => (2, |x| bits(float(x[0]) * float(x[1]))),
        "fma.rn.f32" => (3, |x| bits(float(x[0]).mul_add(float(x[1]), float(x[2])))),
        "div.rn.f32" => (2, |x| bits(float(x[0]) / float(x[1]))),
        "rcp.rn.f32" => (1, |x| bits(1.0 / float(x[0]))),
        _ => return None,
    })
}

/// Relations with a `u` are also true for NaN.
fn comparison(relation: &str) -> Option<Function> {
    Some(match relation {
        "eq" => |x| truth(order(x) == Some(Equal)),
        "ne" => |x| truth(matches!(order(x), Some(Less | Greater))),
        "lt" => |x| truth(order(x) == Some(Less)),
        "le" => |x| truth(matches!(order(x), Some(Less | Equal))),
        "gt" => |x| truth(order(x) == Some(Greater)),
        "ge" => |x| truth(matches!(order(x), Some(Greater | Equal))),
        "equ" => |x| truth(matches!(order(x), Some(Equal) | None)),
        "neu" => |x| truth(order(x) != Some(Equal)),
        "ltu" => |x| truth(matches!(order(x), Some(Less) | None)),
        "leu" => |x| truth(order(x) != Some(Greater)),
        "gtu" => |x| truth(matches!(order(x), Some(Greater) | None)),
        "geu" => |x| truth(order(x) != Some(Less)),
        "num" => |x| truth(order(x).is_some()),
        "nan" => |x| truth(order(x).is_none()),
        _ => return None,
    })
}

fn order(x: &[u64; 4]) -> Option<Ordering> {
    float(x[0]).partial_cmp(&float(x[1]))
}

fn float(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// Bits of a result. A NaN has the bits that NVIDIA's GPUs give it.
fn bits(value: f32) -> Option<u64> {
    Some(u64::from(if value.is_nan() {
        0x7FFF_FFFF
    } else {
        value.to_bits()
    }))
}

fn truth(value: bool) -> Option<u64> {
    Some(u64::from(value))
}
