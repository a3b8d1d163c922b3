//! Arithmetic and conversions of all floats, against what the PTX ISA says of them and against integers that hold the exact results.

use super::{STORE, run};

/// Runs statements that leave a result in `%r9`.
#[track_caller]
fn result(statements: &str) -> u32 {
    run(&format!("{statements} {STORE}"), 1).unwrap()[0]
}

#[test]
fn halves_are_rounded_once() {
    for (statements, expected) in [
        // bf16: 1 + 2^-8 + 2^-40 lies just above a tie, in one rounding.
        (
            "mov.b16 %r2, 0x3F80; mov.b16 %r3, 0x3F81; mov.b16 %r4, 0x3B80; fma.rn.bf16 %r9, %r3, %r2, %r4;",
            0x3F82,
        ),
        // 1 * 2^-8 + 1 is a tie, and even; with 2^-40 more it is not.
        (
            "mov.b16 %r2, 0x3F80; mov.b16 %r3, 0x3B80; fma.rn.bf16 %r9, %r2, %r3, %r2;",
            0x3F80,
        ),
        // f16: 2048 + 1 is a tie, 2050 + 1 too.
        (
            "mov.b16 %r2, 0x6800; mov.b16 %r3, 0x3C00; add.f16 %r9, %r2, %r3;",
            0x6800,
        ),
        (
            "mov.b16 %r2, 0x6801; mov.b16 %r3, 0x3C00; add.f16 %r9, %r2, %r3;",
            0x6802,
        ),
        // Both halves: (2, 3) * (5, 7).
        (
            "mov.b32 %r2, 0x40004200; mov.b32 %r3, 0x45004700; mul.f16x2 %r9, %r2, %r3;",
            0x4900_4D40,
        ),
        ("mov.b32 %r2, 0xC0404000; abs.bf16x2 %r9, %r2;", 0x4040_4000),
        ("mov.b32 %r2, 0x40404000; neg.bf16x2 %r9, %r2;", 0xC040_C000),
        // Upper and lower: 1 and 2.
        (
            "cvt.rn.bf16x2.f32 %r9, 0f3F800000, 0f40000000;",
            0x3F80_4000,
        ),
        ("cvt.rn.f16x2.f32 %r9, 0f3F800000, 0f40000000;", 0x3C00_4000),
        // Codes of e4m3: 0x38 is 1, 0x40 is 2.
        (
            "mov.b16 %r2, 0x3840; cvt.rn.f16x2.e4m3x2 %r9, %r2;",
            0x3C00_4000,
        ),
        // tf32: ties away from zero. 1 + 2^-11 is one.
        ("cvt.rna.tf32.f32 %r9, 0f3F801000;", 0x3F80_2000),
        ("cvt.rna.tf32.f32 %r9, 0f3F800FFF;", 0x3F80_0000),
    ] {
        assert_eq!(result(statements), expected, "{statements}");
    }
}

#[test]
fn modifiers_mean_what_the_isa_says() {
    for (statements, expected) in [
        // A subnormal is kept, and flushed.
        ("add.f32 %f0, 0f00000001, 0f00000000;", 1),
        ("add.ftz.f32 %f0, 0f00000001, 0f00000000;", 0),
        ("mul.ftz.f32 %f0, 0f80000001, 0f3F800000;", 0x8000_0000),
        // Saturated to [0, 1], and NaN to 0.
        ("add.sat.f32 %f0, 0f40000000, 0f40000000;", 0x3F80_0000),
        ("add.sat.f32 %f0, 0fC0000000, 0f3F800000;", 0),
        ("add.sat.f32 %f0, 0f7FC00000, 0f3F800000;", 0),
        // 1 + 2^-24: down, up, towards zero.
        ("add.rm.f32 %f0, 0f3F800000, 0f33800000;", 0x3F80_0000),
        ("add.rp.f32 %f0, 0f3F800000, 0f33800000;", 0x3F80_0001),
        ("add.rz.f32 %f0, 0fBF800000, 0fB3800000;", 0xBF80_0000),
        // Of a number and NaN, the number, unless NaN is asked for; -0 is less than +0.
        ("min.f32 %f0, 0f7FC00000, 0f40000000;", 0x4000_0000),
        ("max.NaN.f32 %f0, 0f40000000, 0f7FC00000;", 0x7FFF_FFFF),
        ("min.f32 %f0, 0f00000000, 0f80000000;", 0x8000_0000),
        ("max.f32 %f0, 0f80000000, 0f00000000;", 0),
        // The sign of the first, the magnitude of the second.
        ("copysign.f32 %f0, 0f80000000, 0f40000000;", 0xC000_0000),
        ("ex2.approx.f32 %f0, 0fC0400000;", 0x3E00_0000),
        ("lg2.approx.f32 %f0, 0f3E000000;", 0xC040_0000),
        ("sqrt.rn.f32 %f0, 0f40800000;", 0x4000_0000),
        ("rsqrt.approx.f32 %f0, 0f40800000;", 0x3F00_0000),
        ("rcp.rn.f32 %f0, 0f40800000;", 0x3E80_0000),
        ("div.full.f32 %f0, 0f40800000, 0f40000000;", 0x4000_0000),
        ("tanh.approx.f32 %f0, 0f7F800000;", 0x3F80_0000),
        ("sin.approx.f32 %f0, 0f80000000;", 0x8000_0000),
        ("cos.approx.f32 %f0, 0f00000000;", 0x3F80_0000),
        // To an integer, in all directions: -2.5.
        ("cvt.rni.f32.f32 %f0, 0fC0200000;", 0xC000_0000),
        ("cvt.rmi.f32.f32 %f0, 0fC0200000;", 0xC040_0000),
        ("cvt.rpi.f32.f32 %f0, 0fC0200000;", 0xC000_0000),
    ] {
        assert_eq!(
            result(&format!("{statements} mov.b32 %r9, %f0;")),
            expected,
            "{statements}"
        );
    }
}

#[test]
fn integers_and_floats_become_each_other() {
    for (statements, expected) in [
        ("cvt.rni.s32.f32 %r9, 0fC0200000;", -2i32 as u32),
        ("cvt.rmi.s32.f32 %r9, 0fC0200000;", -3i32 as u32),
        // Clamped, and NaN is zero; in 64 bits it is the most negative number.
        ("cvt.rzi.s32.f32 %r9, 0f4F800000;", i32::MAX as u32),
        ("cvt.rzi.u32.f32 %r9, 0fBF800000;", 0),
        ("cvt.rzi.s32.f32 %r9, 0f7FC00000;", 0),
        (
            "cvt.rzi.s64.f32 %rd2, 0f7FC00000; shr.u64 %rd2, %rd2, 32; cvt.u32.u64 %r9, %rd2;",
            1 << 31,
        ),
        // By sign, or by zeros.
        ("mov.b32 %r2, 0x12FF; cvt.s32.s8 %r9, %r2;", u32::MAX),
        ("mov.b32 %r2, 0x12FF; cvt.u32.u8 %r9, %r2;", 0xFF),
        (
            "mov.b32 %r2, -5; cvt.s64.s32 %rd2, %r2; shr.u64 %rd2, %rd2, 32; cvt.u32.u64 %r9, %rd2;",
            u32::MAX,
        ),
        ("mov.b32 %r2, 300; cvt.sat.u8.s32 %r9, %r2;", 255),
        (
            "mov.b32 %r2, -300; cvt.sat.s8.s32 %r9, %r2; and.b32 %r9, %r9, 0xFFFF;",
            0xFF80,
        ),
        // 2^24 + 1 in f64 is exact.
        (
            "cvt.rn.f64.s32 %rd2, 16777217; cvt.rzi.s32.f64 %r9, %rd2;",
            16_777_217,
        ),
        // Comparisons of f16, in which 1 < 2, and of a subnormal that is flushed.
        (
            "mov.b16 %r2, 0x3C00; mov.b16 %r3, 0x4000; setp.lt.f16 %p0, %r2, %r3; selp.b32 %r9, 7, 8, %p0;",
            7,
        ),
        (
            "setp.gt.ftz.f32 %p0, 0f00000001, 0f00000000; selp.b32 %r9, 7, 8, %p0;",
            8,
        ),
        (
            "setp.gt.f32 %p1, 0f00000000, 0f3F800000; setp.gt.or.f32 %p0, 0f3F800000, 0f00000000, %p1; selp.b32 %r9, 7, 8, %p0;",
            7,
        ),
    ] {
        assert_eq!(result(statements), expected, "{statements}");
    }
}

/// Against the same in wider integers.
#[test]
fn bits_are_those_of_the_isa() {
    let (a, b) = (0x1234_5678u32, 0x9ABC_DEF0u32);
    let both = u64::from(b) << 32 | u64::from(a);
    for (statements, expected) in [
        (
            "shf.l.wrap.b32 %r9, %r2, %r3, 36;",
            (both << 4 >> 32) as u32,
        ),
        ("shf.r.wrap.b32 %r9, %r2, %r3, 36;", (both >> 4) as u32),
        ("shf.l.clamp.b32 %r9, %r2, %r3, 36;", a),
        ("shf.r.clamp.b32 %r9, %r2, %r3, 36;", b),
        ("bfe.u32 %r9, %r2, 8, 12;", a >> 8 & 0xFFF),
        ("bfe.s32 %r9, %r3, 20, 12;", (b as i32 >> 20) as u32),
        (
            "mov.b64 %rd2, {%r2, %r3}; bfi.b64 %rd2, %rd2, 0, 32, 16; shr.u64 %rd2, %rd2, 32; cvt.u32.u64 %r9, %rd2;",
            a & 0xFFFF,
        ),
        (
            "add.s16x2 %r9, %r2, %r3;",
            (0x1234 + 0x9ABC) << 16 | (0x5678 + 0xDEF0) & 0xFFFF,
        ),
        ("max.s16x2 %r9, %r2, %r3;", 0x1234_5678),
        ("max.u16x2 %r9, %r2, %r3;", 0x9ABC_DEF0),
        ("popc.b32 %r9, %r2;", a.count_ones()),
        ("clz.b32 %r9, %r2;", 3),
        ("brev.b32 %r9, %r2;", a.reverse_bits()),
        // The table of a & (b ^ c), by the ISA's recipe: 0xF0 & (0xCC ^ 0xAA).
        ("lop3.b32 %r9, %r2, %r3, -1, 0x60;", a & !b),
        (
            "mul.hi.s32 %r9, %r2, %r3;",
            ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32,
        ),
        (
            "mad.hi.u32 %r9, %r2, %r3, 5;",
            ((u64::from(a) * u64::from(b)) >> 32) as u32 + 5,
        ),
        ("mul.wide.u16 %r9, %r2, %r3;", 0x5678 * 0xDEF0),
        (
            "mul.wide.s16 %r9, %r2, %r3;",
            (0x5678 * i32::from(0xDEF0u16 as i16)) as u32,
        ),
        ("div.s32 %r9, %r3, 7;", (b as i32 / 7) as u32),
        ("rem.s32 %r9, %r3, 7;", (b as i32 % 7) as u32),
        ("abs.s32 %r9, %r3;", (b as i32).unsigned_abs()),
        ("shr.u16 %r9, %r2, 4;", 0x567),
        ("xor.b32 %r9, %r2, %r3; not.b32 %r9, %r9;", !(a ^ b)),
    ] {
        let loaded = format!("mov.b32 %r2, {a}; mov.b32 %r3, {b}; {statements}");
        assert_eq!(result(&loaded), expected, "{statements}");
    }
}

/// A product of 64 bits by 32, plus a number, in registers of 32 bits; and a difference of 64 bits.
#[test]
fn carries_go_on() {
    let (a, b, c) = (0xFEDC_BA98_7654_3210u64, 0x89AB_CDEFu32, 0xFFFF_FFFFu32);
    let product = u128::from(a) * u128::from(b) + u128::from(c);
    let loaded = format!(
        "mov.b32 %r2, {}; mov.b32 %r3, {}; mov.b32 %r4, {b}; mov.b32 %r5, {c};",
        a as u32,
        (a >> 32) as u32
    );
    let multiplied = "mad.lo.cc.u32 %r6, %r2, %r4, %r5; madc.hi.u32 %r7, %r2, %r4, 0;
                      mad.lo.cc.u32 %r8, %r3, %r4, %r7; madc.hi.u32 %r10, %r3, %r4, 0;";
    for (register, word) in [("%r6", 0), ("%r8", 1), ("%r10", 2)] {
        let found = result(&format!("{loaded} {multiplied} mov.b32 %r9, {register};"));
        assert_eq!(found, (product >> (32 * word)) as u32, "{word}");
    }
    let subtracted = "sub.cc.u32 %r6, %r2, %r5; subc.u32 %r9, %r3, 0;";
    let difference = a - u64::from(c);
    assert_eq!(
        result(&format!("{loaded} {subtracted}")),
        (difference >> 32) as u32
    );
    let added = "add.cc.u32 %r6, %r2, %r5; addc.u32 %r9, %r3, 0;";
    let sum = a + u64::from(c);
    assert_eq!(result(&format!("{loaded} {added}")), (sum >> 32) as u32);
}
