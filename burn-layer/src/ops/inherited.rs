//! [`Inherited`]: what a result has from the op's first float input.

use super::call::Call;
use crate::{
    Descent, LayeredFloat, LayeredTensor, Op,
    float::{Copied, Origin},
    rows::Rows,
};
use burn_backend::{
    DType, Shape, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn_ir::BackendIr;
use parking_lot::Mutex;
use std::sync::Arc;

/// What a result has from the op's first float input.
pub(super) struct Inherited<B: BackendIr> {
    /// If the result is the maximum of a tensor along a dimension: that tensor.
    maximum_of: Option<Origin>,
    /// If the result is a mask of the elements of a tensor that are not above a number: that tensor.
    not_above_of: Option<Origin>,
    /// What layers keep with the input, if the result inherits it.
    descent: Option<Descent>,
    /// The dtype of the input's narrower copy, if the op may be the last of an optimizer's step.
    copied_in: Option<DType>,
    /// If the result is a view: of what.
    view: Option<View<B>>,
}

/// A view of a tensor: the rows of that one, and its copy in another dtype.
enum View<B: BackendIr> {
    Reshape {
        rows: Arc<Rows>,
        copied: Copied<FloatTensor<B>>,
    },
    Transposition {
        rows: Arc<Rows>,
        copy: Option<(DType, FloatTensor<B>)>,
    },
}

impl<B: BackendIr> Inherited<B> {
    pub(super) fn new(op: Op, first: &LayeredFloat<B>) -> Self {
        let maximum_of = match op {
            Op::float_max_dim | Op::float_max_dim_with_indices => Some(first.origin()),
            // Burn's quiet softmax replaces infinite maxima.
            Op::float_mask_fill => first.maximum_of().cloned(),
            _ => None,
        };
        let rows = || first.rows().clone();
        let view = match op {
            Op::float_reshape => Some(View::Reshape {
                rows: rows(),
                copied: first.copied().clone(),
            }),
            op if transposes(op) => Some(View::Transposition {
                rows: rows(),
                copy: first.copy(),
            }),
            _ => None,
        };
        Self {
            maximum_of,
            not_above_of: (op == Op::float_lower_equal_elem).then(|| first.origin()),
            descent: match steps(op) {
                true => first.rows().descent.get().cloned(),
                false => None,
            },
            copied_in: match op {
                Op::float_sub | Op::float_add => first.copied_as_parameter(),
                _ => None,
            },
            view,
        }
    }
}

impl<B: BackendIr> Call<B> {
    /// Adds what is known of the result to it.
    pub(super) fn known(&self, tensor: LayeredFloat<B>, shape: Shape) -> LayeredFloat<B> {
        let inherited = self.inherited.as_ref();
        let tensor = tensor
            .with_maximum_of(inherited.and_then(|it| it.maximum_of.clone()))
            .with_part(self.makes_part(&shape))
            .with_norm(self.norm.clone())
            .with_role(self.role.clone())
            .with_row_norm(self.row_norm.clone())
            .with_rotation(self.rotation.clone());
        if let Some(used) = &self.once_more {
            tensor.rows().set_used(used);
        }
        let descent = inherited.and_then(|it| it.descent.as_ref());
        let tensor = match (descent, &self.inputs) {
            (Some(descent), Some(inputs)) if inputs.shapes[0] == shape => {
                tensor.rows().descent.get_or_init(|| descent.clone());
                tensor
            }
            // The result of a step on a parameter, above, is a parameter: neither a gradient nor computed.
            _ => {
                let gradient = self.lineage.makes_gradient(&shape);
                let in_backward = self.layer().is_in_backward();
                let computed = self.lineage.makes_computed(gradient, in_backward);
                tensor.with_gradient(gradient).with_computed(computed)
            }
        };
        match inherited.and_then(|it| it.view.as_ref()) {
            Some(View::Reshape { rows, copied }) => {
                self.reshaped(tensor.with_copied(copied.clone()), &shape, rows)
            }
            Some(View::Transposition { rows, copy }) if self.turns(shape.num_dims()) => {
                turned(tensor.with_columns(Some(rows.clone())), &shape, copy)
            }
            _ => tensor,
        }
    }

    /// Casts what an optimizer makes of a parameter if the parameter was cast, on a backend that fuses ops. Here the cast is part
    /// of the optimizer's kernel. In forward it would be a kernel of its own, in the midst of others that could be one.
    pub(super) fn casts_ahead(&self, tensor: &LayeredFloat<B>) {
        let inherited = self.inherited.as_ref();
        if let (Some(dtype), Some(inputs)) = (inherited.and_then(|it| it.copied_in), &self.inputs)
            && inputs.shapes[0] == tensor.shape()
            && !tensor.is_gradient()
            && !tensor.is_computed()
            && self.layer().is_fused()
        {
            tensor.clone().into_dtype(dtype);
        }
    }

    /// Passes on what a reshape leaves as it was: the rows, if the last dimension is the same; and the columns, if the last two are.
    fn reshaped(
        &self,
        tensor: LayeredFloat<B>,
        shape: &Shape,
        rows: &Arc<Rows>,
    ) -> LayeredFloat<B> {
        let Some(inputs) = &self.inputs else {
            return tensor;
        };
        let before = inputs.shapes[0].iter().rev();
        match before
            .zip(shape.iter().rev())
            .take_while(|(a, b)| a == b)
            .count()
        {
            0 => tensor,
            1 => tensor.with_rows(rows.clone()),
            _ => tensor
                .with_rows(rows.clone())
                .with_columns(inputs.first_columns.clone()),
        }
    }

    /// Whether the op swaps the last two of `rank` dimensions, and no others.
    fn turns(&self, rank: usize) -> bool {
        let Some(first) = rank.checked_sub(2) else {
            return false;
        };
        let mut dims = self.dims.clone();
        match self.op {
            Op::float_transpose => true,
            Op::float_swap_dims => {
                dims.sort_unstable();
                dims == [first, first + 1]
            }
            Op::float_permute => {
                dims.swap(first, first + 1);
                dims.into_iter().eq(0..rank)
            }
            _ => false,
        }
    }

    /// Wraps a bool result.
    pub(crate) fn mask(&mut self, mask: BoolTensor<B>) -> LayeredTensor<BoolTensor<B>> {
        let of = self.inherited.take().and_then(|it| it.not_above_of);
        let of = of.filter(|_| self.constants.first() == Some(0.0));
        self.tensor(mask).with_not_positive_of(of)
    }
}

/// Gives a tensor whose last two dimensions were swapped the copy of its input in another dtype, swapped as well.
fn turned<B: BackendIr>(
    tensor: LayeredFloat<B>,
    shape: &Shape,
    copy: &Option<(DType, FloatTensor<B>)>,
) -> LayeredFloat<B> {
    let Some((dtype, copy)) = copy.clone() else {
        return tensor;
    };
    let last = shape.num_dims() - 1;
    let copy = B::float_swap_dims(copy, last - 1, last);
    let copied = Arc::new(Mutex::new(Some((dtype, copy))));
    if tensor.is_computed() && tensor.recomputed().is_none() {
        tensor.layer().keep_for_now(&copied);
    }
    tensor.with_copied(copied)
}

/// Whether the op changes the order of dimensions.
pub(super) fn transposes(op: Op) -> bool {
    matches!(
        op,
        Op::float_transpose | Op::float_swap_dims | Op::float_permute
    )
}

/// The ops that steps of optimizers consist of. Their results inherit the [`Descent`] of their first float input.
fn steps(op: Op) -> bool {
    matches!(
        op,
        Op::float_add
            | Op::float_sub
            | Op::float_mul_scalar
            | Op::float_div_scalar
            | Op::float_clamp
            | Op::float_clamp_min
            | Op::float_clamp_max
            | Op::float_mask_where
    )
}
