//! [`Precision`]: the autocast devices that programs run on.

use burn_amp::{
    Autocast, Policy,
    recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe},
};

/// In which precision a device runs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Precision {
    O0,
    Bf16,
    Fp16,
    O2,
    O3,
    Fp8Current,
    Fp8Delayed,
    Fp8Block,
}

impl Precision {
    /// Those in 16 bits.
    pub(super) const LOW: &[Self] = &[Self::Bf16, Self::Fp16, Self::O2, Self::O3];

    /// All but `O0`.
    pub(super) const EVERY: &[Self] = &[
        Self::Bf16,
        Self::Fp16,
        Self::O2,
        Self::O3,
        Self::Fp8Current,
        Self::Fp8Delayed,
        Self::Fp8Block,
    ];

    pub(super) fn autocast(self) -> Autocast {
        let fp8 = |recipe: Fp8Recipe| Autocast::fp8(recipe).expect("the recipe is valid");
        match self {
            Self::O0 => Autocast::new(Policy::o0()),
            Self::Bf16 => Autocast::bf16(),
            Self::Fp16 => Autocast::fp16(),
            Self::O2 => Autocast::new(Policy::o2()),
            Self::O3 => Autocast::new(Policy::o3()),
            Self::Fp8Current => fp8(CurrentScaling::new().into()),
            Self::Fp8Delayed => fp8(DelayedScaling::new().into()),
            Self::Fp8Block => fp8(BlockScaling::new().into()),
        }
    }
}
