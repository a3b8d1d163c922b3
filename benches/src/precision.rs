//! The precisions to compare, and whether activations are kept.

use burn::tensor::Device;
use burn_amp::{
    Autocast, Policy,
    recipe::{CurrentScaling, DelayedScaling, Fp8Recipe},
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The precision in which a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Precision {
    /// In f32 on the plain device.
    Plain,
    /// In f32 on the autocast device.
    O0,
    /// In bf16 on the autocast device.
    Bf16,
    /// Like [`Bf16`](Self::Bf16), but without [recomputing](Autocast::recompute) cheap activations.
    Bf16Kept,
    /// On the plain device, with casts that the program itself makes where autocast would: products in bf16
    /// ([`cast_products`](crate::cast_products)), norms, softmax and loss in f32. Sums over rows or over several
    /// products in backward are in bf16 here, and in f32 with autocast.
    Bf16ByHand,
    /// Like [`Bf16ByHand`](Self::Bf16ByHand), on the autocast device with everything else in f32. On CUDA, the layer computes products
    /// in another shape that Burn cannot compute as they are on GPUs with TMA. There the plain device fails at them.
    Bf16ByHandOnO0,
    /// Everything but the loss in bf16 on the plain device ([`cast_all`](crate::cast_all)). Less work than with autocast, and
    /// less exact.
    AllBf16,
    /// Linear layers in fp8 with current scaling (by the amaxes of the tensors themselves), the rest in bf16.
    Fp8Current,
    /// Linear layers in fp8 with delayed scaling (by the amaxes of earlier steps), the rest in bf16.
    Fp8Delayed,
    /// Like [`Plain`](Self::Plain), with Burn's gradient checkpointing: cheap activations are recomputed in backward.
    PlainCheckpointed,
    /// Like [`Bf16`](Self::Bf16), with Burn's gradient checkpointing.
    Bf16Checkpointed,
}

impl Precision {
    /// All precisions. The others are compared with the first.
    pub const ALL: [Self; 11] = [
        Self::Plain,
        Self::O0,
        Self::Bf16,
        Self::Bf16Kept,
        Self::Bf16ByHand,
        Self::Bf16ByHandOnO0,
        Self::AllBf16,
        Self::Fp8Current,
        Self::Fp8Delayed,
        Self::PlainCheckpointed,
        Self::Bf16Checkpointed,
    ];

    /// Whether the program itself casts for its products, and for nothing else.
    pub fn is_by_hand(self) -> bool {
        matches!(self, Self::Bf16ByHand | Self::Bf16ByHandOnO0)
    }

    /// The device on which the program is to run, made from `device`. To train, the program makes it an autodiff device.
    pub fn device(self, device: Device) -> Device {
        let fp8 = |recipe: Fp8Recipe| Autocast::fp8(recipe).expect("the recipe is valid");
        let autocast = match self {
            Self::Plain | Self::Bf16ByHand | Self::AllBf16 => return device,
            Self::PlainCheckpointed => return device.autodiff().gradient_checkpointing(),
            Self::Bf16Checkpointed => {
                return Self::PlainCheckpointed.device(Self::Bf16.device(device));
            }
            Self::O0 | Self::Bf16ByHandOnO0 => Autocast::new(Policy::o0()),
            Self::Bf16 => Autocast::bf16(),
            Self::Bf16Kept => Autocast::bf16().recompute(false),
            Self::Fp8Current => fp8(CurrentScaling::new().into()),
            Self::Fp8Delayed => fp8(DelayedScaling::new().into()),
        };
        // What is counted on a CPU are the kernels of a GPU with tensor cores, which take the dense convolutions of these models.
        #[cfg(feature = "cpu")]
        let autocast = autocast.reduced_precision_reduction(device == Device::cpu());
        let device = autocast.device(device);
        device.expect("the device computes in bf16")
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Plain => "plain f32",
            Self::O0 => "autocast O0",
            Self::Bf16 => "autocast bf16",
            Self::Bf16Kept => "autocast bf16, nothing recomputed",
            Self::Bf16ByHand => "bf16 by hand",
            Self::Bf16ByHandOnO0 => "bf16 by hand on O0",
            Self::AllBf16 => "all bf16",
            Self::Fp8Current => "autocast fp8, current scaling",
            Self::Fp8Delayed => "autocast fp8, delayed scaling",
            Self::PlainCheckpointed => "plain f32, gradient checkpointing",
            Self::Bf16Checkpointed => "autocast bf16, gradient checkpointing",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        nn::LinearConfig,
        tensor::{DType, GradientCheckpointingStrategy, Tensor},
    };

    #[test]
    fn two_do_gradient_checkpointing() {
        for precision in Precision::ALL {
            let device = precision.device(Device::flex()).autodiff();
            let expected = match precision {
                Precision::PlainCheckpointed | Precision::Bf16Checkpointed => {
                    GradientCheckpointingStrategy::Balanced
                }
                _ => GradientCheckpointingStrategy::Disabled,
            };
            let strategy = device.gradient_checkpointing_strategy();
            assert_eq!(strategy, Some(expected), "{precision}");
        }
    }

    /// The program sees f32 in every precision. Only the rounding differs.
    #[test]
    fn each_is_another_device() {
        let linear = LinearConfig::new(16, 16).init(&Device::flex());
        let outputs = Precision::ALL.map(|precision| {
            let device = precision.device(Device::flex()).autodiff();
            let weight = Tensor::<2>::from_data(linear.weight.val().into_data(), &device);
            let weight = weight.require_grad();
            let output = |size: f32| {
                let x = Tensor::<2>::full([1, 16], size, &device);
                x.matmul(weight.clone())
            };
            // A step before, for delayed scales.
            let gradients = output(0.3).sum().backward();
            weight.grad(&gradients).unwrap().into_data();
            let output = output(0.0007);
            assert_eq!(output.dtype(), DType::F32, "{precision}");
            output.into_data()
        });
        let [
            plain,
            o0,
            bf16,
            bf16_kept,
            by_hand,
            by_hand_on_o0,
            all_bf16,
            current,
            delayed,
            plain_again,
            bf16_again,
        ] = &outputs;
        assert_eq!(
            [o0, by_hand, by_hand_on_o0, all_bf16, plain_again],
            [plain; 5],
            "no casts but the program's own"
        );
        assert_eq!(
            [bf16_kept, bf16_again],
            [bf16; 2],
            "nothing is rounded otherwise"
        );
        let different = [plain, bf16, current, delayed];
        for (number, output) in different.iter().enumerate() {
            assert!(!different[..number].contains(output), "{number}");
        }
    }
}
