//! Tests of the machine that runs PTX: the results of small kernels, and that it detects what is missing in them.
//!
//! Every kernel here is correct as it stands. Each of its fences, waits and barriers is left out once.

use crate::ptx::{Argument, Global, Kernel, Launch, TensorMap};

/// The size of the buffer, in which word `i` is `i`.
const WORDS: u32 = 1024;

/// Runs a body with `threads` threads, and returns the buffer afterwards.
fn run(body: &str, threads: u32) -> Result<Vec<u32>, String> {
    let kernel = Kernel::new(&format!(
        ".version 8.8
         .target sm_90a
         .address_size 64
         .extern .shared .align 1024 .b8 tiles[];
         .visible .entry test(.param .u64 buffer, .param .align 128 .b8 map[128])
         .maxntid 128, 1, 1
         {{
         .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .f32 %f<8>;
         mov.u32 %r0, %tid.x;
         ld.param.u64 %rd0, [buffer];
         mov.u64 %rd1, tiles;
         cvt.u32.u64 %r1, %rd1;
         {body}
         ret;
         }}"
    ));
    let mut global = Global::default();
    let address = global.allocate(4 * WORDS as usize);
    for word in 0..WORDS {
        global.write(address + u64::from(4 * word), &word.to_le_bytes())?;
    }
    // Rows of 128 bytes, of which the last is out of bounds.
    let map = TensorMap {
        address,
        sizes: [128, 7],
        pitch: 128,
        tile: [128, 8],
    };
    let launch = Launch {
        grid: [1; 3],
        threads: [threads, 1, 1],
        dynamic_shared: 10 << 10,
        arguments: vec![Argument::Pointer(address), Argument::TensorMap(map)],
    };
    kernel.run(launch, &mut global)?;
    let bytes = global.copy(address, 4 * WORDS as usize)?;
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    Ok(bytes.chunks_exact(4).map(word).collect())
}

#[track_caller]
fn fails(body: &str, threads: u32, with: &str) {
    match run(body, threads) {
        Ok(_) => panic!("it runs, but for: {with}"),
        Err(error) => assert!(error.contains(with), "{error}, but for: {with}"),
    }
}

/// Leaving out any of the statements causes its error.
#[track_caller]
fn needs(body: &str, threads: u32, statements: &[(&str, &str)]) {
    for (statement, error) in statements {
        assert!(body.contains(statement), "{statement}");
        fails(&body.replacen(statement, "", 1), threads, error);
    }
}

/// Stores `%r9` in the thread's word of the buffer.
const STORE: &str =
    "mul.wide.u32 %rd7, %r0, 4; add.s64 %rd7, %rd0, %rd7; st.global.u32 [%rd7], %r9;";

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
fn barriers_order_shared_memory() {
    let body = format!(
        "shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1;
         st.shared.u32 [%r2], %r0;
         bar.sync 0;
         xor.b32 %r3, %r2, 4; ld.shared.u32 %r9, [%r3];
         {STORE}"
    );
    assert_eq!(run(&body, 64).unwrap()[..4], [1, 0, 3, 2]);
    needs(
        &body,
        64,
        &[
            // The neighbor has not run yet.
            ("bar.sync 0;", "nobody wrote"),
            ("st.shared.u32 [%r2], %r0;", "nobody wrote"),
        ],
    );
    let backwards = body.replace("bar.sync 0;", "").replace("4; ld", "-4; ld");
    let backwards = backwards.replace(
        "xor.b32 %r3, %r2, -4;",
        "max.u32 %r3, %r2, 1028; add.s32 %r3, %r3, -4;",
    );
    fails(&backwards, 64, "no barrier orders");
    // Writing what others read needs a barrier too.
    fails(
        &format!("{body} st.shared.u32 [%r2], %r0;"),
        64,
        "no barrier orders",
    );
    let half = "setp.lt.u32 %p0, %r0, 32; @%p0 bar.sync 0;";
    fails(half, 64, "wait for ever");
    fails("@%p0 bar.sync 0;", 64, "nothing wrote");
}

#[test]
fn copies_are_waited_for() {
    let body = format!(
        "shl.b32 %r2, %r0, 4; add.s32 %r3, %r1, %r2; cvt.u64.u32 %rd2, %r2; add.s64 %rd3, %rd0, %rd2;
         mov.u32 %r4, 6;
         cp.async.cg.shared.global [%r3], [%rd3], 16, %r4;
         cp.async.commit_group;
         cp.async.wait_group 0;
         bar.sync 0;
         xor.b32 %r5, %r3, 16; ld.shared.u32 %r9, [%r5+4];
         {STORE}"
    );
    // Two bytes of the second word, then zeros.
    assert_eq!(run(&body, 64).unwrap()[..3], [5, 1, 13]);
    needs(
        &body,
        64,
        &[
            ("cp.async.commit_group;", "on its way"),
            ("cp.async.wait_group 0;", "on its way"),
            ("bar.sync 0;", "nobody wrote"),
        ],
    );
    // A thread needs no barrier for its own data.
    let own = body.replace("xor.b32 %r5, %r3, 16;", "mov.u32 %r5, %r3;");
    assert_eq!(
        run(&own.replace("bar.sync 0;", ""), 64).unwrap()[..3],
        [1, 5, 9]
    );
    fails(
        &body.replace("mov.u32 %r4, 6;", "mov.u32 %r4, 6; add.s32 %r3, %r3, 8;"),
        64,
        "copy of 6 bytes",
    );
}

#[test]
fn wgmma_is_fenced_and_waited_for() {
    // Ones in e4m3: 64 rows, and 8 columns, of 128 bytes.
    let body = format!(
        "mov.u32 %r2, %r0; mov.u32 %r4, 0x38383838;
         fill: shl.b32 %r3, %r2, 2; add.s32 %r3, %r3, %r1; st.shared.u32 [%r3], %r4;
         add.s32 %r2, %r2, 128; setp.lt.u32 %p0, %r2, 2304; @%p0 bra fill;
         fence.proxy.async.shared::cta;
         bar.sync 0;
         shr.u32 %r5, %r1, 4; cvt.u64.u32 %rd2, %r5;
         or.b64 %rd2, %rd2, 0x4000004000010000; add.s64 %rd3, %rd2, 512;
         setp.ne.s32 %p1, %r1, %r1;
         wgmma.fence.sync.aligned;
         wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{%f0, %f1, %f2, %f3}}, %rd2, %rd3, %p1, 1, 1;
         setp.eq.s32 %p1, %r1, %r1;
         wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{%f0, %f1, %f2, %f3}}, %rd2, %rd3, %p1, 1, 1;
         wgmma.commit_group.sync.aligned;
         wgmma.wait_group.sync.aligned 0;
         mov.b32 %r9, %f3;
         {STORE}"
    );
    assert_eq!(run(&body, 128).unwrap()[..128], [64f32.to_bits(); 128]);
    needs(
        &body,
        128,
        &[
            ("fence.proxy.async.shared::cta;", "no fence.proxy.async"),
            ("bar.sync 0;", "no barrier orders"),
            ("wgmma.fence.sync.aligned;", "without a wgmma.fence"),
            ("wgmma.commit_group.sync.aligned;", "wgmma still writes"),
            ("wgmma.wait_group.sync.aligned 0;", "wgmma still writes"),
        ],
    );
    let with = |from: &str, to: &str| body.replace(from, to);
    fails(
        &with("0x4000004000010000", "0x0000004000010000"),
        128,
        "another swizzle",
    );
    fails(
        &with("0x4000004000010000", "0x4010004000010000"),
        128,
        "reserved",
    );
    fails(
        &with("add.s64 %rd3, %rd2, 512", "add.s64 %rd3, %rd2, 520"),
        128,
        "whole patterns",
    );
    // Accumulators that are written after the fence, and accumulators and operands that are used while in flight.
    fails(
        &with(
            "wgmma.fence.sync.aligned;",
            "wgmma.fence.sync.aligned; mov.f32 %f2, 0f00000000;",
        ),
        128,
        "without",
    );
    fails(
        &with("wgmma.commit", "mov.f32 %f2, 0f00000000; wgmma.commit"),
        128,
        "wgmma still writes",
    );
    fails(
        &with("wgmma.commit", "st.shared.u32 [%r1], %r4; wgmma.commit"),
        128,
        "while wgmma reads",
    );
    fails(
        &with("setp.ne.s32 %p1, %r1, %r1", "setp.ne.s32 %p1, %r0, 0"),
        128,
        "different operands",
    );
    fails(
        &with("setp.ne.s32 %p1, %r1, %r1", "setp.eq.s32 %p1, %r1, %r1"),
        128,
        "nothing wrote",
    );
    fails(&body, 64, "whole group");
    let half = "setp.lt.u32 %p0, %r0, 32; @%p0 wgmma.fence.sync.aligned;";
    fails(half, 128, "wait for ever");
}

/// A thread may write what a warpgroup has read once all its warps have told the thread so.
#[test]
fn what_wgmma_reads_is_written_when_all_warps_have_arrived() {
    let body = format!(
        "mov.u32 %r2, %r0; mov.u32 %r4, 0x38383838; mov.u32 %r6, 4; mov.u32 %r7, 1; mov.u32 %r8, 0;
         fill: shl.b32 %r3, %r2, 2; add.s32 %r3, %r3, %r1; st.shared.u32 [%r3], %r4;
         add.s32 %r2, %r2, 128; setp.lt.u32 %p0, %r2, 2304; @%p0 bra fill;
         add.s32 %r2, %r1, 9216;
         setp.ne.s32 %p0, %r0, 0;
         @%p0 bra started;
         mbarrier.init.shared.b64 [%r2], %r6;
         started: fence.proxy.async.shared::cta;
         bar.sync 0;
         shr.u32 %r5, %r1, 4; cvt.u64.u32 %rd2, %r5;
         or.b64 %rd2, %rd2, 0x4000004000010000; add.s64 %rd3, %rd2, 512;
         setp.ne.s32 %p1, %r1, %r1;
         wgmma.fence.sync.aligned;
         wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{%f0, %f1, %f2, %f3}}, %rd2, %rd3, %p1, 1, 1;
         wgmma.commit_group.sync.aligned;
         wgmma.wait_group.sync.aligned 0;
         and.b32 %r9, %r0, 31; setp.ne.s32 %p0, %r9, 0; mov.b32 %r9, %f3;
         @%p0 bra done;
         mbarrier.arrive.shared::cta.b64 %rd4, [%r2], %r7;
         setp.ne.s32 %p0, %r0, 0;
         @%p0 bra done;
         wait: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], %r8;
         @!%p1 bra wait;
         st.shared.u32 [%r1], %r4;
         done: mov.u32 %r9, %r9;
         {STORE}"
    );
    assert_eq!(run(&body, 128).unwrap()[..128], [32f32.to_bits(); 128]);
    needs(&body, 128, &[("@!%p1 bra wait;", "after wgmma of warps")]);
    let with = |from: &str, to: &str| body.replace(from, to);
    fails(
        &with("mov.u32 %r6, 4", "mov.u32 %r6, 5"),
        128,
        "never completes",
    );
    // Told by one warp alone.
    fails(
        &with("mov.u32 %r6, 4", "mov.u32 %r6, 1"),
        128,
        "after wgmma of warps",
    );
}

#[test]
fn tiles_are_swizzled_and_waited_for() {
    let body = format!(
        "setp.ne.s32 %p0, %r0, 0;
         add.s32 %r2, %r1, 1024; mov.u32 %r3, 1;
         @%p0 bra started;
         mbarrier.init.shared.b64 [%r2], %r3;
         fence.proxy.async.shared::cta;
         started: bar.sync 0;
         @%p0 bra asked;
         mov.u32 %r4, 1024; mov.u32 %r5, 0; mov.u32 %r6, 0;
         mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r2], %r4;
         mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
         cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd3, {{%r5, %r6}}], [%r2];
         asked: mov.u32 %r7, 0;
         wait: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], %r7;
         @!%p1 bra wait;
         shl.b32 %r8, %r0, 4; add.s32 %r8, %r8, %r1; ld.shared.u32 %r9, [%r8];
         {STORE}"
    );
    // In row `r`, chunk `c` lies in the place of chunk `c ^ r`.
    let found = run(&body, 64).unwrap();
    for place in 0..64 {
        let (row, chunk) = (place / 8, (place % 8) ^ (place / 8));
        let expected = if row < 7 { 32 * row + 4 * chunk } else { 0 };
        assert_eq!(found[place as usize], expected);
    }
    needs(
        &body,
        64,
        &[
            (
                "fence.proxy.async.shared::cta;",
                "without a fence.proxy.async",
            ),
            ("bar.sync 0;", "after its start"),
            ("mbarrier.init.shared.b64 [%r2], %r3;", "no barrier is at"),
            (
                "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r2], %r4;",
                "more bytes",
            ),
            ("@!%p1 bra wait;", "was not waited for"),
        ],
    );
    let with = |from: &str, to: &str| body.replace(from, to);
    fails(&with("mov.u32 %r7, 0", "mov.u32 %r7, 1"), 64, "on its way");
    fails(
        &with("mov.u32 %r4, 1024", "mov.u32 %r4, 2048"),
        64,
        "never completes",
    );
    fails(
        &with("mov.b64 %rd3, map", "mov.b64 %rd3, buffer"),
        64,
        "no tensor map",
    );
    fails(
        &with("wait: mbarrier", "ret; wait: mbarrier"),
        64,
        "while the TMA",
    );
}

#[test]
fn memory_has_bounds_and_is_written_first() {
    fails(
        "ld.global.u32 %r9, [%rd0+4096];",
        1,
        "bytes 4096..4100 of a buffer of 4096",
    );
    fails("ld.global.u32 %r9, [%rd0+2];", 1, "not aligned");
    fails("ld.global.u32 %r9, [%rd1];", 1, "no buffer");
    fails(
        "ld.shared.u32 %r9, [%r1+10240];",
        1,
        "outside of shared memory",
    );
    fails(
        "ld.global.nc.u32 %r9, [%rd0]; st.global.u32 [%rd0], %r9;",
        1,
        "by .nc",
    );
    fails("add.s32 %r9, %r8, 1;", 1, "nothing wrote");
    fails("mov.u32 %r2, 0; div.u32 %r9, %r1, %r2;", 1, "undefined");
    fails("forever: bra forever;", 1, "does not end");
    fails("", 129, "more than .maxntid");
}

#[test]
#[should_panic(expected = "not known: add.sat.s32 %r9, %r0, %r1")]
fn what_is_not_known_is_refused() {
    let _ = run("add.sat.s32 %r9, %r0, %r1;", 1);
}
