//! [`Constants`]: the numbers that a program gives to an op, where the op computes in a narrower dtype than the program sees.

use super::call::Call;
use crate::{Inputs, Op, Plan};
use burn_backend::{DType, Scalar};
use burn_ir::BackendIr;

/// The first constant of an op, and the sizes of all without zeros and those that are not finite: the smallest, the largest, and how far
/// the nearest to 1 is from it, without 1 itself.
#[derive(Default)]
pub(crate) struct Constants {
    first: Option<f64>,
    least: Option<f64>,
    most: Option<f64>,
    from_one: Option<f64>,
}

impl Constants {
    pub(crate) fn see(&mut self, constant: Scalar) {
        let number = constant.elem::<f64>();
        self.first.get_or_insert(number);
        let size = number.abs();
        if size > 0.0 && size.is_finite() {
            self.least = Some(self.least.map_or(size, |least| least.min(size)));
            self.most = Some(self.most.map_or(size, |most| most.max(size)));
            let from_one = size - 1.0;
            if from_one != 0.0 && self.from_one.is_none_or(|it| from_one.abs() < it.abs()) {
                self.from_one = Some(from_one);
            }
        }
    }

    pub(crate) fn first(&self) -> Option<f64> {
        self.first
    }

    /// Whether one of them would be 0, 1, -1 or infinite in `dtype`, and the op would then compute something else.
    fn are_lost(&self, op: Op, dtype: DType) -> bool {
        let Some(range) = dtype.finfo() else {
            return false;
        };
        // Half of the smallest number is rounded to 0.
        let least = range.min_positive * range.epsilon / 2.0;
        let vanishes = self.least.is_some_and(|size| size <= least);
        let overflows = self.most.is_some_and(|size| size > range.max);
        // What is at most half as far from 1 as the next number is rounded to 1. Below 1 that number is half as far as above.
        let near_one = -range.epsilon / 4.0..=range.epsilon / 2.0;
        let is_one = self.from_one.is_some_and(|it| near_one.contains(&it));
        match op {
            Op::float_add_scalar | Op::float_sub_scalar => vanishes || overflows,
            op => saturates(op) && (vanishes || is_one),
        }
    }
}

/// Whether a large finite constant of the op becomes the largest number of a narrower dtype: where a program fills a tensor with it,
/// as it does for a mask, and where it looks for such elements.
fn saturates(op: Op) -> bool {
    matches!(
        op,
        Op::float_mask_fill
            | Op::float_pad
            | Op::float_clamp
            | Op::float_clamp_min
            | Op::float_clamp_max
            | Op::float_equal_elem
            | Op::float_not_equal_elem
            | Op::float_greater_elem
            | Op::float_greater_equal_elem
            | Op::float_lower_elem
            | Op::float_lower_equal_elem
    )
}

impl<B: BackendIr> Call<B> {
    /// Keeps constants that would be lost, such as the 1e-8 that keeps a logarithm finite, or the bound of `1 - 1e-7` that keeps the
    /// derivative of an arc cosine finite: the op then computes and stores in the dtype that the program sees.
    pub(super) fn keep_constants(&mut self) {
        let Some(inputs) = &self.inputs else {
            return;
        };
        let lost = |dtype| dtype != inputs.nominal && self.constants.are_lost(self.op, dtype);
        if self.dtypes(inputs).into_iter().any(lost) {
            self.plan = Plan {
                recompute: self.plan.recompute,
                ..Plan::compute(inputs.nominal)
            };
        }
    }

    /// The dtypes that the op computes in and stores.
    fn dtypes(&self, inputs: &Inputs) -> [DType; 2] {
        let computed = self.plan.compute.unwrap_or(inputs.widest);
        [computed, self.plan.stored(computed)]
    }

    /// A constant, fit for the dtypes that the op computes in and stores: see [`saturates`].
    pub(crate) fn fit(&self, constant: Scalar) -> Scalar {
        let Some(inputs) = self.inputs.as_ref().filter(|_| saturates(self.op)) else {
            return constant;
        };
        let number = constant.elem::<f64>();
        let narrower = self.dtypes(inputs).into_iter();
        let narrower = narrower.filter(|dtype| *dtype != inputs.nominal);
        let fit = narrower.filter_map(|dtype| dtype.finfo());
        let fit = fit.fold(number, |number, range| number.clamp(range.min, range.max));
        match number.is_finite() && fit != number {
            true => Scalar::Float(fit),
            false => constant,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest fp16 is 2^-24, its largest 65504.
    #[test]
    fn constants_are_lost_where_a_dtype_does_not_hold_them() {
        let lost = |op, numbers: &[f64], dtype| {
            let mut constants = Constants::default();
            let numbers = numbers.iter().map(|number| Scalar::Float(*number));
            numbers.for_each(|number| constants.see(number));
            constants.are_lost(op, dtype)
        };
        for (op, numbers, in_f16, in_bf16) in [
            (Op::float_add_scalar, &[1e-8][..], true, false),
            (Op::float_add_scalar, &[2f64.powi(-25)], true, false),
            (Op::float_add_scalar, &[2f64.powi(-24)], false, false),
            (Op::float_add_scalar, &[0.0], false, false),
            (Op::float_add_scalar, &[-1e5], true, false),
            (
                Op::float_add_scalar,
                &[f64::NEG_INFINITY, f64::NAN],
                false,
                false,
            ),
            (Op::float_mul_scalar, &[1e-8], false, false),
            (Op::float_lower_elem, &[f32::MIN.into()], false, false),
            (Op::float_lower_elem, &[1e-8], true, false),
            (Op::float_mask_fill, &[f32::MIN.into()], false, false),
            (
                Op::float_mask_fill,
                &[f32::MIN_POSITIVE.into()],
                true,
                false,
            ),
            (Op::float_clamp, &[1e-8, 1e9], true, false),
            (Op::float_clamp, &[-1.0, 1e9], false, false),
            (Op::float_clamp, &[-1.0, 1.0], false, false),
            // Next to 1 are 1 - 2^-11 and 1 + 2^-10 in fp16, 1 - 2^-8 and 1 + 2^-7 in bf16.
            (Op::float_clamp, &[0.0, 1.0 - 1e-7], true, true),
            (Op::float_clamp, &[-1.0 + 1e-4, 0.0], true, true),
            (Op::float_clamp_max, &[1.0 - 1e-3], false, true),
            (Op::float_clamp_max, &[0.99], false, false),
            (Op::float_greater_elem, &[1.0 + 1e-4], true, true),
            (Op::float_greater_elem, &[1.0 + 1e-3], false, true),
            (Op::float_greater_elem, &[1.01], false, false),
            (Op::float_mul_scalar, &[1.0 - 1e-7], false, false),
        ] {
            let found = [DType::F16, DType::BF16].map(|dtype| lost(op, numbers, dtype));
            assert_eq!(found, [in_f16, in_bf16], "{op} {numbers:?}");
            assert!(!lost(op, numbers, DType::F32));
        }
    }
}
