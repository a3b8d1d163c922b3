//! Tests of the machine that runs PTX: the results of small kernels, and that it detects what is missing in them.
//!
//! Every kernel here is correct as it stands. Each of its fences, waits and barriers is left out once.

mod arithmetic;
mod floats;
mod matrices;
mod mbarriers;
mod tiles;
mod warps;
mod wgmma;

use ptx_machine::{Argument, Global, Kernel, Launch, TensorMap};

/// The size of the buffer, in which word `i` is `i`.
const WORDS: u32 = 1024;

/// Runs a body with `threads` threads, and returns the buffer afterwards.
fn run(body: &str, threads: u32) -> Result<Vec<u32>, String> {
    launch(body, "", threads, 1)
}

/// The same in `blocks` blocks, in clusters of two.
fn run_cluster(body: &str, threads: u32, blocks: u32) -> Result<Vec<u32>, String> {
    let clusters = ".explicitcluster\n.reqnctapercluster 2, 1, 1";
    launch(body, clusters, threads, blocks)
}

fn launch(body: &str, clusters: &str, threads: u32, blocks: u32) -> Result<Vec<u32>, String> {
    launch_in(Global::default(), &rows(), body, clusters, threads, blocks)
}

/// Rows of 128 bytes at the start of the buffer, of which the last one of a tile is out of bounds.
fn rows() -> TensorMap {
    TensorMap {
        address: 0,
        element: 1,
        sizes: vec![128, 7],
        pitches: vec![128],
        tile: vec![128, 8],
        window: None,
        swizzle: 128,
    }
}

/// With a map of the buffer, whose own address is 0.
fn launch_in(
    mut global: Global,
    map: &TensorMap,
    body: &str,
    clusters: &str,
    threads: u32,
    blocks: u32,
) -> Result<Vec<u32>, String> {
    let kernel = Kernel::new(&format!(
        ".version 8.8
         .target sm_90a
         .address_size 64
         .extern .shared .align 1024 .b8 tiles[];
         .visible .entry test(.param .u64 buffer, .param .align 128 .b8 map[128])
         .maxntid 128, 1, 1
         {clusters}
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
    let address = global.allocate(4 * WORDS as usize);
    for word in 0..WORDS {
        global.write(address + u64::from(4 * word), &word.to_le_bytes())?;
    }
    let map = TensorMap {
        address,
        ..map.clone()
    };
    map.check()?;
    let launch = Launch {
        grid: [blocks, 1, 1],
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

/// Undefined results are errors, or NaN where kernels may have some that they do not use.
#[test]
fn what_nobody_wrote_is_nan_where_it_may_be_read() {
    let half = format!("mov.b32 %r2, 5; mov.b32 %r9, {{%r2, %r3}}; {STORE}");
    fails(&half, 1, "nothing wrote");
    let found = launch_in(Global::poisoned(), &rows(), &half, "", 1, 1).unwrap();
    assert_eq!(found[0], 0xFFFF_0005);
    let split = format!(
        ".reg .b16 %h<2>; mov.b32 {{_, %h0}}, %r3; mov.b16 %h1, 7; mov.b32 %r9, {{%h0, %h1}}; {STORE}"
    );
    fails(&split, 1, "nothing wrote");
    let found = launch_in(Global::poisoned(), &rows(), &split, "", 1, 1).unwrap();
    assert_eq!(found[0], 0x0007_FFFF);
    let mut bytes = [0; 4];
    let mut global = Global::default();
    let address = global.allocate(4);
    assert!(global.read(address, &mut bytes, false).is_err());
    let mut global = Global::poisoned();
    let address = global.allocate(4);
    global.read(address, &mut bytes, false).unwrap();
    assert_eq!(bytes, [0xFF; 4]);
    global.free(address).unwrap();
    assert!(global.read(address, &mut bytes, false).is_err());
    assert!(global.free(address).is_err());
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
    // Two threads may write the same, and nothing else.
    run("st.shared.u32 [%r1], 7;", 64).unwrap();
    fails("st.shared.u32 [%r1], %r0;", 64, "by two threads");
    // Threads wait for those that may still come, and not for those that have ended.
    let half = "setp.lt.u32 %p0, %r0, 32; @%p0 bar.sync 0;";
    run(half, 64).unwrap();
    fails(&format!("{half} @!%p0 bar.sync 1;"), 64, "wait for ever");
    // Or for as many as they say.
    let halves = "setp.lt.u32 %p0, %r0, 32; @%p0 bar.sync 2, 32; @!%p0 bar.sync 1, 32; bar.sync 0;";
    run(halves, 64).unwrap();
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
