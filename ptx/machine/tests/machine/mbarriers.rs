//! What barriers in shared memory order: reads, writes and copies of threads.

use super::{STORE, fails, needs, run};

/// Barriers at 1024 and 1032 bytes, of 64 arrivals each.
const START: &str = "setp.ne.s32 %p0, %r0, 0; mov.u32 %r3, 64;
     @%p0 bra started;
     mbarrier.init.shared.b64 [%r1+1024], %r3;
     mbarrier.init.shared.b64 [%r1+1032], %r3;
     started: bar.sync 0;
     shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1;
     mov.u32 %r7, 0;";

/// All write, read what a thread of the other warp wrote, and write again.
#[test]
fn barriers_in_shared_memory_order_reads_and_writes() {
    let body = format!(
        "{START}
         st.shared.u32 [%r2], %r0;
         mbarrier.arrive.shared.b64 %rd2, [%r1+1024];
         written: mbarrier.try_wait.shared.b64 %p1, [%r1+1024], %rd2;
         @!%p1 bra written;
         xor.b32 %r4, %r2, 128; ld.shared.u32 %r9, [%r4];
         mbarrier.arrive.shared.b64 %rd3, [%r1+1032];
         read: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+1032], %r7;
         @!%p1 bra read;
         st.shared.u32 [%r2], %r3;
         {STORE}"
    );
    let found = run(&body, 64).unwrap();
    assert!((0..64).all(|thread: u32| found[thread as usize] == (thread ^ 32)));
    needs(
        &body,
        64,
        &[
            ("@!%p1 bra written;", "no barrier orders"),
            ("@!%p1 bra read;", "no barrier orders"),
            (
                "mbarrier.arrive.shared.b64 %rd3, [%r1+1032];",
                "never completes",
            ),
        ],
    );
    // To arrive before one reads does not tell of it.
    let early = body
        .replace("mbarrier.arrive.shared.b64 %rd3, [%r1+1032];", "")
        .replace(
            "xor.b32 %r4",
            "mbarrier.arrive.shared.b64 %rd3, [%r1+1032]; xor.b32 %r4",
        );
    fails(&early, 64, "no barrier orders");
    // A read before the arrival, and one after it.
    let again = body.replace("read: mbarrier", "ld.shared.u32 %r9, [%r4]; read: mbarrier");
    fails(&again, 64, "no barrier orders");
    // Nor does a write after the arrival.
    let late = body.replace("st.shared.u32 [%r2], %r0;", "").replace(
        "written: mbarrier",
        "st.shared.u32 [%r2], %r0; written: mbarrier",
    );
    fails(&late, 64, "no barrier orders");
}

#[test]
fn barriers_wait_for_copies() {
    let body = format!(
        "{START}
         mul.wide.u32 %rd4, %r0, 4; add.s64 %rd4, %rd0, %rd4;
         cp.async.ca.shared.global [%r2], [%rd4], 4;
         cp.async.mbarrier.arrive.shared::cta.b64 [%r1+1024];
         mbarrier.arrive.shared.b64 %rd2, [%r1+1024];
         wait: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+1024], %r7;
         @!%p1 bra wait;
         xor.b32 %r4, %r2, 128; ld.shared.u32 %r9, [%r4];
         {STORE}"
    );
    let found = run(&body, 64).unwrap();
    assert!((0..64).all(|thread: u32| found[thread as usize] == (thread ^ 32)));
    needs(
        &body,
        64,
        &[
            (
                "cp.async.mbarrier.arrive.shared::cta.b64 [%r1+1024];",
                "on its way",
            ),
            (
                "mbarrier.arrive.shared.b64 %rd2, [%r1+1024];",
                "never completes",
            ),
            ("@!%p1 bra wait;", "no barrier orders"),
        ],
    );
    // The barrier's arrivals may be those of the copies.
    let counted = body
        .replace(
            "mbarrier.arrive.shared::cta",
            "mbarrier.arrive.noinc.shared::cta",
        )
        .replace("mbarrier.arrive.shared.b64 %rd2, [%r1+1024];", "");
    assert_eq!(run(&counted, 64).unwrap(), found);
    let both = body.replace(
        "mbarrier.arrive.shared::cta",
        "mbarrier.arrive.noinc.shared::cta",
    );
    fails(&both, 64, "on its way");
    fails(
        &body.replace("wait: mbarrier", "ret; wait: mbarrier"),
        64,
        "copies that a barrier waits for",
    );
}
