//! Products on tensor cores that multiply fp8: `mma.sync` where that is native, `wgmma` on Hopper.
//!
//! CubeCL 0.11 has neither: its own fp8 `mma` adds `.kind::f8f6f4`, which assembles only for compute capability 10.0 and 12.0,
//! and it has no `wgmma`. So the instructions are inline PTX, which only its C++ backend compiles (feature `cuda-cpp`).
//! Everything around them is CubeCL, and runs on any runtime when they are emulated.

mod cluster;
mod copy;
mod instruction;
mod kernel;
mod layout;
mod operand;
mod plan;
mod scaling;
mod store;
mod tma;
mod turn;

use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, FloatDType};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{CubeBackend, CubeDevice, tensor::CubeTensor};
use cubecl::{client::Client, prelude::*};

use super::{Outline, Product, Size, routine::Routine};
use crate::{
    Bias, Granularity,
    granular::scaled_together,
    kernels::{
        batch::side_by_side,
        buffer,
        codec::by_hand,
        ptx,
        scale_grid::{Scales, clamped},
    },
};
use kernel::tile_kernel;
use layout::{COLUMNS, ROWS, STEP, TALL_ROWS};
use operand::Operand;
pub(super) use operand::{along, is_copied};
use plan::{Instruction, Plan};
use scaling::{Scaling, strides};
use tma::{tensor_map, tma_kernel};

/// The tile kernel with one of the instructions.
pub(super) struct Tile {
    instruction: Instruction,
    /// Whether operands are loaded by the TMA, if their layout allows it.
    tma: bool,
    /// Rows of a tile if operands are loaded by the TMA: 128 or 256. Otherwise a tile has 128.
    rows: u32,
    /// Cubes of a cluster if operands are loaded by the TMA: 1 or 2.
    cubes: u32,
}

impl Tile {
    pub(super) const MMA: Self = Self::new(Instruction::Mma);
    pub(super) const WGMMA: Self = Self::new(Instruction::Wgmma);
    pub(super) const WGMMA_TMA: Self = Self::by_tma(ROWS, 1);
    pub(super) const WGMMA_TMA_256: Self = Self::by_tma(TALL_ROWS, 1);
    pub(super) const WGMMA_TMA_MULTICAST: Self = Self::by_tma(TALL_ROWS, 2);

    const fn new(instruction: Instruction) -> Self {
        Self {
            instruction,
            tma: false,
            rows: ROWS,
            cubes: 1,
        }
    }

    const fn by_tma(rows: u32, cubes: u32) -> Self {
        Self {
            instruction: Instruction::Wgmma,
            tma: true,
            rows,
            cubes,
        }
    }

    /// Whether the tiles suit the product. A tall tile leaves no registers for different scales of all columns in a step. A product
    /// with few rows would waste half of it, and one with few columns half of a cluster.
    fn suits(&self, size: Size, scaling: Scaling) -> bool {
        let tall = size.m > ROWS as usize && scaling.step_columns() == 1;
        (self.rows == ROWS || tall) && (self.cubes == 1 || size.n > COLUMNS as usize)
    }
}

impl Routine for Tile {
    fn fits(&self, outline: &Outline) -> bool {
        const MOST_CUBES: usize = u16::MAX as usize;
        let size = outline.size;
        if size.multiplications() * size.batches == 0 {
            return false;
        }
        let steps = scaled_together(outline.granularities)
            .is_none_or(|terms| terms >= size.k || terms.is_multiple_of(STEP as usize));
        size.m.div_ceil(ROWS as usize) <= MOST_CUBES
            && size.batches <= MOST_CUBES
            && outline.can_be_copied()
            && steps
            && self.suits(size, scaling(outline.granularities, size.k))
    }

    fn most(&self, size: Size) -> usize {
        // Of any device.
        store::vector(size.n, false) * buffer::MOST
    }

    fn has_room(&self, client: &Client) -> bool {
        let hardware = &client.properties().hardware;
        // On a processor, shared memory is ordinary memory.
        hardware.num_cpu_cores.is_some()
            || 4 * self.instruction.words(self.rows) <= hardware.max_shared_memory_size
    }

    fn is_native(&self, client: &Client, _device: &CubeDevice) -> bool {
        native_instruction(client) == Some(self.instruction)
    }

    fn matmul(&self, product: Product) -> CubeTensor {
        let shape = product.shape();
        let Size { m, n, k, batches } = product.size();
        let client = product.lhs.client.clone();
        let mut plan = Plan {
            instruction: self.instruction,
            emulated: native_instruction(&client) != Some(self.instruction),
            rows: ROWS,
            cubes: 1,
            lhs: product.spec.lhs,
            rhs: product.spec.rhs,
            scaling: scaling(product.spec.granularities, k),
            batched: batches > 1,
            has_bias: matches!(product.bias, Bias::Row(_)),
            has_amax: product.amax.is_some(),
            half_output: product.spec.output != FloatDType::F32,
            by_hand: by_hand(&client, DType::from(product.spec.output)),
        };
        let Product {
            lhs,
            rhs,
            lhs_scales,
            rhs_scales,
            bias,
            spec,
            amax,
        } = product;
        let output = buffer::empty_floats(&lhs, shape.clone(), DType::from(spec.output));
        let lhs_scales = inverse(lhs_scales, plan.scaling);
        let rhs_scales = inverse(rhs_scales, plan.scaling);

        let left = Operand::left(&lhs, &shape);
        let right = Operand::right(&rhs, &shape);
        let maps = match self.tma && !plan.emulated {
            true => left.as_one_matrix(k).zip(right.as_one_matrix(k)),
            false => None,
        };
        if maps.is_some() {
            plan.rows = self.rows;
            plan.cubes = self.cubes;
        }
        let bias = buffer::bias(&client, &bias);
        let across = n.div_ceil(COLUMNS as usize) as u32;
        let down = m.div_ceil(plan.rows as usize) as u32;
        let scale_starts = [&lhs_scales, &rhs_scales].map(|scales| scales.starts(&shape));
        let starts = |left: &[usize], right: &[usize]| match plan.batched {
            true => side_by_side(&client, [left, right, &scale_starts[0], &scale_starts[1]]),
            false => buffer::word(&client),
        };
        let scale_strides = strides(&lhs_scales, &rhs_scales);
        let lhs_scale = lhs_scales.elements();
        let rhs_scale = rhs_scales.elements();
        let vector = store::vector(n, plan.exchanges());
        let stored = shape.num_elements() / vector;
        let result = buffer::array(output.handle.clone(), stored, vector * output.dtype.size());
        let amax = buffer::amax(&client, &amax);
        let dtype = dtype_to_storage_type(output.dtype);
        let dim = CubeDim::new_1d(plan.units());

        if let Some(((left_rows, left), (right_rows, right))) = maps {
            // As many cubes as run at once: each fills a multiprocessor.
            let parts = across.div_ceil(plan.cubes) * down * batches as u32;
            let hardware = &client.properties().hardware;
            let at_once = hardware.num_streaming_multiprocessors.unwrap_or(u32::MAX);
            let clusters = parts.min((at_once / plan.cubes).max(1));
            tma_kernel::launch(
                &client,
                CubeCount::new_1d(clusters * plan.cubes),
                dim,
                vector,
                tensor_map(left, plan.rows / plan.cubes),
                tensor_map(right, COLUMNS),
                lhs_scale,
                rhs_scale,
                bias,
                starts(&left_rows, &right_rows),
                amax,
                result,
                scale_strides,
                m as u32,
                n as u32,
                k as u32,
                parts,
                plan,
                dtype,
            );
        } else {
            tile_kernel::launch(
                &client,
                CubeCount::Static(across, down, batches as u32),
                dim,
                vector,
                left.words(),
                right.words(),
                lhs_scale,
                rhs_scale,
                bias,
                starts(&left.starts, &right.starts),
                amax,
                result,
                left.pitch,
                right.pitch,
                scale_strides,
                m as u32,
                n as u32,
                k as u32,
                plan,
                dtype,
            );
        }
        output
    }
}

/// The instruction that multiplies fp8 on a device, if its runtime compiles inline PTX.
fn native_instruction(client: &Client) -> Option<Instruction> {
    instruction_of(ptx::capability(client)?)
}

fn instruction_of(capability: u32) -> Option<Instruction> {
    match capability {
        // 8.9 is Ada, 12.x Blackwell's desktop parts. Hopper unpacks the operands of `mma.sync` for bf16.
        89 | 120..130 => Some(Instruction::Mma),
        90 => Some(Instruction::Wgmma),
        _ => None,
    }
}

/// How a product of `k` terms is scaled.
fn scaling(granularities: [Granularity; 2], k: usize) -> Scaling {
    let together = |size: Option<usize>| size.map_or(u32::MAX, clamped);
    let [left, right] = granularities;
    let (rows, columns) = (together(left.rows()), together(right.columns()));
    match scaled_together(granularities) {
        _ if granularities == [Granularity::Tensor; 2] => Scaling::Whole,
        Some(terms) if terms < k => Scaling::Steps {
            rows,
            columns,
            steps: [left.columns(), right.rows()].map(|terms| together(terms) / STEP),
        },
        _ => Scaling::Sums { rows, columns },
    }
}

/// Inverse scales, if there are several.
fn inverse(scales: Scales, scaling: Scaling) -> Scales {
    match scaling {
        Scaling::Whole => scales,
        _ => Scales {
            tensor: CubeBackend::float_recip(scales.tensor),
            ..scales
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By NVIDIA's table of compute capabilities: Ada is 8.9, Hopper 9.0, RTX Blackwell 12.0 and 12.1.
    #[test]
    fn gpus_have_their_instruction() {
        for (capability, instruction) in [
            (80, None),
            (89, Some(Instruction::Mma)),
            (90, Some(Instruction::Wgmma)),
            (100, None),
            (120, Some(Instruction::Mma)),
            (121, Some(Instruction::Mma)),
        ] {
            assert_eq!(instruction_of(capability), instruction);
        }
    }
}
