//! [`Role`]: what a tensor is to a softmax.

use super::{
    Logits, Scale, SoftmaxBackward, Softmaxes, is_of_rows,
    logits::Scores,
    statistics::{Statistics, logits},
};
use crate::{LayeredFloat, Op};
use burn_backend::{
    Backend, DType, Shape, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_ir::BackendIr;
use std::sync::Arc;

/// What a tensor is to a softmax. It says what the elements are, so it is as true of any other tensor. In formulas, `e` is
/// `exp(x - maximum)`, and `sum` that of its rows.
pub(crate) enum Role<B: Backend> {
    /// Scores of attention.
    Scores(Arc<Scores<B>>),
    /// Their gradient, and this where they were masked.
    OfScores(Arc<Gradient<B>>),
    OfMasked(Arc<Gradient<B>>),
    /// The maxima of rows.
    Maxima(Arc<Statistics<B>>),
    /// `x - maximum`.
    Shifted(Of<B>),
    /// `e`.
    Exp(Of<B>),
    /// `sum`.
    Sums(Arc<Statistics<B>>),
    /// `log(sum)`.
    LogSums(Arc<Statistics<B>>),
    /// `x - maximum - log(sum)`.
    LogSoftmax(Of<B>),
    /// `1 / sum`.
    Inverses(Arc<Statistics<B>>),
    /// `sum^2`.
    Squares(Arc<Statistics<B>>),
    /// `-e`.
    NegExp(Of<B>),
    /// `-e / sum^2`.
    NegOverSquares(Of<B>),
    Zeros,
    Ones,
    /// `dy / sum`.
    OverSums(Arc<Statistics<B>>, Box<LayeredFloat<B>>),
    /// `dy (-e / sum^2)`.
    Weighted(Arc<Gradient<B>>),
    /// The sums of these rows.
    SumsOfWeighted(Arc<Gradient<B>>),
    /// These, in each column.
    SpreadSums(Arc<Gradient<B>>),
    /// `dy / sum`, plus these: the gradient of `e`.
    OfExp(Arc<Gradient<B>>),
    /// A gradient at one index of each row, and zeros elsewhere.
    Picked(Arc<Picked<B>>),
    NegPicked(Arc<Picked<B>>),
    /// A number of each row, in each column.
    Spread(Box<LayeredFloat<B>>),
    /// These times `e`.
    SpreadExp(Of<B>, Box<LayeredFloat<B>>),
}

pub(crate) type Of<B> = Arc<Exponents<B>>;

/// A tensor with the statistics of its rows.
pub(crate) struct Exponents<B: Backend> {
    pub(super) x: LayeredFloat<B>,
    pub(super) statistics: Arc<Statistics<B>>,
}

/// The gradient of a softmax.
pub(crate) struct Gradient<B: Backend> {
    pub(super) of: Of<B>,
    pub(super) gradient: LayeredFloat<B>,
}

/// The gradients of what was gathered at one index of each row.
pub(crate) struct Picked<B: Backend> {
    pub(super) gradient: LayeredFloat<B>,
    pub(super) indices: IntTensor<B>,
    /// Of what it was gathered from.
    pub(super) shape: Shape,
}

/// What an op on two tensors makes.
pub(super) enum Step<B: Backend> {
    Role(Role<B>),
    /// `e / sum`.
    Softmax(Of<B>),
    /// The gradient of a softmax's input.
    Backward(Arc<Gradient<B>>),
    /// The gradient of the input of a softmax whose logarithm was gathered from, with the factors of `e`.
    PickedBackward(Arc<Picked<B>>, Of<B>, Box<LayeredFloat<B>>),
}

impl<B: Backend> Exponents<B> {
    /// The scores that `x` is, if it is some.
    pub(super) fn scores(&self) -> Option<&Arc<Scores<B>>> {
        scores(&self.x)
    }

    /// `x`, of what its kernels compute it.
    pub(super) fn logits(&self) -> Logits<B> {
        logits(&self.x)
    }

    /// `x`, its maxima, and another number of each row.
    pub(super) fn with(&self, number: FloatTensor<B>) -> [FloatTensor<B>; 3] {
        let [maxima, _] = self.statistics.get();
        [self.x.clone().into_storage(), maxima, number]
    }

    /// The softmax in f32, by ops, with which what follows is one kernel.
    pub(super) fn by_ops(&self) -> FloatTensor<B> {
        let x = self.x.in_dtype(Some(DType::F32));
        let [maxima, sums] = self.statistics.get();
        let e = B::float_exp(B::float_sub(x, maxima));
        B::float_div(e, sums)
    }

    /// The softmax in that dtype, by a kernel of its own.
    pub(super) fn by_kernel(&self, dtype: DType) -> FloatTensor<B> {
        self.statistics.softmax(&self.x, dtype)
    }
}

impl<B: BackendIr> Gradient<B> {
    /// The gradient of the softmax's input, which is 0 where that was `masked`, and scaled.
    pub(super) fn backward(
        &self,
        softmaxes: Softmaxes<B>,
        masked: bool,
        scale: Scale,
    ) -> FloatTensor<B> {
        let [maxima, sums] = self.of.statistics.get();
        (softmaxes.backward)(SoftmaxBackward {
            of: self.of.logits(),
            maxima,
            sums,
            gradient: self.gradient.clone().into_computed(),
            masked,
            scale,
        })
    }
}

impl<B: Backend> Role<B> {
    /// Whether a tensor that is this waits until its elements are needed. Numbers of rows do not.
    pub(crate) fn is_deferred(&self) -> bool {
        !matches!(
            self,
            Self::Maxima(_)
                | Self::Sums(_)
                | Self::LogSums(_)
                | Self::Inverses(_)
                | Self::Squares(_)
        )
    }

    /// What the result of an op on such a tensor is.
    pub(super) fn after(&self, op: Op) -> Option<Self> {
        Some(match (op, self) {
            (Op::float_exp, Self::Shifted(of)) => Self::Exp(of.clone()),
            (Op::float_log, Self::Sums(of)) => Self::LogSums(of.clone()),
            (Op::float_recip, Self::Sums(of)) => Self::Inverses(of.clone()),
            (Op::float_neg, Self::Exp(of)) => Self::NegExp(of.clone()),
            (Op::float_neg, Self::Picked(picked)) => Self::NegPicked(picked.clone()),
            _ => return None,
        })
    }

    /// What the result of an op on two such tensors is.
    fn join(op: Op, x: &Self, y: &Self) -> Option<Step<B>> {
        let same = |one: &Arc<Statistics<B>>, other: &Arc<Statistics<B>>| Arc::ptr_eq(one, other);
        let role = match (op, x, y) {
            (Op::float_sub, Self::Shifted(of), Self::LogSums(by)) if same(&of.statistics, by) => {
                by.join();
                Self::LogSoftmax(of.clone())
            }
            (Op::float_div, Self::Exp(of), Self::Sums(by)) if same(&of.statistics, by) => {
                by.join();
                return Some(Step::Softmax(of.clone()));
            }
            (Op::float_mul, Self::Sums(of), Self::Sums(by)) if same(of, by) => {
                Self::Squares(of.clone())
            }
            (Op::float_div, Self::NegExp(of), Self::Squares(by)) if same(&of.statistics, by) => {
                Self::NegOverSquares(of.clone())
            }
            (Op::float_mul, Self::Ones, Self::SumsOfWeighted(gradient)) => {
                Self::SpreadSums(gradient.clone())
            }
            (Op::float_add, Self::OverSums(by, gradient), Self::SpreadSums(of))
            | (Op::float_add, Self::SpreadSums(of), Self::OverSums(by, gradient))
                if same(&of.of.statistics, by) && of.gradient.identity() == gradient.identity() =>
            {
                Self::OfExp(of.clone())
            }
            (Op::float_mul, Self::Spread(numbers), Self::Exp(of)) => {
                Self::SpreadExp(of.clone(), numbers.clone())
            }
            (Op::float_mul, Self::OfExp(gradient), Self::Exp(of))
                if same(&gradient.of.statistics, &of.statistics) =>
            {
                return Some(Step::Backward(gradient.clone()));
            }
            (Op::float_add, Self::Picked(picked), Self::SpreadExp(of, factors))
            | (Op::float_add, Self::SpreadExp(of, factors), Self::Picked(picked))
                if picked.shape == of.x.shape() =>
            {
                return Some(Step::PickedBackward(
                    picked.clone(),
                    of.clone(),
                    factors.clone(),
                ));
            }
            _ => return None,
        };
        Some(Step::Role(role))
    }
}

impl<B: BackendIr> Step<B> {
    /// What an op makes of two tensors. `shifted` tells whether `y` is the maximum of `x`.
    pub(super) fn of(
        op: Op,
        x: &LayeredFloat<B>,
        y: &LayeredFloat<B>,
        shifted: bool,
    ) -> Option<Self> {
        let shapes = [x.shape(), y.shape()];
        let by_row = is_of_rows(&shapes[1], &shapes[0]);
        if !by_row && shapes[0] != shapes[1] {
            return None;
        }
        let role = |tensor: &LayeredFloat<B>| tensor.role().cloned();
        let role = match (op, role(x).as_deref(), role(y).as_deref()) {
            (Op::float_sub, None | Some(Role::Scores(_)), Some(Role::Maxima(statistics)))
                if shifted && by_row =>
            {
                let scores = x.role().filter(|_| scores(x).is_some());
                Role::Shifted(Arc::new(Exponents {
                    x: x.alone().with_role(scores.cloned()),
                    statistics: statistics.clone(),
                }))
            }
            (Op::float_mul, None, Some(Role::Inverses(of))) if shapes[0] == *of.shape() => {
                Role::OverSums(of.clone(), Box::new(x.clone()))
            }
            (Op::float_mul, None, Some(Role::NegOverSquares(of))) => {
                Role::Weighted(Arc::new(Gradient {
                    of: of.clone(),
                    gradient: x.clone(),
                }))
            }
            (Op::float_mul, Some(Role::Ones), None) if by_row => Role::Spread(Box::new(y.alone())),
            (_, Some(x), Some(y)) => return Role::join(op, x, y),
            _ => return None,
        };
        Some(Self::Role(role))
    }
}

/// The scores that a tensor is, if it is some.
pub(super) fn scores<B: Backend>(x: &LayeredFloat<B>) -> Option<&Arc<Scores<B>>> {
    match x.role().map(|role| &**role) {
        Some(Role::Scores(scores)) => Some(scores),
        _ => None,
    }
}
