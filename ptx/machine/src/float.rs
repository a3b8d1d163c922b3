//! Arithmetic of floats.
//!
//! Approximate instructions give the nearest result, which is better than the errors that the ISA allows.

use std::cmp::Ordering::{self, Equal, Greater, Less};

use super::{
    decode::Function,
    integer::{combination, halves},
    number::{Format, Round, sum_to_odd},
};

/// What the words between an instruction's name and its type say.
#[derive(Default)]
struct Modifiers {
    round: Option<Round>,
    flush: bool,
    saturate: bool,
    /// The least and the greatest of two is NaN if one of them is.
    nan: bool,
}

/// The number of operands of an opcode, and its function.
pub(super) fn function(opcode: &str) -> Option<(usize, Function)> {
    let mut words: Vec<&str> = opcode.split('.').collect();
    let (name, kind) = (words.remove(0), words.pop()?);
    if let Some(kind) = kind.strip_suffix("x2") {
        let of_one = format!("{}.{kind}", opcode.rsplit_once('.')?.0);
        let (count, function) = function(&of_one)?;
        return Some((count, halves(function)));
    }
    let format = Format::named(kind)?;
    if name == "setp" {
        return comparison(&words, format);
    }
    let mut modifiers = Modifiers::default();
    for word in words {
        match word {
            "ftz" => modifiers.flush = true,
            "sat" => modifiers.saturate = true,
            "NaN" => modifiers.nan = true,
            "approx" | "full" => {}
            _ => modifiers.round = Some(Round::named(word)?),
        }
    }
    let (count, function) = exact(name, format, &modifiers)?;
    let Modifiers {
        flush, saturate, ..
    } = modifiers;
    if !flush && !saturate {
        return Some((count, function));
    }
    let flushed = move |bits| if flush { format.flushed(bits) } else { bits };
    let whole = move |x: &[u64; 4]| {
        let result = flushed(function(&x.map(flushed))?);
        let value = format.value(result);
        Some(match saturate {
            // NaN becomes zero too.
            true if value.is_nan() => 0,
            true => format.bits(value.clamp(0.0, 1.0) + 0.0, Round::Nearest),
            false => result,
        })
    };
    Some((count, Box::new(whole)))
}

/// The function without flushing and saturation.
fn exact(name: &str, format: Format, modifiers: &Modifiers) -> Option<(usize, Function)> {
    let round = modifiers.round.unwrap_or(Round::Nearest);
    let sign = format.bits(-0.0, Round::Nearest);
    if format == Format::F32 && round == Round::Nearest {
        type Fast = fn(&[u64; 4]) -> f32;
        let fast: Option<(usize, Fast)> = match name {
            "add" => Some((2, |x| float(x[0]) + float(x[1]))),
            "sub" => Some((2, |x| float(x[0]) - float(x[1]))),
            "mul" => Some((2, |x| float(x[0]) * float(x[1]))),
            "fma" | "mad" => Some((3, |x| float(x[0]).mul_add(float(x[1]), float(x[2])))),
            _ => None,
        };
        if let Some((count, compute)) = fast {
            return Some((count, Box::new(move |x| bits(compute(x)))));
        }
    }
    if format == Format::F64 && round != Round::Nearest {
        return None;
    }
    let of = move |bits| format.value(bits);
    let to = move |value| Some(format.bits(value, round));
    let unary = |compute: fn(f64) -> f64| -> Option<(usize, Function)> {
        Some((1, Box::new(move |x| to(compute(of(x[0]))))))
    };
    let nan = modifiers.nan;
    let one_of = |wanted: Ordering| -> Option<(usize, Function)> {
        let choose = move |x: &[u64; 4]| {
            let values = [of(x[0]), of(x[1])];
            Some(match values.map(f64::is_nan) {
                [true, true] => format.nan(),
                [true, _] | [_, true] if nan => format.nan(),
                [true, _] => x[1],
                [_, true] => x[0],
                // Of zeros, the negative one is less.
                _ if values[0].total_cmp(&values[1]) == wanted => x[0],
                _ => x[1],
            })
        };
        Some((2, Box::new(choose)))
    };
    let sum = move |one: f64, other: f64| match format {
        Format::F64 => one + other,
        _ => sum_to_odd(one, other),
    };
    match name {
        "add" => Some((2, Box::new(move |x| to(sum(of(x[0]), of(x[1])))))),
        "sub" => Some((2, Box::new(move |x| to(sum(of(x[0]), -of(x[1])))))),
        // In f64 the product of others is exact.
        "mul" => Some((2, Box::new(move |x| to(of(x[0]) * of(x[1]))))),
        "fma" | "mad" => Some((
            3,
            Box::new(move |x| {
                to(match format {
                    Format::F64 => of(x[0]).mul_add(of(x[1]), of(x[2])),
                    _ => sum(of(x[0]) * of(x[1]), of(x[2])),
                })
            }),
        )),
        "div" if round == Round::Nearest => Some((2, Box::new(move |x| to(of(x[0]) / of(x[1]))))),
        "rcp" if round == Round::Nearest => unary(|x| 1.0 / x),
        "sqrt" if round == Round::Nearest => unary(f64::sqrt),
        "rsqrt" => unary(|x| 1.0 / x.sqrt()),
        "ex2" => unary(f64::exp2),
        "lg2" => unary(f64::log2),
        "sin" => unary(f64::sin),
        "cos" => unary(f64::cos),
        "tanh" => unary(f64::tanh),
        "neg" => Some((1, Box::new(move |x| Some(x[0] ^ sign)))),
        "abs" => Some((1, Box::new(move |x| Some(x[0] & !sign)))),
        // The sign of the first, the magnitude of the second.
        "copysign" => Some((2, Box::new(move |x| Some(x[0] & sign | x[1] & !sign)))),
        "min" => one_of(Less),
        "max" => one_of(Greater),
        _ => None,
    }
}

/// `setp`. Relations with a `u` are also true for NaN. With `and`, `or` or `xor`, the result is combined with a third operand.
fn comparison(words: &[&str], format: Format) -> Option<(usize, Function)> {
    let relation: fn(Option<Ordering>) -> bool = match *words.first()? {
        "eq" => |order| order == Some(Equal),
        "ne" => |order| matches!(order, Some(Less | Greater)),
        "lt" => |order| order == Some(Less),
        "le" => |order| matches!(order, Some(Less | Equal)),
        "gt" => |order| order == Some(Greater),
        "ge" => |order| matches!(order, Some(Greater | Equal)),
        "equ" => |order| matches!(order, Some(Equal) | None),
        "neu" => |order| order != Some(Equal),
        "ltu" => |order| matches!(order, Some(Less) | None),
        "leu" => |order| order != Some(Greater),
        "gtu" => |order| matches!(order, Some(Greater) | None),
        "geu" => |order| order != Some(Less),
        "num" => |order| order.is_some(),
        "nan" => |order| order.is_none(),
        _ => return None,
    };
    let (flush, combined) = match words[1..] {
        [] => (false, None),
        ["ftz"] => (true, None),
        [combined] => (false, Some(combined)),
        [combined, "ftz"] => (true, Some(combined)),
        _ => return None,
    };
    let compare = move |x: &[u64; 4]| {
        let value = |bits| match flush {
            true => format.value(format.flushed(bits)),
            false => format.value(bits),
        };
        u64::from(relation(value(x[0]).partial_cmp(&value(x[1]))))
    };
    combination(compare, combined)
}

fn float(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// Bits of a result. A NaN has the bits that NVIDIA's GPUs give it.
fn bits(value: f32) -> Option<u64> {
    Some(match value.is_nan() {
        true => Format::F32.nan(),
        false => u64::from(value.to_bits()),
    })
}
