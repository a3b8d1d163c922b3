//! Instructions that compute.

use super::{STORE, fails, run};

/// The expected results follow the PTX ISA's description of each instruction.
#[test]
fn arithmetic_is_that_of_the_isa() {
    for (statements, expected) in [
        ("sub.s32 %r9, %r0, 1;", u32::MAX),
        ("mad.lo.s32 %r9, -3, 5, 16;", 1),
        ("mul.hi.u32 %r9, -1, -1;", u32::MAX - 1),
        (
            "mul.wide.u32 %rd2, -1, -1; shr.u64 %rd2, %rd2, 32; cvt.u32.u64 %r9, %rd2;",
            u32::MAX - 1,
        ),
        ("div.u32 %r9, 17, 5;", 3),
        ("rem.u32 %r9, 17, 5;", 2),
        // Shifts by more than the width, and of the sign.
        ("shl.b32 %r9, 1, 32;", 0),
        ("shr.s32 %r9, -8, 40;", u32::MAX),
        ("shr.s64 %rd2, -8, 1; cvt.u32.u64 %r9, %rd2;", -4i32 as u32),
        ("bfi.b32 %r9, 0xFF, 0x12345678, 8, 4;", 0x1234_5F78),
        ("bfi.b32 %r9, 5, 3, 3, 29;", 5 << 3 | 3),
        // The ISA: "the bytes in the two source registers are numbered from 0 to 7: {b, a} = {{b7, b6, b5, b4}, {b3, b2, b1,
        // b0}}".
        ("prmt.b32 %r9, 0x33221100, 0x77665544, 0x7531;", 0x7755_3311),
        ("prmt.b32 %r9, 0x33228100, 0x77665544, 0x09C9;", 0x00FF_00FF),
        ("prmt.b32 %r9, 0x33228100, 0, 0x1111U;", 0x8181_8181),
        ("max.u32 %r9, 1, -1;", u32::MAX),
        ("max.s32 %r9, 1, -1;", 1),
        ("setp.lt.s32 %p0, -1, 0; selp.b32 %r9, 7, 8, %p0;", 7),
        ("setp.lt.u32 %p0, -1, 0; selp.b32 %r9, 7, 8, %p0;", 8),
        (
            "setp.lt.u32 %p0, -1, 0; selp.b16 %r9, 0x17777, 0x18888, %p0;",
            0x8888,
        ),
        // NaN: ordered relations are false, unordered ones true.
        (
            "setp.le.f32 %p0, 0f7FC00000, 0f00000000; selp.b32 %r9, 7, 8, %p0;",
            8,
        ),
        (
            "setp.leu.f32 %p0, 0f7FC00000, 0f00000000; selp.b32 %r9, 7, 8, %p0;",
            7,
        ),
        (
            "setp.ne.f32 %p0, 0f7FC00000, 0f00000000; selp.b32 %r9, 7, 8, %p0;",
            8,
        ),
        ("cvt.rzi.u32.f32 %r9, 0fC0000000;", 0),
        ("cvt.rzi.u32.f32 %r9, 0f7F800000;", u32::MAX),
        // 2^24 + 1, a tie.
        (
            "cvt.rn.f32.u32 %f0, 16777217; mov.b32 %r9, %f0;",
            16_777_216f32.to_bits(),
        ),
        // Its neighbors: -2^24 - 2 and -2^24.
        (
            "cvt.rm.f32.s32 %f0, -16777217; mov.b32 %r9, %f0;",
            (-16_777_218f32).to_bits(),
        ),
        (
            "cvt.rp.f32.s32 %f0, -16777217; mov.b32 %r9, %f0;",
            (-16_777_216f32).to_bits(),
        ),
        (
            "cvt.rz.f32.s32 %f0, -16777217; mov.b32 %r9, %f0;",
            (-16_777_216f32).to_bits(),
        ),
        (
            "cvt.rz.f32.s32 %f0, 16777217; mov.b32 %r9, %f0;",
            16_777_216f32.to_bits(),
        ),
        // -2049, a tie in f16.
        (
            "cvt.rn.f16.s32 %r2, -2049; cvt.f32.f16 %f0, %r2; mov.b32 %r9, %f0;",
            (-2048f32).to_bits(),
        ),
        // 2^24 + 2^16 + 1 is just beyond a tie in bf16, and no f32.
        (
            "cvt.rn.bf16.s32 %r2, 16842753; cvt.f32.bf16 %f0, %r2; mov.b32 %r9, %f0;",
            16_908_288f32.to_bits(),
        ),
        // One rounding: (1 + 2^-23)^2 - 1 - 2^-22 is 2^-46.
        (
            "fma.rn.f32 %f0, 0f3F800001, 0f3F800001, 0fBF800002; mov.b32 %r9, %f0;",
            2f32.powi(-46).to_bits(),
        ),
        // 2048 + 1, a tie in f16.
        (
            "cvt.rn.f16.f32 %r2, 0f45001000; cvt.f32.f16 %f0, %r2; mov.b32 %r9, %f0;",
            2048f32.to_bits(),
        ),
        // 1 + 2^-8, a tie in bf16.
        (
            "cvt.rn.bf16.f32 %r2, 0f3F808000; cvt.f32.bf16 %f0, %r2; mov.b32 %r9, %f0;",
            1f32.to_bits(),
        ),
        // 17 is a tie between 16 and 18 in e4m3, and -1e9 saturates. 2.5 is exact in e5m2, and NaN becomes the canonical code.
        (
            "cvt.rn.satfinite.e4m3x2.f32 %r9, 0f41880000, 0fCE6E6B28;",
            0x58FE,
        ),
        (
            "cvt.rn.satfinite.e5m2x2.f32 %r9, 0f40200000, 0fFFC00000;",
            0x417F,
        ),
        (
            "mov.b32 %r2, 0x40490FDB; mov.b32 %r9, {0, %r2};",
            0x0FDB_0000,
        ),
        ("mov.u32 %r9, %ntid.x; add.s32 %r9, %r9, %nctaid.y;", 2),
    ] {
        let found = run(&format!("{statements} {STORE}"), 1).unwrap()[0];
        assert_eq!(found, expected, "{statements}");
    }
}

#[test]
fn threads_of_a_warp_exchange_values() {
    let body = format!("shfl.sync.bfly.b32 %r9, %r0, 5, 0x1f, 0xffffffff; {STORE}");
    let expected: Vec<u32> = (0..64).map(|thread| thread ^ 5).collect();
    assert_eq!(run(&body, 64).unwrap()[..64], expected);
    // All of them have to be there that have not ended.
    let half = format!("mov.u32 %r9, 0; setp.lt.u32 %p0, %r0, 48; @%p0 {body}");
    fails(
        &half.replace("@%p0", "@!%p0 bar.sync 0; @%p0"),
        64,
        "wait for ever",
    );
}
