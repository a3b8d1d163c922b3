//! Products on tensor cores that multiply fp8: `mma.sync` where that is native, `wgmma` on Hopper.
//!
//! CubeCL 0.11 has neither: its own fp8 `mma` adds `.kind::f8f6f4`, which assembles for compute capability 10.0 and 12.0
//! only, and of `wgmma` it has nothing. So the instructions are inline PTX, which only its C++ backend compiles (feature
//! `cuda-cpp`). Everything around them is CubeCL, and runs on any runtime when they are emulated.

mod copy;
mod instruction;
mod kernel;
mod layout;
mod operand;
mod plan;
mod tma;

use burn::tensor::DType;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{kernel::cast, tensor::CubeTensor};
use cubecl::{CubeKernel, client::Client, prelude::*};

use super::{Product, routine::Routine};
use crate::{Bias, MatmulSpec, kernels::buffer};
use kernel::tile_kernel;
use layout::{COLUMNS, ROWS};
use operand::Operand;
pub(super) use plan::Instruction;
use plan::Plan;
use tma::{tensor_map, tma_kernel};

/// The tile kernel with one of the instructions.
pub(super) struct Tile {
    pub(super) instruction: Instruction,
    /// Load operands by the TMA, where they can be.
    pub(super) tma: bool,
}

impl Routine for Tile {
    fn fits(&self, product: &Product) -> bool {
        const MOST_CUBES: usize = u16::MAX as usize;
        let shape = product.shape();
        let rank = shape.num_dims();
        let batches: usize = shape.iter().take(rank - 2).product();
        let tiles = shape[rank - 2].div_ceil(ROWS as usize);
        shape.num_elements() > 0
            && product.inner() > 0
            && tiles <= MOST_CUBES
            && batches <= MOST_CUBES
    }

    fn is_native(&self, client: &Client) -> bool {
        native_instruction(client) == Some(self.instruction)
    }

    fn matmul(&self, product: Product) -> CubeTensor {
        matmul(product, self)
    }
}

/// The instruction that multiplies fp8 on a device, if its runtime compiles inline PTX.
fn native_instruction(client: &Client) -> Option<Instruction> {
    #[cfg(feature = "cuda")]
    {
        use cubecl::cuda::compiler::CudaBackend;

        if CudaBackend::default() != CudaBackend::Cpp {
            return None;
        }
    }
    instruction_of(&client.properties().identity.fingerprint)
}

/// The same by what a device compiles for: `ptx_sm90` for compute capability 9.0.
fn instruction_of(fingerprint: &str) -> Option<Instruction> {
    match fingerprint.strip_prefix("ptx_sm")?.parse().ok()? {
        // 8.9 is Ada, 12.x Blackwell's desktop parts. Hopper unpacks the operands of `mma.sync` for bf16.
        89 | 120..130 => Some(Instruction::Mma),
        90 => Some(Instruction::Wgmma),
        _ => None,
    }
}

fn plan(client: &Client, instruction: Instruction, spec: MatmulSpec) -> Plan {
    Plan {
        instruction,
        emulated: native_instruction(client) != Some(instruction),
        lhs: spec.lhs,
        rhs: spec.rhs,
    }
}

fn matmul(product: Product, tile: &Tile) -> CubeTensor {
    let shape = product.shape();
    let inner = product.inner();
    let Product {
        lhs,
        rhs,
        lhs_scale,
        rhs_scale,
        bias,
        spec,
        amax: _,
    } = product;
    let rank = shape.num_dims();
    let [m, n] = [shape[rank - 2], shape[rank - 1]];
    let batches = shape.num_elements() / (m * n);
    let output = buffer::empty_floats(&lhs, shape.clone(), DType::from(spec.output));
    let client = lhs.client.clone();
    let plan = plan(&client, tile.instruction, spec);

    let left = Operand::left(&lhs, &shape);
    let right = Operand::right(&rhs, &shape);
    let (has_bias, bias) = match bias {
        Bias::None => (false, lhs_scale.clone()),
        Bias::Row(bias) => (true, cast(bias, DType::F32)),
    };
    let count = CubeCount::Static(
        n.div_ceil(COLUMNS as usize) as u32,
        m.div_ceil(ROWS as usize) as u32,
        batches as u32,
    );
    let starts = |left: &[u32], right: &[u32]| {
        let pairs: Vec<[u32; 2]> = left
            .iter()
            .zip(right)
            .map(|(&left, &right)| [left, right])
            .collect();
        let starts = client.create_from_slice(bytemuck::cast_slice(&pairs));
        buffer::raw(starts, 2 * batches)
    };
    let chunks = inner.div_ceil(16);
    let lhs_scale = buffer::elements(lhs_scale);
    let rhs_scale = buffer::elements(rhs_scale);
    let bias = buffer::elements(bias);
    let result = buffer::raw(output.handle.clone(), shape.num_elements());
    let bf16 = output.dtype == DType::BF16;
    let dtype = dtype_to_storage_type(output.dtype);

    if tile.tma
        && !plan.emulated
        && let Some((left_rows, left)) = left.as_one_matrix(chunks)
        && let Some((right_rows, right)) = right.as_one_matrix(chunks)
    {
        tma_kernel::launch(
            &client,
            count,
            cube_dim(plan),
            tensor_map(left),
            tensor_map(right),
            lhs_scale,
            rhs_scale,
            bias,
            starts(&left_rows, &right_rows),
            result,
            m as u32,
            n as u32,
            chunks as u32,
            plan,
            has_bias,
            bf16,
            dtype,
        );
    } else {
        tile_kernel::launch(
            &client,
            count,
            cube_dim(plan),
            left.words(),
            right.words(),
            lhs_scale,
            rhs_scale,
            bias,
            starts(&left.starts, &right.starts),
            result,
            left.pitch,
            right.pitch,
            m as u32,
            n as u32,
            chunks as u32,
            plan,
            has_bias,
            bf16,
            dtype,
        );
    }
    output
}

fn cube_dim(plan: Plan) -> CubeDim {
    CubeDim::new_1d(plan.units())
}

impl Tile {
    /// The kernel's definition with its instruction, whatever the device of `client` is.
    pub(super) fn definition(&self, client: &Client, spec: MatmulSpec) -> KernelDefinition {
        let plan = Plan {
            emulated: false,
            ..plan(client, self.instruction, spec)
        };
        let dtype = DType::from(spec.output);
        let words = || buffer::raw(client.empty(4), 1);
        let (bf16, elements) = (dtype == DType::BF16, dtype_to_storage_type(dtype));
        let count = CubeCount::new_single();
        let (device, target) = (
            client.properties_shared(),
            client.target_properties_shared(),
        );
        if self.tma {
            let map = || tensor_map(buffer::matrix(client.empty(16), [1, 16], 16));
            tma_kernel::create_dummy_kernel(
                device,
                target,
                count,
                cube_dim(plan),
                map(),
                map(),
                words(),
                words(),
                words(),
                words(),
                words(),
                1,
                1,
                1,
                plan,
                true,
                bf16,
                elements,
            )
            .define()
        } else {
            tile_kernel::create_dummy_kernel(
                device,
                target,
                count,
                cube_dim(plan),
                words(),
                words(),
                words(),
                words(),
                words(),
                words(),
                words(),
                1,
                1,
                1,
                1,
                1,
                plan,
                true,
                bf16,
                elements,
            )
            .define()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By NVIDIA's table of compute capabilities: Ada is 8.9, Hopper 9.0, RTX Blackwell 12.0 and 12.1.
    #[test]
    fn gpus_have_their_instruction() {
        for (fingerprint, instruction) in [
            ("ptx_sm80", None),
            ("ptx_sm89", Some(Instruction::Mma)),
            ("ptx_sm90", Some(Instruction::Wgmma)),
            ("ptx_sm100", None),
            ("ptx_sm120", Some(Instruction::Mma)),
            ("ptx_sm121", Some(Instruction::Mma)),
            ("cpu_x86_64_load-256", None),
        ] {
            assert_eq!(instruction_of(fingerprint), instruction);
        }
    }
}
