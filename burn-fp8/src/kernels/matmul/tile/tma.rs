//! The `wgmma` kernel with its operands loaded by Hopper's tensor memory accelerator (TMA).
//!
//! One unit requests whole tiles. The copy engine computes the addresses, swizzles, and fills in zeros outside the matrix. The rest
//! is as in [`tile_kernel`](super::kernel::tile_kernel).

use cubecl::prelude::{barrier::Barrier, *};

use super::{
    cluster::{arrive_in, cube_in_cluster, load_for_all, sync_cluster, sync_new_barriers},
    copy::shared_address,
    instruction::{add_terms, wgmma},
    layout::{ROW_WORDS, ROWS, STEP, UNITS, descriptor},
    plan::Plan,
    scaling::{Part, Strides, part, start, step_scales},
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
/// There are no more cubes than run at once, and each computes one part of all `parts` after the other. So the first tiles of a part
/// are on their way while the part before is still computed and stored.
///
/// Every stage has two barriers: one for the arrival of its tiles, and one for all warps having read them. So one warpgroup can add
/// while the other uses the tensor cores. With a tall tile, a warpgroup also adds its first half while its second is computed.
///
/// In a cluster, a cube's tiles also come from the others, which wait until all of its warps have read the tiles before.
#[cube(launch, cluster_dim = CubeDim::new_1d(plan.cubes))]
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
    parts: u32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
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
            read.index(stage).init_manual(comptime!(plan.cubes * WARPS));
        }
    }
    sync_async_proxy_shared();
    if comptime!(plan.cubes > 1) {
        sync_new_barriers();
    } else {
        sync_cube();
    }

    let mut sums = Array::<f32>::new(comptime!(plan.sums() as usize));
    // One fewer than the other stages, because a warpgroup that is behind may still read the stage of the step before.
    let ahead = comptime!(stages - 2);
    let steps = k.div_ceil(STEP);
    // Steps are counted in rounds, one step a stage. The last round of a part may use a few stages only.
    let rounds = steps.div_ceil(stages);
    let at_once = CUBE_COUNT_X / plan.cubes;
    let mut number = CUBE_POS_X / plan.cubes;
    let mut max = 0u32;
    // For each stage, the parity of its use that is next.
    let mut parities = 0u32;
    // What is loaded, by one unit: the first rows of both operands' tiles.
    let first = part(starts, number, m, n, plan);
    let mut left = start(starts, first.product, 0usize, plan) + first.first_row;
    let mut right = start(starts, first.product, 1usize, plan) + first.first_column;
    #[unroll]
    for step in 0..ahead {
        if UNIT_POS == 0 && step < steps {
            let barrier = full.index(comptime!(step as usize));
            load_tiles(
                lhs,
                rhs,
                left,
                right,
                &mut tiles,
                tiles_address,
                barrier,
                step,
                step,
                plan,
            );
        }
    }
    while number < parts {
        let own = part(starts, number, m, n, plan);
        let next = number + at_once;
        #[unroll]
        for index in 0..comptime!(plan.sums() as usize) {
            sums[index] = 0.0f32;
        }
        for round in 0..rounds {
            #[unroll]
            for stage in 0..stages {
                if UNIT_POS == 0 {
                    // A step of this part, or behind its last round one of the next part.
                    let free = comptime!((stage + ahead) % stages);
                    let round = round + comptime!((stage + ahead) / stages);
                    let is_next = round == rounds;
                    if comptime!(free == 0) {
                        let begins = is_next && next < parts;
                        if begins {
                            let part = part(starts, next, m, n, plan);
                            left = start(starts, part.product, 0usize, plan) + part.first_row;
                            right = start(starts, part.product, 1usize, plan) + part.first_column;
                        }
                    }
                    let step = select(is_next, 0u32, round * stages) + free;
                    if step < steps && (!is_next || next < parts) {
                        // For its use before. Of the first use, there is nothing to wait for.
                        read.index(comptime!(free as usize))
                            .wait_parity(parity(parities, free) ^ 1u32);
                        let barrier = full.index(comptime!(free as usize));
                        load_tiles(
                            lhs,
                            rhs,
                            left,
                            right,
                            &mut tiles,
                            tiles_address,
                            barrier,
                            step,
                            free,
                            plan,
                        );
                    }
                }
                let step = round * stages + stage;
                if step < steps {
                    full.index(comptime!(stage as usize))
                        .wait_parity(parity(parities, stage));
                    parities ^= comptime!(1u32 << stage);
                    multiply_step(
                        tiles_address,
                        read.index(comptime!(stage as usize)),
                        &mut sums,
                        lhs_scale,
                        rhs_scale,
                        &own,
                        &strides,
                        step,
                        stage,
                        plan,
                    );
                }
            }
        }
        let largest = store_sums(
            &sums, UNIT_POS, lhs_scale, rhs_scale, bias, output, &own, &strides, plan,
        );
        max = u32::max(max, largest);
        number = next;
    }
    if comptime!(plan.has_amax) {
        raise_together(amax, max, comptime!(plan.units() as usize));
    }
    if comptime!(plan.cubes > 1) {
        // A cube that has ended has no shared memory for the others to arrive at.
        sync_cluster();
    }
}

/// Adds a unit's part of the product of a stage's tiles to its sums.
#[cube]
fn multiply_step(
    tiles_address: u32,
    read: &Shared<Barrier>,
    sums: &mut Array<f32>,
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    own: &Part,
    strides: &Strides,
    step: u32,
    #[comptime] stage: u32,
    #[comptime] plan: Plan,
) {
    let first = step_scales(
        lhs_scale, rhs_scale, own, strides, UNIT_POS, step, 0u32, plan,
    );
    let rows = tiles_address + stage * comptime!(4 * plan.stage_words());
    let columns = rows + comptime!(plan.rows * ROW_BYTES);
    let rows = rows + UNIT_POS / 128u32 * 64u32 * ROW_BYTES;
    let terms = wgmma(descriptor(rows), descriptor(columns), plan);
    if comptime!(plan.halves() == 2) {
        let second = step_scales(
            lhs_scale, rhs_scale, own, strides, UNIT_POS, step, 1u32, plan,
        );
        add_terms(&terms, sums, &first, 0u32, plan);
        let rows = rows + ROWS * ROW_BYTES;
        let terms = wgmma(descriptor(rows), descriptor(columns), plan);
        stage_is_read(read, plan);
        add_terms(&terms, sums, &second, 1u32, plan);
    } else {
        stage_is_read(read, plan);
        add_terms(&terms, sums, &first, 0u32, plan);
    }
}

#[cube]
fn parity(parities: u32, #[comptime] stage: u32) -> u32 {
    (parities >> stage) % 2u32
}

/// Requests the tiles of a step into a stage, whose barrier `full` tells when they have arrived. Called by one unit.
#[cube]
fn load_tiles(
    lhs: &TensorMap<u8, Tiled>,
    rhs: &TensorMap<u8, Tiled>,
    left: u32,
    right: u32,
    tiles: &mut Shared<[u8]>,
    tiles_address: u32,
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
    if comptime!(plan.cubes > 1) {
        let rows = comptime!(plan.rows / plan.cubes);
        let row = cube_in_cluster(plan.cubes) * rows;
        let to = tiles_address + comptime!(first as u32) + row * ROW_BYTES;
        load_for_all(lhs, full, to, left + row, column as u32, plan.cubes);
    } else {
        full.tma_load_2d(lhs, &mut tiles[first..second], left as i32, column);
    }
    full.tma_load_2d(rhs, &mut tiles[second..end], right as i32, column);
}

/// Tells the barrier `read` of a stage, in all cubes that load tiles into it, that this warp is done with the stage's tiles.
#[cube]
fn stage_is_read(read: &Shared<Barrier>, #[comptime] plan: Plan) {
    if comptime!(plan.cubes > 1) {
        // A unit of the warp for each cube.
        if UNIT_POS % 32u32 < plan.cubes {
            arrive_in(UNIT_POS % 32u32, read);
        }
    } else if UNIT_POS.is_multiple_of(32u32) {
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
