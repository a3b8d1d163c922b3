//! `wgmma`, and when what it reads may be written.

use super::{STORE, fails, needs, run};

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
