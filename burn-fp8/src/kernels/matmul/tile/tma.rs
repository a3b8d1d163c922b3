//! The `wgmma` kernel with its operands loaded by Hopper's tensor memory accelerator (TMA).
//!
//! One unit requests whole tiles. The copy engine computes the addresses, swizzles, and fills in zeros outside the matrix. The rest
//! is as in [`tile_kernel`](super::kernel::tile_kernel).

use cubecl::prelude::{barrier::Barrier, *};

use super::{
    copy::shared_address,
    instruction::{add_terms, wgmma},
    layout::{ROW_WORDS, ROWS, STEP, UNITS, descriptor},
    plan::Plan,
    scaling::{Strides, part, start, step_scales},
    store::store_sums,
};
use crate::kernels::amax::raise_together;

/// Bytes of a row of a tile.
const ROW_BYTES: u32 = 4 * ROW_WORDS;
/// Warps of a cube.
const WARPS: u32 = UNITS / 32;

/// Like [`tile_kernel`](super::kernel::tile_kernel), for operands that are each one matrix with all rows of a batch. `starts`
/// counts rows.
///
/// Every stage has two barriers: one for the arrival of its tiles, and one for all warps having read them. So one warpgroup can add
/// while the other uses the tensor cores. With a tall tile, a warpgroup also adds its first half while its second is computed.
#[cube(launch)]
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
    let mut tiles = Shared::<[u8]>::new_aligned_slice(comptime!(4 * plan.words()), 1024usize);
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

    let mut sums = Array::<f32>::new(comptime!(plan.sums() as usize));
    #[unroll]
    for index in 0..comptime!(plan.sums() as usize) {
        sums[index] = 0.0f32;
    }
    // One fewer than the other stages, because a warpgroup that is behind may still read the stage of the step before.
    let ahead = comptime!(stages - 2);
    let steps = k.div_ceil(STEP);
    #[unroll]
    for step in 0..ahead {
        if UNIT_POS == 0 && step < steps {
            let barrier = full.index(comptime!(step as usize));
            load_tiles(lhs, rhs, left, right, &mut tiles, barrier, step, step, plan);
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
                        plan,
                    );
                }
                let first = step_scales(
                    lhs_scale, rhs_scale, &part, &strides, UNIT_POS, step, 0u32, plan,
                );
                full.index(comptime!(stage as usize))
                    .wait_parity(round % 2u32);
                let rows = tiles_address + stage * comptime!(4 * plan.stage_words());
                let columns = rows + comptime!(plan.rows * ROW_BYTES);
                let rows = rows + UNIT_POS / 128u32 * 64u32 * ROW_BYTES;
                let terms = wgmma(descriptor(rows), descriptor(columns), plan);
                if comptime!(plan.halves() == 2) {
                    let second = step_scales(
                        lhs_scale, rhs_scale, &part, &strides, UNIT_POS, step, 1u32, plan,
                    );
                    add_terms(&terms, &mut sums, &first, 0u32, plan);
                    let rows = rows + ROWS * ROW_BYTES;
                    let terms = wgmma(descriptor(rows), descriptor(columns), plan);
                    stage_is_read(read.index(comptime!(stage as usize)));
                    add_terms(&terms, &mut sums, &second, 1u32, plan);
                } else {
                    stage_is_read(read.index(comptime!(stage as usize)));
                    add_terms(&terms, &mut sums, &first, 0u32, plan);
                }
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

/// Requests the tiles of a step into a stage, whose barrier `full` tells when they have arrived. Called by one unit.
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
    #[comptime] plan: Plan,
) {
    let bytes = comptime!(4 * plan.stage_words());
    let first = comptime!((stage * bytes) as usize);
    let second = comptime!(first + (plan.rows * ROW_BYTES) as usize);
    let end = comptime!(first + bytes as usize);
    let column = (step * ROW_BYTES) as i32;
    let _ = full.arrive_and_expect_tx(1u32, bytes);
    full.tma_load_2d(lhs, &mut tiles[first..second], left as i32, column);
    full.tma_load_2d(rhs, &mut tiles[second..end], right as i32, column);
}

/// Tells the barrier `read` of a stage that this warp is done with the stage's tiles.
#[cube]
fn stage_is_read(read: &Shared<Barrier>) {
    if UNIT_POS.is_multiple_of(32u32) {
        let _ = read.arrive();
    }
}

/// A matrix of codes as the TMA reads it, in tiles of so many `rows` by 128 codes.
pub(super) fn tensor_map(tensor: TensorArg, rows: u32) -> TensorMapArg<Tiled> {
    let tile = TiledArgs {
        tile_size: [rows as usize, ROW_BYTES as usize].into(),
    };
    TensorMapArg::new(tile, tensor, u8::cube_type()).with_swizzle(TensorMapSwizzle::B128)
}
