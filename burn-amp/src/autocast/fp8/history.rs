//! Delayed scaling of layers.

use super::linear::Role;
use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{FloatDType, Shape},
};
use burn_fp8::{Fp8Format, Fp8Ops, Operand, recipe::DelayedScaling};

/// The amaxes of a layer's earlier casts, by what the tensor is to the layer; kept with the layer's weight, over all steps.
pub(super) struct Histories<B: Backend>(Vec<(Role, History<B>)>);

struct History<B: Backend> {
    amaxes: FloatTensor<B>,
    scale: FloatTensor<B>,
    /// How often amaxes were taken in.
    steps: usize,
}

impl<B: Backend> Default for Histories<B> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<B: Backend + Fp8Ops> Histories<B> {
    /// Cast by the scale that the history gives, and take the tensor's amax into it. The first time the scale is that of the
    /// tensor's own amax.
    pub(super) fn cast(
        &mut self,
        tensor: FloatTensor<B>,
        format: Fp8Format,
        recipe: &DelayedScaling,
        role: Role,
    ) -> Operand<B> {
        let place = match self.0.iter().position(|(of, _)| *of == role) {
            Some(place) => place,
            None => {
                self.0.push((role, History::new(&tensor, format, recipe)));
                self.0.len() - 1
            }
        };
        self.0[place].1.cast(tensor, format, recipe)
    }
}

impl<B: Backend + Fp8Ops> History<B> {
    fn new(tensor: &FloatTensor<B>, format: Fp8Format, recipe: &DelayedScaling) -> Self {
        let length = Shape::new([recipe.amax_history_len]);
        let amax = B::fp8_amax(tensor.clone());
        let zeros = B::float_zeros(length, &tensor.device(), FloatDType::F32);
        let one = B::float_ones(Shape::new([1]), &tensor.device(), FloatDType::F32);
        // By the recipe's own rule, margin and all; the history stays empty.
        let (_, scale) = B::fp8_update_scale(zeros.clone(), one, amax, recipe.update(format));
        Self {
            amaxes: zeros,
            scale,
            steps: 0,
        }
    }

    fn cast(
        &mut self,
        tensor: FloatTensor<B>,
        format: Fp8Format,
        recipe: &DelayedScaling,
    ) -> Operand<B> {
        let (operand, amax) = Operand::cast_with(tensor, self.scale.clone(), format);
        let (amaxes, scale) = B::fp8_update_scale(
            self.amaxes.clone(),
            self.scale.clone(),
            amax,
            recipe.update(format),
        );
        self.amaxes = amaxes;
        if self.steps.is_multiple_of(recipe.interval) {
            self.scale = scale;
        }
        self.steps += 1;
        operand
    }
}
