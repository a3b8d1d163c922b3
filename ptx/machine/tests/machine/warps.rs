//! What the threads of a warp do together, and atomics.

use super::{STORE, fails, needs, run};

/// The words that 32 threads store, of statements that leave a result in `%r9`.
#[track_caller]
fn results(statements: &str) -> Vec<u32> {
    run(&format!("{statements} {STORE}"), 32).unwrap()[..32].to_vec()
}

fn of(lane: impl Fn(u32) -> u32) -> Vec<u32> {
    (0..32).map(lane).collect()
}

/// In segments of 8 lanes, whose mask is 0x18: beyond a segment's end, a thread keeps its own value.
#[test]
fn shuffles_stay_in_their_segments() {
    let kept = |shuffle: &str| results(&format!("shfl.sync.{shuffle}, -1;"));
    let up = of(|lane| if lane % 8 < 3 { lane } else { lane - 3 });
    assert_eq!(kept("up.b32 %r9, %r0, 3, 0x1800"), up);
    let down = of(|lane| if lane % 8 + 3 > 7 { lane } else { lane + 3 });
    assert_eq!(kept("down.b32 %r9, %r0, 3, 0x181f"), down);
    let one = of(|lane| lane / 8 * 8 + 5);
    assert_eq!(kept("idx.b32 %r9, %r0, 5, 0x181f"), one);
    let inside = "shfl.sync.down.b32 %r9|%p0, %r0, 3, 0x181f, -1; selp.b32 %r9, 1, 0, %p0;";
    assert_eq!(results(inside), of(|lane| u32::from(lane % 8 < 5)));
    // What a thread that does not take part has is undefined.
    let odd = "mov.u32 %r9, 0; and.b32 %r2, %r0, 1; setp.eq.u32 %p0, %r2, 0;
               @%p0 shfl.sync.idx.b32 %r9, %r0, 1, 0x1f, 0x55555555;";
    fails(&format!("{odd} {STORE}"), 32, "nothing wrote");
}

#[test]
fn votes_and_sums_are_of_those_that_take_part() {
    let odd = "and.b32 %r2, %r0, 1; setp.ne.u32 %p0, %r2, 0;";
    let vote = |statement: &str| results(&format!("{odd} {statement}"));
    assert_eq!(
        vote("vote.sync.ballot.b32 %r9, %p0, -1;"),
        of(|_| 0xAAAA_AAAA)
    );
    assert_eq!(
        vote("vote.sync.ballot.b32 %r9, !%p0, -1;"),
        of(|_| 0x5555_5555)
    );
    let chosen = "selp.b32 %r9, 1, 0, %p1;";
    for (kind, expected) in [("any", 1), ("all", 0), ("uni", 0)] {
        let found = vote(&format!("vote.sync.{kind}.pred %p1, %p0, -1; {chosen}"));
        assert_eq!(found, of(|_| expected), "{kind}");
    }
    assert_eq!(results("redux.sync.add.u32 %r9, %r0, -1;"), of(|_| 31 * 16));
    assert_eq!(results("redux.sync.max.s32 %r9, %r0, -1;"), of(|_| 31));
    let elected = results("elect.sync _|%p0, -1; selp.b32 %r9, 1, 0, %p0;");
    assert_eq!(elected.iter().sum::<u32>(), 1);
    // The odd ones alone, of which one has ended.
    let some = format!(
        "{odd} setp.eq.u32 %p1, %r0, 31; @%p1 ret; mov.u32 %r9, 7;
         @%p0 redux.sync.add.u32 %r9, %r0, 0xAAAAAAAA;"
    );
    let sum = (1..31).step_by(2).sum();
    let expected = of(|lane| match lane {
        31 => 31,
        _ if lane % 2 == 1 => sum,
        _ => 7,
    });
    assert_eq!(results(&some), expected);
    let alone = format!("{odd} @%p0 redux.sync.add.u32 %r9, %r0, -1; bar.sync 0;");
    fails(&alone, 32, "wait for ever");
}

#[test]
fn a_warp_s_barrier_orders_its_memory_alone() {
    let body = format!(
        "shl.b32 %r2, %r0, 1; add.s32 %r2, %r2, %r1; cvt.u16.u32 %r4, %r0;
         st.shared.u16 [%r2], %r4;
         bar.warp.sync -1;
         xor.b32 %r3, %r2, 2; ld.shared.u16 %r9, [%r3];
         {STORE}"
    );
    assert_eq!(run(&body, 64).unwrap()[..4], [1, 0, 3, 2]);
    needs(&body, 64, &[("bar.warp.sync -1;", "nobody wrote")]);
    // The neighbor in the other warp.
    let other = body.replace("xor.b32 %r3, %r2, 2;", "xor.b32 %r3, %r2, 64;");
    fails(&other, 64, "barrier orders");
}

#[test]
fn atomics_count_every_thread() {
    // All add their number to word 0 of the buffer, where 0 is.
    let body = "mov.u64 %rd2, %rd0; red.global.add.u32 [%rd2], %r0;";
    assert_eq!(run(body, 32).unwrap()[0], 31 * 16);
    let largest = "atom.global.max.s32 %r9, [%rd0], %r0;";
    assert_eq!(run(largest, 32).unwrap()[0], 31);
    // Floats, in shared memory, which one thread sets to 0.
    let shared = format!(
        "setp.eq.u32 %p0, %r0, 0; mov.b32 %f0, 0;
         @%p0 st.shared.f32 [%r1], %f0;
         bar.sync 0;
         cvt.rn.f32.u32 %f1, %r0; atom.shared.add.f32 %f2, [%r1], %f1;
         bar.sync 0;
         ld.shared.f32 %f3, [%r1]; cvt.rzi.u32.f32 %r9, %f3; {STORE}"
    );
    assert_eq!(run(&shared, 64).unwrap()[..64], [63 * 32; 64]);
    let late = shared.replacen("bar.sync 0;\n         ld", "ld", 1);
    fails(&late, 64, "barrier orders");
    // The first that finds a 0 puts its number plus 1 there, and all find what was there before.
    let first = format!("add.u32 %r2, %r0, 1; atom.global.cas.b32 %r9, [%rd0], 0, %r2; {STORE}");
    let found = run(&first, 2).unwrap();
    assert!(
        [[1, 1], [0, 1], [2, 0]].contains(&[found[0], found[1]]),
        "{found:?}"
    );
    let exchanged =
        format!("add.s64 %rd2, %rd0, 4000; atom.global.exch.b32 %r9, [%rd2], 5; {STORE}");
    let found = run(&exchanged, 1).unwrap();
    assert_eq!([found[0], found[1000]], [1000, 5]);
}

#[test]
fn threads_have_memory_of_their_own() {
    let body = format!(
        ".local .align 8 .b8 own[16];
         mov.u64 %rd2, own; cvta.local.u64 %rd3, %rd2;
         st.local.u32 [%rd2+4], %r0; ld.u32 %r9, [%rd3+4]; {STORE}"
    );
    assert_eq!(run(&body, 32).unwrap()[..32], of(|lane| lane));
    fails(&body.replace("[%rd3+4]", "[%rd3+8]"), 1, "nobody wrote it");
    fails(
        &body.replace("[%rd3+4]", "[%rd3+16]"),
        1,
        "outside of local memory",
    );
}
