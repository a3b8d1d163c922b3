//! Clusters: cubes that run at the same time on neighboring multiprocessors of Hopper, and load tiles for each other.
//!
//! CubeCL 0.11 launches clusters, but has none of their instructions. So these are inline PTX, in the forms and order that CUTLASS
//! uses (`ClusterBarrier` and `SM90_TMA_LOAD_MULTICAST`).

use cubecl::prelude::{barrier::Barrier, *};
use cubecl_cpp::cuda::ptx::{barrier_native_handle, tensor_map_address};

/// The number of this cube in its cluster of `cubes`, which are neighbors along the grid's first dimension.
#[cube]
pub(super) fn cube_in_cluster(#[comptime] cubes: u32) -> u32 {
    CUBE_POS_X % cubes
}

/// Waits for all units of the cluster, whose new barriers may be used by all of them afterwards.
#[cube]
pub(super) fn sync_new_barriers() {
    gpu_asm!("fence.mbarrier_init.release.cluster;");
    gpu_asm!("barrier.cluster.arrive.relaxed.aligned;");
    gpu_asm!("barrier.cluster.wait.acquire.aligned;");
}

/// Waits for all units of the cluster, and for their stores.
#[cube]
pub(super) fn sync_cluster() {
    gpu_asm!("barrier.cluster.arrive.release.aligned;");
    gpu_asm!("barrier.cluster.wait.acquire.aligned;");
}

/// Requests a tile of a matrix for all `cubes` of the cluster. In each, it arrives at the same address of its own shared memory, and
/// counts for the barrier in the place of `full`.
#[cube]
pub(super) fn load_for_all(
    matrix: &TensorMap<u8, Tiled>,
    full: &Barrier,
    address: u32,
    row: u32,
    column: u32,
    #[comptime] cubes: u32,
) {
    let matrix = tensor_map_address(matrix);
    let full = barrier_native_handle(full);
    let all = comptime!((1u16 << cubes) - 1).runtime();
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster",
        "[{address}], [{matrix}, {{{column}, {row}}}], [{full}], {all};",
        address = in(_) address, matrix = in(_) matrix, column = in(_) column, row = in(_) row,
        full = in(_) full, all = in(_) all
    );
}

/// Arrives at the barrier of cube `cube` of the cluster in the place of `barrier`.
///
/// It tells that asynchronous reads are over, and has no other memory to order. With `.release.cluster` it would, and a warp would
/// wait for all its stores each time.
#[cube]
pub(super) fn arrive_in(cube: u32, barrier: &Barrier) {
    let barrier = barrier_native_handle(barrier);
    gpu_asm!(
        "{{ .reg .b32 there; mapa.shared::cluster.u32 there, {barrier}, {cube};",
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }}",
        barrier = in(_) barrier, cube = in(_) cube
    );
}
