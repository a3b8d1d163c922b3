//! [`Plan`]: the compile-time parameters of a tile kernel.

use super::{
    layout::{COLUMNS, ROW_WORDS, ROWS, SUMS, UNITS},
    scaling::Scaling,
};
use crate::Fp8Format;

/// A tensor-core instruction for fp8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::kernels::matmul) enum Instruction {
    /// `mma.sync.m16n8k32`: fp8 in hardware on compute capability 8.9 and 12.x.
    Mma,
    /// `wgmma.m64n128k32`: compute capability 9.0.
    Wgmma,
}

impl Instruction {
    /// The number of stages of tiles that fit into shared memory: 99 KiB on 8.9 and 12.x, 227 KiB on 9.0.
    fn stages(self) -> u32 {
        match self {
            Self::Mma => 3,
            Self::Wgmma => 4,
        }
    }

    /// Words of shared memory for all stages, if the left operand's tiles have so many rows.
    pub(super) fn words(self, rows: u32) -> usize {
        (self.stages() * stage_words(rows)) as usize
    }
}

/// Words of both operands' tiles: the rows of the left one, then the columns of the right one.
fn stage_words(rows: u32) -> u32 {
    (rows + COLUMNS) * ROW_WORDS
}

/// The compile-time parameters of a tile kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub(super) instruction: Instruction,
    /// Whether loops replace the instructions that only NVIDIA's GPUs have. A single unit then does the work of all units of a cube.
    pub(super) emulated: bool,
    /// Rows of a tile.
    pub(super) rows: u32,
    /// Cubes of a cluster, each of which loads a part of the left operand's tiles for all of them. 1 where every cube loads its own.
    pub(super) cubes: u32,
    pub(super) lhs: Fp8Format,
    pub(super) rhs: Fp8Format,
    pub(super) scaling: Scaling,
    /// Whether there are several products, each with its own start.
    pub(super) batched: bool,
    pub(super) has_bias: bool,
    /// Whether the output's amax is found.
    pub(super) has_amax: bool,
    /// Whether the elements of the output have 16 bits.
    pub(super) half_output: bool,
    /// See [`by_hand`](crate::kernels::codec::by_hand).
    pub(super) by_hand: bool,
}

impl Plan {
    pub(super) fn stages(self) -> u32 {
        self.instruction.stages()
    }

    /// Whether partial sums are scaled.
    pub(super) fn scales_steps(self) -> bool {
        matches!(self.scaling, Scaling::Steps { .. })
    }

    pub(super) fn words(self) -> usize {
        self.instruction.words(self.rows)
    }

    /// Words of both operands' tiles.
    pub(super) fn stage_words(self) -> u32 {
        stage_words(self.rows)
    }

    /// Whether neighboring units exchange sums before they store them. With a tall tile whose steps are scaled, the loop before has no
    /// registers to spare for that.
    pub(super) fn exchanges(self) -> bool {
        let is_full = self.halves() == 2 && self.scales_steps();
        !self.emulated && !is_full
    }

    /// The number of parts of 128 rows that a cube computes one after the other: 2 for a tall tile, otherwise 1.
    pub(super) fn halves(self) -> u32 {
        self.rows / ROWS
    }

    /// Sums that a unit keeps.
    pub(super) fn sums(self) -> u32 {
        self.halves() * SUMS
    }

    /// Units of a cube at launch: 1 if the kernel is emulated.
    pub(super) fn units(self) -> u32 {
        if self.emulated { 1 } else { UNITS }
    }
}
