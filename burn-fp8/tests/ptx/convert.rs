//! Conversions between types, and from addresses in a space to generic ones.

use std::cmp::Ordering;

use half::{bf16, f16};

use super::{
    decode::Function,
    fp8::Fp8,
    thread::{PARAMETER_WINDOW, SHARED_WINDOW, WINDOW},
};

pub(super) fn function(opcode: &str) -> Option<(usize, Function)> {
    // The first operand becomes the upper code.
    match opcode {
        "cvt.rn.satfinite.e4m3x2.f32" => return Some((2, |x| codes(Fp8::E4m3, x))),
        "cvt.rn.satfinite.e5m2x2.f32" => return Some((2, |x| codes(Fp8::E5m2, x))),
        _ => {}
    }
    let function: Function = match opcode {
        "cvt.u16.u32" => |x| Some(x[0] & 0xFFFF),
        "cvt.u32.u64" => |x| Some(x[0] & 0xFFFF_FFFF),
        "cvt.u64.u32" => |x| Some(x[0] & 0xFFFF_FFFF),
        "cvt.rn.f32.u32" => |x| bits(x[0] as u32 as f32),
        "cvt.rz.f32.s32" => |x| {
            let [below, above] = neighbors(x[0]);
            bits(if below < 0.0 { above } else { below })
        },
        "cvt.rm.f32.s32" => |x| bits(neighbors(x[0])[0]),
        "cvt.rp.f32.s32" => |x| bits(neighbors(x[0])[1]),
        "cvt.rn.f16.s32" => |x| Some(u64::from(f16::from_f32(to_odd(x[0])).to_bits())),
        "cvt.rn.bf16.s32" => |x| Some(u64::from(bf16::from_f32(to_odd(x[0])).to_bits())),
        // Rounds towards zero, and saturates.
        "cvt.rzi.u32.f32" => |x| Some(u64::from(float(x[0]) as u32)),
        "cvt.f32.f16" => |x| bits(f16::from_bits(x[0] as u16).to_f32()),
        "cvt.f32.bf16" => |x| Some((x[0] & 0xFFFF) << 16),
        "cvt.rn.f16.f32" => |x| {
            let value = float(x[0]);
            let half = if value.is_nan() {
                0x7FFF
            } else {
                f16::from_f32(value).to_bits()
            };
            Some(u64::from(half))
        },
        "cvt.rn.bf16.f32" => |x| {
            let value = float(x[0]);
            let brain = if value.is_nan() {
                0x7FFF
            } else {
                bf16::from_f32(value).to_bits()
            };
            Some(u64::from(brain))
        },
        "cvta.to.global.u64" => |x| (x[0] < PARAMETER_WINDOW).then_some(x[0]),
        "cvta.to.shared.u64" => |x| within(SHARED_WINDOW, x[0]),
        "cvta.shared.u64" => |x| (x[0] < WINDOW).then_some(SHARED_WINDOW + x[0]),
        "cvta.param.u64" => |x| (x[0] < WINDOW).then_some(PARAMETER_WINDOW + x[0]),
        _ => return None,
    };
    Some((1, function))
}

/// The offset of a generic address in a window.
pub(super) fn within(window: u64, address: u64) -> Option<u64> {
    address
        .checked_sub(window)
        .filter(|offset| *offset < WINDOW)
}

fn codes(format: Fp8, x: &[u64; 4]) -> Option<u64> {
    let [upper, lower] = [x[0], x[1]].map(|bits| u64::from(format.nearest(float(bits))));
    Some(upper << 8 | lower)
}

/// The floats next to an integer, or twice the one that equals it.
fn neighbors(integer: u64) -> [f32; 2] {
    let exact = f64::from(integer as i32);
    let nearest = exact as f32;
    match f64::from(nearest).total_cmp(&exact) {
        Ordering::Less => [nearest, nearest.next_up()],
        Ordering::Equal => [nearest; 2],
        Ordering::Greater => [nearest.next_down(), nearest],
    }
}

/// The integer, or its neighbor with an odd last bit: rounding that to fewer bits is rounding the integer.
fn to_odd(integer: u64) -> f32 {
    let [below, above] = neighbors(integer);
    match below.to_bits() % 2 {
        0 => above,
        _ => below,
    }
}

fn float(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn bits(value: f32) -> Option<u64> {
    Some(u64::from(value.to_bits()))
}
