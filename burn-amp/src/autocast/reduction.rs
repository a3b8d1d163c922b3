//! [`Reduction`]: in which precision a device adds up the products of a convolution, or the gradients of a max pool, in 16 bits.

use burn::tensor::{DType, Device, Shape};
use burn_layer::{Inputs, Op, Plan};

/// So many products may be added in 16 bits. It lets through depthwise filters of up to 4 by 4; by 45 products, a bf16 sum was off by
/// 2 %.
const PRODUCTS: usize = 16;

/// AMD's GPUs that have matrix cores, by the start of their names for compilers: CDNA, and RDNA from the third on.
const MATRIX_CORES: [&str; 5] = ["gfx908", "gfx90a", "gfx94", "gfx11", "gfx12"];

/// In which precision a device adds up the products of a convolution in 16 bits.
///
/// CubeCL's kernels for tensor cores add in f32, as PyTorch's do. They take dense convolutions alone. Its other kernels (burn-cubecl
/// 0.22.1, cubek-convolution 0.3.1) add in the dtype of the inputs: beyond some hundred products of a size, a bf16 sum does not grow
/// any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    /// In f32.
    Full,
    /// In f32 where there is a kernel for tensor cores: for dense convolutions, in f16 and perhaps in bf16.
    FullIfDense { bf16: bool },
    /// In 16 bits.
    Reduced,
}

impl Reduction {
    pub(super) fn on(device: &Device) -> Self {
        let identity = identity(device);
        let identity = identity.as_ref();
        Self::of(identity.map(|[name, compiles_for]| [&**name, compiles_for]))
    }

    /// Of the device of a name, and of what it compiles for; without them, it is Flex, or a backend that is not known.
    fn of(identity: Option<[&str; 2]>) -> Self {
        let Some([name, compiles_for]) = identity else {
            return Self::Full;
        };
        if let Some(version) = compiles_for.strip_prefix("ptx_sm") {
            // Tensor cores came with Volta, and bf16 with Ampere. The Turings called GTX have none.
            return match version.parse() {
                Ok(80..) => Self::FullIfDense { bf16: true },
                Ok(75) if name.contains("GTX") => Self::Reduced,
                Ok(70..80) => Self::FullIfDense { bf16: false },
                _ => Self::Reduced,
            };
        }
        let matrix_cores = compiles_for
            .strip_prefix("hip-kernel_")
            .is_some_and(|gfx| MATRIX_CORES.iter().any(|family| gfx.starts_with(family)));
        match matrix_cores {
            true => Self::FullIfDense { bf16: true },
            false => Self::Reduced,
        }
    }

    /// The plan, but in f32 for a convolution that would add up more than [`PRODUCTS`] in 16 bits. The result is stored as before.
    pub(super) fn plan(self, op: Op, plan: Plan, inputs: &Inputs) -> Plan {
        match plan.compute.unwrap_or(inputs.widest) {
            low @ (DType::BF16 | DType::F16) if self.loses(op, low, &inputs.shapes) => Plan {
                compute: Some(DType::F32),
                store: plan.store.or(Some(low)),
                ..plan
            },
            _ => plan,
        }
    }

    fn loses(self, op: Op, low: DType, shapes: &[Shape]) -> bool {
        let reduced = |dense: bool| match self {
            Self::Full => false,
            Self::FullIfDense { bf16 } => !dense || (low == DType::BF16 && !bf16),
            Self::Reduced => true,
        };
        Sum::of(op, shapes).is_some_and(|sum| sum.products > PRODUCTS && reduced(sum.dense))
    }
}

/// The name of a CubeCL device, and what it compiles its kernels for.
#[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu", feature = "rocm"))]
fn identity(device: &Device) -> Option<[String; 2]> {
    let identity = device.identity()?;
    Some([identity.name, identity.fingerprint])
}

#[cfg(not(any(feature = "cpu", feature = "cuda", feature = "wgpu", feature = "rocm")))]
fn identity(_device: &Device) -> Option<[String; 2]> {
    None
}

/// An element of what a convolution or the backward of a max pool computes.
#[derive(Debug, PartialEq, Eq)]
struct Sum {
    /// How many products it is the sum of, at most; or how many gradients of windows.
    products: usize,
    /// Whether each input channel meets each output channel, in a convolution that is not transposed.
    dense: bool,
}

impl Sum {
    /// Of the op with float inputs of these shapes, if it is one of these.
    fn of(op: Op, shapes: &[Shape]) -> Option<Self> {
        let positions = |shape: &Shape| shape.iter().skip(2).product::<usize>();
        Some(match (op, shapes) {
            (Op::conv1d | Op::conv2d | Op::conv3d, [x, weight, ..]) => Self {
                products: weight[1] * positions(weight),
                dense: weight[1] == x[1],
            },
            (
                Op::conv1d_x_backward | Op::conv2d_x_backward | Op::conv3d_x_backward,
                [x, weight, _],
            ) => Self {
                products: weight[0] * weight[1] / x[1].max(1) * positions(weight),
                dense: weight[1] == x[1],
            },
            (
                Op::conv1d_weight_backward
                | Op::conv2d_weight_backward
                | Op::conv3d_weight_backward,
                [x, weight, gradient],
            ) => Self {
                products: x[0] * positions(gradient),
                dense: weight[1] == x[1],
            },
            (
                Op::conv_transpose1d | Op::conv_transpose2d | Op::conv_transpose3d,
                [_, weight, ..],
            ) => Self {
                products: weight[0] * positions(weight),
                dense: false,
            },
            (
                Op::conv_transpose1d_x_backward
                | Op::conv_transpose2d_x_backward
                | Op::conv_transpose3d_x_backward,
                [weight, gradient],
            ) => Self {
                products: weight[1] * positions(weight),
                dense: weight[1] == gradient[1],
            },
            (
                Op::conv_transpose1d_weight_backward
                | Op::conv_transpose2d_weight_backward
                | Op::conv_transpose3d_weight_backward,
                [x, weight, gradient],
            ) => Self {
                products: x[0] * positions(x),
                dense: weight[1] == gradient[1],
            },
            // How many windows an element is in is not known. With a stride of 2, common ones have it in 4; with a stride of 1, as in a
            // spatial pyramid, up to 169.
            (
                Op::max_pool1d_with_indices_backward | Op::max_pool2d_with_indices_backward,
                [x, gradient],
            ) => Self {
                products: match 3 * positions(gradient) > 2 * positions(x) {
                    true => usize::MAX,
                    false => 4,
                },
                dense: false,
            },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum of an op whose inputs have these shapes.
    fn sum<const N: usize>(op: Op, shapes: [[usize; 4]; N]) -> (usize, bool) {
        let sum = Sum::of(op, &shapes.map(Shape::new)).unwrap();
        (sum.products, sum.dense)
    }

    #[test]
    fn products_are_counted_by_the_definition() {
        // 6 channels become 8 by filters of 3 by 5, on 2 images of 10 by 12 that become 8 by 8; then in 2 groups.
        let [x, dense, grouped] = [[2, 6, 10, 12], [8, 6, 3, 5], [8, 3, 3, 5]];
        let out = [2, 8, 8, 8];
        assert_eq!(sum(Op::conv2d, [x, dense]), (6 * 15, true));
        assert_eq!(sum(Op::conv2d, [x, grouped]), (3 * 15, false));
        let op = Op::conv2d_x_backward;
        assert_eq!(sum(op, [x, dense, out]), (8 * 15, true));
        assert_eq!(sum(op, [x, grouped, out]), (4 * 15, false));
        let op = Op::conv2d_weight_backward;
        assert_eq!(sum(op, [x, dense, out]), (2 * 64, true));
        assert_eq!(sum(op, [x, grouped, out]), (2 * 64, false));
        // And back.
        assert_eq!(sum(Op::conv_transpose2d, [out, dense]), (8 * 15, false));
        let op = Op::conv_transpose2d_x_backward;
        assert_eq!(sum(op, [dense, x]), (6 * 15, true));
        assert_eq!(sum(op, [grouped, x]), (3 * 15, false));
        let op = Op::conv_transpose2d_weight_backward;
        assert_eq!(sum(op, [out, dense, x]), (2 * 64, true));
        assert_eq!(Sum::of(Op::float_matmul, &[]), None);
    }

    #[test]
    fn windows_that_overlap_much_are_told_by_their_number() {
        let op = Op::max_pool2d_with_indices_backward;
        let x = [2, 6, 16, 16];
        // A stride of 1, with and without padding; of 2, and of 3.
        assert_eq!(sum(op, [x, x]), (usize::MAX, false));
        assert_eq!(sum(op, [x, [2, 6, 14, 14]]), (usize::MAX, false));
        assert_eq!(sum(op, [x, [2, 6, 8, 8]]), (4, false));
        assert_eq!(sum(op, [x, [2, 6, 5, 5]]), (4, false));
        let shapes = [[2, 6, 16], [2, 6, 8]].map(Shape::new);
        let sum = Sum::of(Op::max_pool1d_with_indices_backward, &shapes).unwrap();
        assert_eq!(sum.products, 4);
    }

    #[test]
    fn what_tensor_cores_take_is_added_in_f32() {
        assert_eq!(Reduction::on(&Device::flex()), Reduction::Full);
        let [dense, without_bf16] = [true, false].map(|bf16| Reduction::FullIfDense { bf16 });
        // As CubeCL 0.11 names what it compiles for.
        for (name, compiles_for, expected) in [
            ("NVIDIA H200", "ptx_sm90", dense),
            ("NVIDIA GeForce RTX 5090", "ptx_sm120", dense),
            ("NVIDIA A100-SXM4-80GB", "ptx_sm80", dense),
            ("Tesla T4", "ptx_sm75", without_bf16),
            ("NVIDIA GeForce GTX 1660", "ptx_sm75", Reduction::Reduced),
            ("Tesla V100-SXM2-16GB", "ptx_sm70", without_bf16),
            ("Tesla P100-PCIE-16GB", "ptx_sm60", Reduction::Reduced),
            ("AMD Instinct MI300X", "hip-kernel_gfx942", dense),
            ("AMD Radeon 8060S", "hip-kernel_gfx1151", dense),
            (
                "AMD Radeon RX 5700",
                "hip-kernel_gfx1010",
                Reduction::Reduced,
            ),
            ("AMD Radeon", "spirv_4098_5567", Reduction::Reduced),
            ("a processor", "cpu_x86_64", Reduction::Reduced),
        ] {
            assert_eq!(Reduction::of(Some([name, compiles_for])), expected);
        }
        #[cfg(feature = "cpu")]
        assert_eq!(Reduction::on(&Device::cpu()), Reduction::Reduced);
    }

    #[test]
    fn only_long_sums_are_moved() {
        let shapes = |channels: usize| [[1, channels, 9, 9], [4, channels, 2, 2]].map(Shape::new);
        let low = DType::BF16;
        let dense = |it: Reduction, channels| it.loses(Op::conv2d, low, &shapes(channels));
        assert!(!dense(Reduction::Reduced, 4) && dense(Reduction::Reduced, 5));
        let [tensor_cores, older] = [true, false].map(|bf16| Reduction::FullIfDense { bf16 });
        assert!(!dense(tensor_cores, 5) && !dense(Reduction::Full, 5));
        assert!(dense(older, 5) && !older.loses(Op::conv2d, DType::F16, &shapes(5)));
        let transposed = |it: Reduction| {
            it.loses(
                Op::conv_transpose2d,
                low,
                &[[1, 5, 9, 9], [5, 4, 2, 2]].map(Shape::new),
            )
        };
        assert!(transposed(tensor_cores) && !transposed(Reduction::Full));
    }
}
