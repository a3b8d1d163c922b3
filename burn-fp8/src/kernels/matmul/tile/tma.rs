//! The `wgmma` kernel with its operands loaded by Hopper's tensor memory accelerator (TMA).
//!
//! One unit asks for whole tiles, and the copy engine computes the addresses, swizzles, and fills with zeros what lies
//! outside. The rest is [`tile_kernel`](super::kernel::tile_kernel)'s.

use cubecl::prelude::{barrier::Barrier, *};

use super::{
    copy::shared_address,
    instruction::{add_terms, wgmma},
    layout::{ROW_WORDS, ROWS, STAGE_WORDS, STEP, SUMS, UNITS, descriptor},
    plan::Plan,
    scaling::{Strides, part, start, step_scales},
    store::store_sums,
};
use crate::kernels::amax::raise_together;

/// Bytes of a row of a tile.
const ROW_BYTES: u32 = 4 * ROW_WORDS;
/// Bytes of both operands' tiles.
const STAGE_BYTES: u32 = 4 * STAGE_WORDS;

/// Warps of a cube.
const WARPS: u32 = UNITS / 32;

/// As [`tile_kernel`](super::kernel::tile_kernel), of operands that are each one matrix of all rows of a batch: `starts`
/// counts rows.
///
/// Of every stage two barriers tell: that its tiles are there, and that all warps have read them. So one warpgroup adds while the
/// tensor cores are the other's.
#[cube(launch, create_dummy_kernel)]
pub(super) fn tma_kernel<F: Numeric, V: Size>(
    lhs: &TensorMap<u8, Tiled>,
    rhs: &TensorMap<u8, Tiled>,
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    bias: &[f32],
    starts: &[u32],
    amax: &[Atomic<u32>],
    output: &mut [Vector<F, V>],
    strides: Strides,
    m: u32,
    n: u32,
    k: u32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let part = part(starts, m, n, plan);
    let left = start(starts, 0usize, plan) + part.first_row;
    let right = start(starts, 1usize, plan) + part.first_column;
    let stages = comptime!(plan.stages());
    let mut tiles =
        Shared::<[u8]>::new_aligned_slice(comptime!((stages * STAGE_BYTES) as usize), 1024usize);
    let tiles_address = shared_address::<u8>(&mut tiles, plan);
    let mut full = Sequence::<Shared<Barrier>>::new();
    let mut read = Sequence::<Shared<Barrier>>::new();
    #[unroll]
    for _ in 0..stages {
        full.push(Barrier::shared_uninit());
        read.push(Barrier::shared_uninit());
    }
    if UNIT_POS == 0 {
        #[unroll]
        for stage in 0..comptime!(stages as usize) {
            full.index(stage).init_manual(1u32);
            read.index(stage).init_manual(WARPS);
        }
    }
    sync_async_proxy_shared();
    sync_cube();

    let mut sums = Array::<f32>::new(comptime!(SUMS as usize));
    #[unroll]
    for index in 0..comptime!(SUMS as usize) {
        sums[index] = 0.0f32;
    }
    // Not into the stage of the step before, which a warpgroup that is behind may still read.
    let ahead = comptime!(stages - 2);
    let steps = k.div_ceil(STEP);
    #[unroll]
    for step in 0..ahead {
        if UNIT_POS == 0 && step < steps {
            let barrier = full.index(comptime!(step as usize));
            load_tiles(lhs, rhs, left, right, &mut tiles, barrier, step, step);
        }
    }
    for round in 0..steps.div_ceil(stages) {
        #[unroll]
        for stage in 0..stages {
            let step = round * stages + stage;
            if step < steps {
                if UNIT_POS == 0 && step + ahead < steps {
                    let free = comptime!((stage + ahead) % stages);
                    let uses = round + comptime!((stage + ahead) / stages);
                    if uses > 0 {
                        let read = read.index(comptime!(free as usize));
                        read.wait_parity((uses - 1) % 2u32);
                    }
                    let barrier = full.index(comptime!(free as usize));
                    load_tiles(
                        lhs,
                        rhs,
                        left,
                        right,
                        &mut tiles,
                        barrier,
                        step + ahead,
                        free,
                    );
                }
                let scales =
                    step_scales(lhs_scale, rhs_scale, &part, &strides, UNIT_POS, step, plan);
                full.index(comptime!(stage as usize))
                    .wait_parity(round % 2u32);
                let rows =
                    tiles_address + stage * STAGE_BYTES + UNIT_POS / 128u32 * 64u32 * ROW_BYTES;
                let columns = tiles_address + stage * STAGE_BYTES + ROWS * ROW_BYTES;
                let terms = wgmma(descriptor(rows), descriptor(columns), plan);
                if UNIT_POS.is_multiple_of(32u32) {
                    let _ = read.index(comptime!(stage as usize)).arrive();
                }
                add_terms(&terms, &mut sums, &scales, plan);
            }
        }
    }
    let max = store_sums(
        &sums, UNIT_POS, lhs_scale, rhs_scale, bias, output, &part, &strides, plan,
    );
    if comptime!(plan.has_amax) {
        raise_together(amax, max, comptime!(plan.units() as usize));
    }
}

/// Asks for the tiles of a step, into a stage whose barrier will tell that they are there. For one unit.
#[cube]
fn load_tiles(
    lhs: &TensorMap<u8, Tiled>,
    rhs: &TensorMap<u8, Tiled>,
    left: u32,
    right: u32,
    tiles: &mut Shared<[u8]>,
    full: &Shared<Barrier>,
    step: u32,
    #[comptime] stage: u32,
) {
    let first = comptime!((stage * STAGE_BYTES) as usize);
    let second = comptime!(first + (ROWS * ROW_BYTES) as usize);
    let end = comptime!(first + STAGE_BYTES as usize);
    let column = (step * ROW_BYTES) as i32;
    let _ = full.arrive_and_expect_tx(1u32, STAGE_BYTES);
    full.tma_load_2d(lhs, &mut tiles[first..second], left as i32, column);
    full.tma_load_2d(rhs, &mut tiles[second..end], right as i32, column);
}

/// A matrix of codes as the TMA reads it, in tiles of 128 by 128.
pub(super) fn tensor_map(tensor: TensorArg) -> TensorMapArg<Tiled> {
    let tile = TiledArgs {
        tile_size: [ROWS as usize, ROW_BYTES as usize].into(),
    };
    TensorMapArg::new(tile, tensor, u8::cube_type()).with_swizzle(TensorMapSwizzle::B128)
}
