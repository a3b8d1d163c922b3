//! [`Reduction`]: in which precision a device adds up the products of a convolution in 16 bits.

use burn::tensor::{DType, Device, Shape};
use burn_layer::{Inputs, Op, Plan};

/// So many products may be added in 16 bits. It lets through depthwise filters of up to 4 by 4; by 45 products, a bf16 sum was off by
/// 2 %.
const PRODUCTS: usize = 16;

/// In which precision a device adds up the products of a convolution in 16 bits.
///
/// CubeCL's kernels for tensor cores add in f32, as PyTorch's do. They take dense convolutions alone. Its other kernels (burn-cubecl
/// 0.22.1, cubek-convolution 0.3.1) add in the dtype of the inputs: beyond some hundred products of a size, a bf16 sum does not grow
/// any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    /// In f32.
    Full,
    /// In f32 where there is a kernel for tensor cores: for dense convolutions.
    FullIfDense,
    /// In 16 bits.
    Reduced,
}

impl Reduction {
    pub(super) fn on(device: &Device) -> Self {
        Self::of(fingerprint(device).as_deref())
    }

    /// Of the device that compiles for `fingerprint`; without one, it is Flex, or a backend that is not known.
    fn of(fingerprint: Option<&str>) -> Self {
        match fingerprint {
            None => Self::Full,
            // NVIDIA's tensor cores and AMD's matrix cores.
            Some(it) if it.starts_with("ptx") || it.starts_with("hip") => Self::FullIfDense,
            Some(_) => Self::Reduced,
        }
    }

    /// The plan, but in f32 for a convolution that would add up more than [`PRODUCTS`] in 16 bits. The result is stored as before.
    pub(super) fn plan(self, op: Op, plan: Plan, inputs: &Inputs) -> Plan {
        match plan.compute {
            Some(low @ (DType::BF16 | DType::F16)) if self.loses(op, &inputs.shapes) => Plan {
                compute: Some(DType::F32),
                store: plan.store.or(Some(low)),
                ..plan
            },
            _ => plan,
        }
    }

    fn loses(self, op: Op, shapes: &[Shape]) -> bool {
        let reduced = |dense: bool| match self {
            Self::Full => false,
            Self::FullIfDense => !dense,
            Self::Reduced => true,
        };
        Sum::of(op, shapes).is_some_and(|sum| sum.products > PRODUCTS && reduced(sum.dense))
    }
}

/// What a CubeCL device compiles its kernels for.
#[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu", feature = "rocm"))]
fn fingerprint(device: &Device) -> Option<String> {
    device.identity().map(|identity| identity.fingerprint)
}

#[cfg(not(any(feature = "cpu", feature = "cuda", feature = "wgpu", feature = "rocm")))]
fn fingerprint(_device: &Device) -> Option<String> {
    None
}

/// An element of what a convolution computes.
#[derive(Debug, PartialEq, Eq)]
struct Sum {
    /// How many products it is the sum of, at most.
    products: usize,
    /// Whether each input channel meets each output channel, in a convolution that is not transposed.
    dense: bool,
}

impl Sum {
    /// Of the op with float inputs of these shapes, if it is a convolution.
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
    fn what_tensor_cores_take_is_added_in_f32() {
        assert_eq!(Reduction::on(&Device::flex()), Reduction::Full);
        // As CubeCL 0.11 names what it compiles for.
        for (fingerprint, expected) in [
            ("ptx_sm90", Reduction::FullIfDense),
            ("hip-kernel_gfx942", Reduction::FullIfDense),
            ("spirv_4098_5567", Reduction::Reduced),
            ("cpu_x86_64", Reduction::Reduced),
        ] {
            assert_eq!(Reduction::of(Some(fingerprint)), expected);
        }
        #[cfg(feature = "cpu")]
        assert_eq!(Reduction::on(&Device::cpu()), Reduction::Reduced);
    }

    #[test]
    fn only_long_sums_are_moved() {
        let shapes = |channels: usize| [[1, channels, 9, 9], [4, channels, 2, 2]].map(Shape::new);
        let dense = |it: Reduction, channels| it.loses(Op::conv2d, &shapes(channels));
        assert!(!dense(Reduction::Reduced, 4) && dense(Reduction::Reduced, 5));
        assert!(!dense(Reduction::FullIfDense, 5) && !dense(Reduction::Full, 5));
        let transposed = |it: Reduction| {
            it.loses(
                Op::conv_transpose2d,
                &[[1, 5, 9, 9], [5, 4, 2, 2]].map(Shape::new),
            )
        };
        assert!(transposed(Reduction::FullIfDense) && !transposed(Reduction::Full));
    }
}
