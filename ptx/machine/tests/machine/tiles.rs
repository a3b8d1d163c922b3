//! Tiles that the TMA loads, for a block or for a cluster.

use ptx_machine::{Global, TensorMap, Window};

use super::{STORE, fails, launch_in, needs, run, run_cluster};

/// Loads a tile of so many bytes from `first` on. Each thread then stores a word of it, and words lie so many bytes apart.
fn load(bytes: u32, first: &[i64], apart: u32) -> String {
    let registers = ["%r5", "%r6", "%r10", "%r11"].into_iter().zip(first);
    let coordinates: Vec<_> = registers.clone().map(|(register, _)| register).collect();
    let set: String = registers
        .map(|(register, first)| format!("mov.u32 {register}, {first}; "))
        .collect();
    let (rank, coordinates) = (first.len(), coordinates.join(", "));
    format!(
        "setp.ne.s32 %p0, %r0, 0;
         add.s32 %r2, %r1, 1024; mov.u32 %r3, 1;
         @%p0 bra started;
         mbarrier.init.shared.b64 [%r2], %r3;
         fence.proxy.async.shared::cta;
         started: bar.sync 0;
         @%p0 bra asked;
         mov.u32 %r4, {bytes}; {set}
         mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r2], %r4;
         mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
         cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd3, {{{coordinates}}}], [%r2];
         asked: mov.u32 %r7, 0;
         wait: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], %r7;
         @!%p1 bra wait;
         mul.lo.u32 %r8, %r0, {apart}; add.s32 %r8, %r8, %r1; ld.shared.u32 %r9, [%r8];
         {STORE}"
    )
}

#[test]
fn tiles_are_swizzled_and_waited_for() {
    let body = load(1024, &[0, 0], 16);
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
                "never completes",
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

/// In three dimensions, with gaps between rows and slices: what is outside along any of them is zero.
#[test]
fn tiles_have_more_than_two_dimensions() {
    let [width, height, depth] = [16, 3, 4];
    let map = TensorMap {
        address: 0,
        element: 2,
        sizes: vec![width, height, depth],
        pitches: vec![48, 192],
        tile: vec![8, 2, 3],
        window: None,
        swizzle: 0,
    };
    for first in [[0, 0, 0], [4, 2, -1], [12, -1, 2], [-3, 1, 1]] {
        let global = Global::default();
        let found = launch_in(global, &map, &load(96, &first, 4), "", 24, 1).unwrap();
        for (place, bits) in (0..48).zip(found.iter().flat_map(|word| [word & 0xFFFF, word >> 16]))
        {
            let [x, y, z] = [place % 8, place / 8 % 2, place / 16];
            let [x, y, z] = [first[0] + x, first[1] + y, first[2] + z];
            let inside = [(x, width), (y, height), (z, depth)]
                .iter()
                .all(|(at, size)| (0..*size as i64).contains(at));
            // The buffer's words hold their own numbers.
            let half = (2 * x + 48 * y + 192 * z) / 2;
            let expected = if inside && half % 2 == 0 { half / 2 } else { 0 };
            assert_eq!(i64::from(bits), expected, "{first:?}: {place}");
        }
    }
}

/// Of images of 5 by 4 pixels with 4 channels: the pixels that a 3 x 2 kernel's windows begin at, with a stride of 2 along the lines, and
/// padding of 1.
#[test]
fn windows_go_on_from_line_to_line() {
    let [channels, width, height, images] = [4, 5, 4, 3];
    let window = Window {
        lower: vec![-1, -1],
        upper: vec![-1, 0],
        steps: vec![2, 1],
    };
    let map = TensorMap {
        address: 0,
        element: 4,
        sizes: vec![channels, width, height, images],
        pitches: vec![16, 80, 320],
        tile: vec![4, 12],
        window: Some(window),
        swizzle: 0,
    };
    let mut pixels = Vec::new();
    for image in 0..4 {
        for y in -1..4 {
            // Along a line they end before 5 - 1.
            pixels.extend([-1, 1, 3].map(|x| [x, y, image]));
        }
    }
    for (first, offset) in [
        ([-1, -1, 0], [0, 0]),
        ([1, 2, 0], [2, 1]),
        ([3, 3, 1], [1, 0]),
        ([-1, 0, 2], [2, 1]),
    ] {
        let [x, y, image] = first;
        let tile = load(12 * 16, &[0, x, y, image], 4);
        let [right, down] = offset;
        let body = tile.replace(".tile.", ".im2col.").replace(
            "[%r2];\n         asked",
            "[%r2], {%h0, %h1};\n         asked",
        );
        let body = format!(".reg .b16 %h<2>; mov.u16 %h0, {right}; mov.u16 %h1, {down}; {body}");
        let found = launch_in(Global::default(), &map, &body, "", 48, 1).unwrap();
        let start = pixels.iter().position(|pixel| *pixel == first).unwrap();
        for (place, word) in (0..48).zip(&found) {
            let [x, y, image] = pixels[start + place / 4];
            let (x, y) = (x + right, y + down);
            let inside = (0..5).contains(&x) && (0..4).contains(&y) && image < 3;
            let number = place as i64 % 4 + 4 * x + 20 * y + 80 * image;
            assert_eq!(
                i64::from(*word),
                if inside { number } else { 0 },
                "{first:?}: {place}"
            );
        }
    }
}

#[track_caller]
fn cluster_fails(body: &str, with: &str) {
    match run_cluster(body, 64, 2) {
        Ok(_) => panic!("it runs, but for: {with}"),
        Err(error) => assert!(error.contains(with), "{error}, but for: {with}"),
    }
}

/// Blocks of a cluster load a tile each for both. Their numbers are in `%r10`, and `%r8` is the thread's word of the other's tile.
fn multicast() -> String {
    format!(
        "mov.u32 %r10, %ctaid.x;
         setp.ne.s32 %p0, %r0, 0;
         add.s32 %r2, %r1, 2048; mov.u32 %r3, 1;
         @%p0 bra started;
         mbarrier.init.shared.b64 [%r2], %r3;
         mbarrier.init.shared.b64 [%r2+8], %r3;
         fence.proxy.async.shared::cta;
         fence.mbarrier_init.release.cluster;
         started: barrier.cluster.arrive.relaxed.aligned;
         barrier.cluster.wait.acquire.aligned;
         shl.b32 %r11, %r10, 10; add.s32 %r11, %r11, %r1;
         @%p0 bra asked;
         mov.u32 %r4, 2048; mov.u32 %r5, 0; mov.u32 %r6, %r10;
         mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r2], %r4;
         mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
         cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
             [%r11], [%rd3, {{%r5, %r6}}], [%r2], 3;
         asked: mov.u32 %r7, 0;
         wait: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], %r7;
         @!%p1 bra wait;
         xor.b32 %r12, %r10, 1; shl.b32 %r12, %r12, 10; add.s32 %r12, %r12, %r1;
         shl.b32 %r8, %r0, 4; add.s32 %r8, %r8, %r12; ld.shared.u32 %r9, [%r8];
         barrier.cluster.arrive.release.aligned;
         mad.lo.s32 %r0, %r10, 64, %r0;
         {STORE}
         barrier.cluster.wait.acquire.aligned ;"
    )
}

#[test]
fn blocks_of_a_cluster_load_tiles_for_each_other() {
    let body = multicast();
    let found = run_cluster(&body, 64, 2).unwrap();
    for place in 0..128 {
        // The tile of the other block begins with the row of its number.
        let (block, row, chunk) = (place / 64, place % 64 / 8, (place % 8) ^ (place % 64 / 8));
        let row = row + (1 - block);
        let expected = if row < 7 { 32 * row + 4 * chunk } else { 0 };
        assert_eq!(found[place as usize], expected);
    }
    for (statement, error) in [
        (
            "fence.proxy.async.shared::cta;",
            "without a fence.proxy.async",
        ),
        ("fence.mbarrier_init.release.cluster;", "after its start"),
        ("barrier.cluster.arrive.relaxed.aligned;", "has not arrived"),
        ("barrier.cluster.wait.acquire.aligned;", "after its start"),
        ("barrier.cluster.arrive.release.aligned;", "has not arrived"),
        (
            "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r2], %r4;",
            "never completes",
        ),
        ("@!%p1 bra wait;", "on its way"),
    ] {
        assert!(body.contains(statement), "{statement}");
        cluster_fails(&body.replacen(statement, "", 1), error);
    }
    let with = |from: &str, to: &str| body.replace(from, to);
    cluster_fails(&with("[%r2], 3;", "[%r2], 7;"), "no block 2");
    // A tile for the block itself, where it waits for two.
    cluster_fails(&with("[%r2], 3;", "[%r2], 1;"), "never completes");
    cluster_fails(&with("mov.u32 %r4, 2048", "mov.u32 %r4, 1024"), "is read");
    let error = run_cluster(&body, 64, 3).unwrap_err();
    assert!(error.contains("in clusters of"), "{error}");
}

/// The last arrival and wait at the barrier of the cluster keep a block's shared memory until the others are done with it.
#[test]
fn a_block_that_has_ended_has_no_shared_memory() {
    // A thread of each block arrives at the other's barrier.
    let arrives = "@%p0 bra told;
         xor.b32 %r12, %r10, 1; add.s32 %r13, %r1, 2056; mapa.shared::cluster.u32 %r12, %r13, %r12;
         mbarrier.arrive.shared::cluster.b64 _, [%r12];
         told: barrier.cluster.arrive.release.aligned;";
    let body = multicast().replace("barrier.cluster.arrive.release.aligned;", arrives);
    run_cluster(&body, 64, 2).unwrap();
    let ends = body.replace(
        "told: barrier.cluster.arrive.release.aligned;",
        "told: mov.u32 %r7, 0;",
    );
    cluster_fails(
        &ends.replace("barrier.cluster.wait.acquire.aligned ;", ""),
        "has ended",
    );
    let twice = body.replace("told:", "told: barrier.cluster.arrive.release.aligned;");
    cluster_fails(&twice, "arrives twice");
}

/// A block may overwrite what warpgroups of both have read, once all their warps have told it so.
#[test]
fn what_wgmma_reads_is_loaded_again_when_the_warps_of_both_blocks_have_arrived() {
    let body = format!(
        "mov.u32 %r10, %ctaid.x;
         mov.u32 %r2, %r0; mov.u32 %r4, 0x38383838;
         fill: shl.b32 %r3, %r2, 2; add.s32 %r3, %r3, %r1; st.shared.u32 [%r3], %r4;
         add.s32 %r2, %r2, 128; setp.lt.u32 %p0, %r2, 2304; @%p0 bra fill;
         add.s32 %r2, %r1, 9216; add.s32 %r3, %r1, 9224; mov.u32 %r6, 8; mov.u32 %r7, 1; mov.u32 %r8, 0;
         setp.ne.s32 %p0, %r0, 0;
         @%p0 bra started;
         mbarrier.init.shared.b64 [%r2], %r6;
         mbarrier.init.shared.b64 [%r3], %r7;
         fence.mbarrier_init.release.cluster;
         started: fence.proxy.async.shared::cta;
         barrier.cluster.arrive.release.aligned;
         barrier.cluster.wait.acquire.aligned;
         shr.u32 %r5, %r1, 4; cvt.u64.u32 %rd2, %r5;
         or.b64 %rd2, %rd2, 0x4000004000010000; add.s64 %rd3, %rd2, 512;
         setp.ne.s32 %p1, %r1, %r1;
         wgmma.fence.sync.aligned;
         wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{%f0, %f1, %f2, %f3}}, %rd2, %rd3, %p1, 1, 1;
         wgmma.commit_group.sync.aligned;
         wgmma.wait_group.sync.aligned 0;
         and.b32 %r9, %r0, 31; setp.ne.s32 %p1, %r9, 0;
         @%p1 bra told;
         mapa.shared::cluster.u32 %r11, %r2, 0;
         mbarrier.arrive.shared::cluster.b64 _, [%r11];
         told: @%p0 bra loaded;
         mov.u32 %r12, 1024;
         mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd4, [%r3], %r12;
         setp.ne.s32 %p1, %r10, 0;
         @%p1 bra loaded;
         read: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], %r8;
         @!%p1 bra read;
         mov.b64 %rd5, map; cvta.param.u64 %rd5, %rd5;
         cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
             [%r1], [%rd5, {{%r8, %r8}}], [%r3], 3;
         loaded: mbarrier.try_wait.parity.shared.b64 %p1, [%r3], %r8;
         @!%p1 bra loaded;
         shl.b32 %r9, %r0, 2; add.s32 %r9, %r9, %r1; ld.shared.u32 %r9, [%r9];
         mad.lo.s32 %r0, %r10, 128, %r0;
         {STORE}
         barrier.cluster.arrive.release.aligned;
         barrier.cluster.wait.acquire.aligned;"
    );
    let found = run_cluster(&body, 128, 2).unwrap();
    // The first row of the tile is not swizzled.
    let row: Vec<u32> = (0..32).collect();
    assert_eq!((&found[..32], &found[128..160]), (&row[..], &row[..]));
    let told_by = |warps: &str| body.replace("mov.u32 %r6, 8", &format!("mov.u32 %r6, {warps}"));
    let fails = |body: &str, with: &str| {
        let error = run_cluster(body, 128, 2).unwrap_err();
        assert!(error.contains(with), "{error}, but for: {with}");
    };
    fails(&told_by("5"), "after wgmma of warps");
    fails(&told_by("9"), "never completes");
    fails(&body.replace("@!%p1 bra read;", ""), "after wgmma of warps");
}
