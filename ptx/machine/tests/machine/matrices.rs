//! Products of small matrices, against sums of products: with the layouts that the PTX ISA gives for fragments, written down here from
//! its figures, and with `ldmatrix` and `wmma`, which agree on one with the memory.

use std::fmt::Write;

use half::{bf16, f16};

use super::{STORE, run};

/// Small integers, which all formats hold.
fn left(row: usize, term: usize) -> i32 {
    (row * 5 + term * 3) as i32 % 7 - 3
}

fn right(term: usize, column: usize) -> i32 {
    (term * 2 + column * 5) as i32 % 5 - 2
}

fn product(row: usize, column: usize, terms: usize) -> i32 {
    (0..terms)
        .map(|term| left(row, term) * right(term, column))
        .sum()
}

/// The bits of an integer in a format, and how many.
fn bits(format: &str, value: i32) -> (u32, usize) {
    match format {
        "f16" => (u32::from(f16::from_f32(value as f32).to_bits()), 16),
        "bf16" => (u32::from(bf16::from_f32(value as f32).to_bits()), 16),
        _ => ((value as f32).to_bits(), 32),
    }
}

/// Statements that give each lane its own constant in a register.
fn by_lane(register: &str, value: impl Fn(usize) -> u32) -> String {
    let mut text = format!("mov.b32 {register}, {};", value(0));
    for lane in 1..32 {
        let value = value(lane);
        write!(
            text,
            "setp.eq.u32 %p0, %r0, {lane}; selp.b32 {register}, {value}, {register}, %p0;"
        )
        .unwrap();
    }
    text
}

/// "Matrix Fragments for mma.m16n8k16 with floating point type" and the ones beside it: `groupID = laneid / 4` and `threadID_in_group =
/// laneid % 4`, and where element `i` of a fragment is.
#[test]
fn fragments_lie_as_the_isa_shows() {
    for (shape, format, terms) in [
        ("m16n8k16", "f16", 16),
        ("m16n8k16", "bf16", 16),
        ("m16n8k8", "bf16", 8),
        ("m16n8k8", "tf32", 8),
        ("m16n8k4", "tf32", 4),
    ] {
        let in_register = if format == "tf32" { 1 } else { 2 };
        // Row and term of element i of the left fragment, and term of the right one's.
        let left_place = |lane: usize, i: usize| {
            let (group, member) = (lane / 4, lane % 4);
            match format {
                // a0: (group, member), a1: (group + 8, member), a2: (group, member + 4), a3: (group + 8, member + 4).
                "tf32" => (group + i % 2 * 8, member + i / 2 * 4),
                // a0, a1 and a4, a5: the upper rows; from a4 on, the later terms.
                _ => {
                    let row = if i < 2 || (4..6).contains(&i) {
                        group
                    } else {
                        group + 8
                    };
                    (row, member * 2 + (i & 1) + if i < 4 { 0 } else { 8 })
                }
            }
        };
        let right_term = |lane: usize, i: usize| match format {
            "tf32" => lane % 4 + i * 4,
            _ => lane % 4 * 2 + (i & 1) + if i < 2 { 0 } else { 8 },
        };
        let registers = 16 * terms / 32 / in_register;
        let mut body = String::new();
        for register in 0..registers {
            let packed = |lane: usize| {
                (0..in_register).fold(0, |packed, i| {
                    let (row, term) = left_place(lane, register * in_register + i);
                    let (bits, size) = bits(format, left(row, term));
                    packed | bits << (i * size % 32)
                })
            };
            body += &by_lane(&format!("%r{}", 2 + register), packed);
        }
        for register in 0..registers / 2 {
            let packed = |lane: usize| {
                (0..in_register).fold(0, |packed, i| {
                    let term = right_term(lane, register * in_register + i);
                    let (bits, size) = bits(format, right(term, lane / 4));
                    packed | bits << (i * size % 32)
                })
            };
            body += &by_lane(&format!("%r{}", 6 + register), packed);
        }
        let list = |from: usize, count: usize| {
            let names: Vec<_> = (from..from + count)
                .map(|number| format!("%r{number}"))
                .collect();
            names.join(", ")
        };
        let name = if format == "tf32" { "tf32" } else { format };
        write!(
            body,
            "mov.b32 %f4, 0f3F800000;
             mma.sync.aligned.{shape}.row.col.f32.{name}.{name}.f32 {{%f0, %f1, %f2, %f3}}, {{{}}}, {{{}}}, {{%f4, %f4, %f4, %f4}};",
            list(2, registers),
            list(6, registers / 2)
        )
        .unwrap();
        for i in 0..4 {
            // c0, c1: row group; c2, c3: row group + 8; columns 2 * member and the next.
            let stored = format!("{body} cvt.rni.s32.f32 %r9, %f{i}; {STORE}");
            let found = run(&stored, 32).unwrap();
            for (lane, found) in found.into_iter().take(32).enumerate() {
                let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
                let expected = product(row, column, terms) + 1;
                assert_eq!(found as i32, expected, "{shape} {format}: {row}, {column}");
            }
        }
    }
}

/// In f16: stores a matrix of 16 rows and 16 columns to shared memory, row by row, from 32 threads that have half a row each.
fn stored(to: u32, element: impl Fn(usize, usize) -> i32) -> String {
    let mut text = String::new();
    for pair in 0..4 {
        let packed = |lane: usize| {
            let at = |i: usize| {
                let place = lane * 8 + pair * 2 + i;
                bits("f16", element(place / 16, place % 16)).0
            };
            at(0) | at(1) << 16
        };
        text += &by_lane("%r2", packed);
        write!(
            text,
            "shl.b32 %r3, %r0, 4; add.s32 %r3, %r3, %r1; st.shared.b32 [%r3+{}], %r2;",
            to + 4 * pair as u32
        )
        .unwrap();
    }
    text
}

#[test]
fn matrices_are_loaded_as_they_are_multiplied() {
    let matrices = stored(0, left) + &stored(512, right);
    // Of 8 x 8 matrices, first the rows of the upper left, then of the lower left one, and so on: lane l has row l % 16, from
    // column l / 16 * 8. The right matrix is stored by its terms, and transposed on the way.
    let body = format!(
        "{matrices} bar.sync 0;
         and.b32 %r2, %r0, 15; shl.b32 %r2, %r2, 5; shr.u32 %r3, %r0, 4; shl.b32 %r3, %r3, 4;
         add.s32 %r2, %r2, %r3; add.s32 %r2, %r2, %r1;
         ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r2];
         ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%r8, %r10}}, [%r2+512];
         mov.b32 %f4, 0f00000000;
         mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%f0, %f1, %f2, %f3}}, {{%r4, %r5, %r6, %r7}}, {{%r8, %r10}}, {{%f4, %f4, %f4, %f4}};"
    );
    for i in 0..4 {
        let found = run(&format!("{body} cvt.rni.s32.f32 %r9, %f{i}; {STORE}"), 32).unwrap();
        for (lane, found) in found.into_iter().take(32).enumerate() {
            let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
            assert_eq!(found as i32, product(row, column, 16), "{row}, {column}");
        }
    }
}

#[test]
fn pieces_of_a_warp_are_multiplied() {
    let found = run(&pieces(""), 32).unwrap();
    for (place, bits) in found[..256].iter().enumerate() {
        let expected = product(place / 16, place % 16, 16);
        assert_eq!(f32::from_bits(*bits) as i32, expected, "{place}");
    }
}

/// What threads that have ended hold is not stored. (Undefined by the ISA; a probe of CubeCL's does it.)
#[test]
fn a_piece_is_stored_by_the_threads_that_are_left() {
    let found = run(&pieces("setp.gt.u32 %p0, %r0, 20; @%p0 ret;"), 32).unwrap();
    for (place, bits) in found.iter().enumerate() {
        let stored = f32::from_bits(*bits) as i32 == product(place / 16, place % 16, 16);
        match place / 8 {
            ..=20 => assert!(stored, "{place}"),
            _ => assert_eq!(*bits, place as u32),
        }
    }
}

/// A product by `wmma`, with statements before the piece of it is stored.
fn pieces(before: &str) -> String {
    let matrices = stored(0, left) + &stored(512, right);
    let zeros = (0..8).map(|number| format!("mov.b32 %f{number}, 0f00000000;"));
    let zeros: String = zeros.collect();
    let list = |stem: &str, from: usize| {
        let names: Vec<_> = (from..from + 8)
            .map(|number| format!("%{stem}{number}"))
            .collect();
        names.join(", ")
    };
    format!(
        ".reg .b32 %a<16>;
         {matrices} {zeros} bar.sync 0;
         wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {{{}}}, [%r1], 16;
         wmma.load.b.sync.aligned.row.m16n16k16.shared.f16 {{{}}}, [%r1+512], 16;
         wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {{{}}}, {{{}}}, {{{}}}, {{{}}};
         {before}
         wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%rd0], {{{}}}, 16;",
        list("a", 0),
        list("a", 8),
        list("f", 0),
        list("a", 0),
        list("a", 8),
        list("f", 0),
        list("f", 0),
    )
}
