//! Casts whose transpose is collected in shared memory, so that a cube writes whole lines of a GPU's cache in both orders.
//! Transformer Engine's `cast_transpose` does so too.

use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{client::Client, prelude::*, std::FastDivmod};

use super::{
    super::{
        amax::raise_together,
        buffer,
        codec::{Codec, encode, largest_of},
        input,
        tiles::{self, Tile},
    },
    Cast,
};

/// The units of a cube, each with a tile, and with them the patch of a matrix that it casts at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stage {
    /// Tiles side by side, of four columns each.
    across: usize,
    /// Tiles one below the other, of 8 rows each. A power of two.
    down: usize,
}

impl Stage {
    /// A row of a patch, and a column, are 128 codes: a line of a cache.
    const GPU: Self = Self {
        across: 32,
        down: 16,
    };

    /// For processors, on which units are threads that wait for each other.
    #[cfg(all(test, feature = "cpu"))]
    pub(super) const SMALL: Self = Self { across: 2, down: 2 };

    /// `None` for matrices that do not fill a patch, on devices with fewer units in a cube or less shared memory, and on
    /// processors, where units that wait for each other cost more than short writes.
    pub(super) fn of(client: &Client, [rows, columns]: [usize; 2]) -> Option<Self> {
        let hardware = &client.properties().hardware;
        let stage = Self::GPU;
        let fits = hardware.num_cpu_cores.is_none()
            && hardware.max_units_per_cube as usize >= stage.units()
            // Besides the pairs, a word of each unit's amax.
            && hardware.max_shared_memory_size >= 8 * stage.pairs() + 4 * stage.units();
        (fits && rows >= stage.rows() && columns >= stage.columns()).then_some(stage)
    }

    const fn units(self) -> usize {
        self.across * self.down
    }

    const fn rows(self) -> usize {
        tiles::ROWS * self.down
    }

    const fn columns(self) -> usize {
        4 * self.across
    }

    /// The pairs of words that are the columns of a patch's codes.
    const fn pairs(self) -> usize {
        self.columns() * self.down
    }
}

/// Fills `codes` and `transposed`, and raises `amax`.
pub(super) fn quantize(
    cast: Cast,
    stage: Stage,
    codes: &CubeTensor,
    transposed: &CubeTensor,
    amax: &CubeTensor,
) {
    let [rows, columns] = cast.matrix;
    let input = &cast.rows.tensor;
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));
    let (down, across) = (
        rows.div_ceil(stage.rows()),
        columns.div_ceil(stage.columns()),
    );
    let count = cast.matrices * down * across;
    let vector = cast.rows.vector();
    staged_kernel::launch(
        &client,
        buffer::cubes(count),
        CubeDim::new_1d(stage.units() as u32),
        vector,
        input::by(input, vector),
        buffer::scalar(cast.scale),
        buffer::code_words(codes),
        buffer::code_pairs(transposed),
        buffer::raw(amax.handle.clone(), 1),
        PatchesLaunch::new(count, down, across),
        rows,
        columns,
        cast.rows.pitch,
        stage,
        Codec::of(&client, cast.format),
        dtype,
    );
}

/// How matrices are divided into patches.
#[derive(CubeType, CubeLaunch)]
struct Patches {
    count: usize,
    down: FastDivmod<usize>,
    across: FastDivmod<usize>,
}

/// Each cube casts one patch at a time. Its units write the rows of the codes at once, and the columns when all are there.
#[cube(launch)]
fn staged_kernel<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    scale: &[f32],
    codes: &mut [u32],
    transposed: &mut [Vector<u32, Const<2>>],
    amax: &[Atomic<u32>],
    patches: Patches,
    rows: usize,
    columns: usize,
    pitch: usize,
    #[comptime] stage: Stage,
    #[comptime] codec: Codec,
    #[define(F)] _dtype: ElemType,
) {
    let scale = Vector::new(scale[0]);
    let row_words = columns.div_ceil(16) * 4;
    let column_pairs = rows.div_ceil(16) * 2;
    let mut staged = Shared::<[Vector<u32, Const<2>>]>::new_slice(comptime!(stage.pairs()));
    let unit = UNIT_POS as usize;
    let mut max = 0u32;
    let mut number = CUBE_POS;
    while number < patches.count {
        let (line, across) = patches.across.div_mod(number);
        let (matrix, down) = patches.down.div_mod(line);
        let top = down * comptime!(stage.rows());
        let left = across * comptime!(stage.columns());

        let (down, across) = (unit / stage.across, unit % stage.across);
        let tile = Tile {
            matrix,
            row: top + down * tiles::ROWS,
            column: left + across * 4,
        };
        let line = matrix * rows + tile.row;
        let values = tiles::load(input, &tile, rows, columns, pitch);
        // As in `apart`. With a function for both, NVRTC 12.9 makes 15.7 instructions an element instead of 14.1.
        let mut words = Array::<u32>::new(tiles::ROWS);
        #[unroll]
        for i in 0..tiles::ROWS {
            max = largest_of(values[i], max);
            words[i] = encode(values[i] * scale, codec);
            if tile.row + i < rows && tile.column < columns {
                codes[(line + i) * row_words + tile.column / 4] = words[i];
            }
        }
        let pairs = tiles::pairs::<Const<2>>(&words);
        #[unroll]
        for j in 0..4usize {
            staged[place(across * 4 + j, down, stage)] = pairs[j];
        }
        sync_cube();

        // Neighboring units write neighboring pairs.
        let pair = unit % stage.down;
        #[unroll]
        for j in 0..4usize {
            let column = unit / stage.down + j * stage.across;
            let row = top + pair * tiles::ROWS;
            if row < rows && left + column < columns {
                let first = (matrix * columns + left + column) * column_pairs;
                transposed[first + row / tiles::ROWS] = staged[place(column, pair, stage)];
            }
        }
        // Before the next patch overwrites them.
        sync_cube();
        number += CUBE_COUNT;
    }
    raise_together(amax, max, comptime!(stage.units()));
}

/// Where a pair of a column lies. Units that store the same pair of neighboring columns, and units that load neighboring pairs of
/// one column, use different banks of the shared memory.
#[cube]
fn place(column: usize, pair: usize, #[comptime] stage: Stage) -> usize {
    column * stage.down + (pair ^ (column / 4 % stage.down))
}
