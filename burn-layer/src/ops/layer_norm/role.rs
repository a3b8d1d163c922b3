//! [`RowNorm`]: what a tensor is to a normalization of rows.

use super::moments::{Around, Centered, Deviations, Moments, Normalized, Positive};
use crate::{
    LayeredFloat, Op,
    float::{Origin, Part},
    ops::softmax::{Role, is_of_rows},
};
use burn_backend::{Backend, Shape, TensorMetadata};
use burn_ir::BackendIr;
use std::sync::Arc;

/// What a tensor is to a normalization of rows. It says what the elements are, so it is as true of any other tensor. In formulas, `c`
/// is the input, less the mean of its row in a layer normalization, `d` the deviation of the row, and `g` the gradient of `c / d`.
pub(crate) enum RowNorm<B: Backend> {
    /// The means of the rows of a tensor.
    Mean(Origin, Arc<Moments<B>>),
    /// `c`, where it is not the input itself.
    Centered(Arc<Centered<B>>),
    /// `c^2`.
    Squared(Arc<Centered<B>>),
    /// The squares of a tensor that may be the input of an RMS normalization.
    SquaredInput(Box<LayeredFloat<B>>, Origin),
    /// The means of these.
    Variance(Arc<Moments<B>>),
    /// These plus a small number.
    Positive(Positive<B>),
    /// `d`, the root of these.
    Deviation(Arc<Deviations<B>>),
    /// `c / d`.
    Normalized(Of<B>),
    /// `1 / d`.
    Inverse(Arc<Deviations<B>>),
    /// `d^2`.
    Square(Arc<Deviations<B>>),
    /// One over the root of what `d` is the root of.
    InverseRoot(Positive<B>),
    /// Half of that.
    HalfInverseRoot(Positive<B>),
    NegCentered(Arc<Centered<B>>),
    /// A tensor that may be the input of an RMS normalization, negated.
    NegInput(Box<LayeredFloat<B>>, Origin),
    /// `-c / d^2`.
    NegOverSquare(Of<B>),
    /// A gradient times a row.
    Scaled(Box<LayeredFloat<B>>, Box<LayeredFloat<B>>),
    /// A gradient times `c / d`.
    Projected(Box<LayeredFloat<B>>, Of<B>),
    /// `g / d`.
    OverDeviation(Arc<Gradient<B>>),
    /// `g (-c / d^2)`.
    Weighted(Arc<Gradient<B>>),
    /// The sums of these rows: the gradient of `d`.
    OfDeviation(Arc<Gradient<B>>),
    OfVariance(Arc<Gradient<B>>),
    /// One over the number of columns, in each column.
    Fraction,
    /// The gradient of `c^2`.
    OfSquared(Arc<Gradient<B>>),
    /// The gradient of one of the factors of `c^2`.
    OfFactor(Arc<Gradient<B>>),
    /// `g / d` plus that.
    PartOfCentered(Arc<Gradient<B>>),
    /// `g / d` plus both: the gradient of `c`.
    OfCentered(Arc<Gradient<B>>),
    /// The gradient of `c`, plus another tensor.
    Added(Arc<Gradient<B>>, Box<LayeredFloat<B>>),
    /// Some of the three terms of the gradient of `c` where that is the input itself, to which gradients from elsewhere are added.
    Terms(Arc<Gradient<B>>, Terms<B>),
    NegOfCentered(Arc<Gradient<B>>),
    /// The sums of these rows: the gradient of the mean.
    OfMean(Arc<Gradient<B>>),
    /// What it adds to the gradient of the input.
    OfMeanSpread(Arc<Gradient<B>>),
}

pub(crate) type Of<B> = Arc<Normalized<B>>;

/// How many terms there are in a sum: `g / d`, and twice the gradient of one of the factors of `c^2`.
#[derive(Clone)]
pub(crate) struct Terms<B: Backend> {
    over_deviation: usize,
    of_factors: usize,
    added: Option<Box<LayeredFloat<B>>>,
}

/// The gradient of a normalized tensor.
pub(crate) struct Gradient<B: Backend> {
    /// The input, where more is known than `1 / d`.
    pub(super) x: Option<LayeredFloat<B>>,
    pub(super) by: Arc<Deviations<B>>,
    pub(super) gradient: LayeredFloat<B>,
}

/// What an op on two tensors makes.
pub(super) enum Step<B: Backend> {
    RowNorm(RowNorm<B>),
    /// The gradient of the input, plus another tensor.
    Backward(Arc<Gradient<B>>, Option<Box<LayeredFloat<B>>>),
}

impl<B: Backend> RowNorm<B> {
    /// Whether a tensor that is this waits until its elements are needed.
    pub(crate) fn is_deferred(&self) -> bool {
        !matches!(
            self,
            Self::Mean(..) | Self::Variance(_) | Self::Positive(_) | Self::Deviation(_)
        )
    }

    /// What the result of an op on such a tensor and a number, if it takes one, is.
    pub(super) fn after(&self, op: Op, number: Option<f64>) -> Option<Self> {
        Some(match (op, number, self) {
            (Op::float_add_scalar, Some(epsilon), Self::Variance(moments)) => {
                let moments = moments.clone();
                Self::Positive(Positive { moments, epsilon })
            }
            (Op::float_powf_scalar, Some(-0.5), Self::Positive(of)) => {
                Self::InverseRoot(of.clone())
            }
            (Op::float_div_scalar, Some(2.0), Self::InverseRoot(of)) => {
                Self::HalfInverseRoot(of.clone())
            }
            (Op::float_recip, None, Self::Deviation(of)) => Self::Inverse(of.clone()),
            (Op::float_neg, None, Self::Centered(of)) => Self::NegCentered(of.clone()),
            (Op::float_neg, None, Self::OfCentered(gradient)) => {
                Self::NegOfCentered(gradient.clone())
            }
            _ => return None,
        })
    }

    /// What the sums of the rows of such a tensor are.
    pub(super) fn summed(&self) -> Option<Self> {
        Some(match self {
            Self::Weighted(gradient) => Self::OfDeviation(gradient.clone()),
            Self::NegOfCentered(gradient) => Self::OfMean(gradient.clone()),
            _ => return None,
        })
    }

    /// What the result of an op on two such tensors is.
    fn join(op: Op, x: &Self, y: &Self) -> Option<Step<B>> {
        let step = match (op, x, y) {
            (Op::float_mul, Self::Centered(of), Self::Centered(by))
                if Arc::ptr_eq(&of.moments, &by.moments) =>
            {
                Self::Squared(of.clone())
            }
            (Op::float_div, Self::Centered(of), Self::Deviation(by)) if by.are_of(of) => {
                Self::Normalized(Normalized::new(&of.x, by))
            }
            (Op::float_mul, Self::Deviation(of), Self::Deviation(by)) if of.of.is(&by.of) => {
                Self::Square(of.clone())
            }
            (Op::float_div, Self::NegCentered(of), Self::Square(by)) if by.are_of(of) => {
                Self::NegOverSquare(Normalized::new(&of.x, by))
            }
            (Op::float_div, Self::NegInput(x, of), Self::Square(by))
                if by.are_of_input(of.as_ptr() as usize) =>
            {
                Self::NegOverSquare(Normalized::new(x, by))
            }
            (Op::float_mul, Self::OfDeviation(gradient), Self::HalfInverseRoot(by))
                if gradient.by.of.is(by) =>
            {
                Self::OfVariance(gradient.clone())
            }
            (Op::float_mul, Self::Fraction, Self::OfVariance(gradient)) => {
                Self::OfSquared(gradient.clone())
            }
            (Op::float_mul, Self::OfSquared(gradient), Self::Centered(by))
                if gradient.by.are_of(by) =>
            {
                Self::OfFactor(gradient.clone())
            }
            (Op::float_add, Self::OfFactor(one), Self::OverDeviation(other))
            | (Op::float_add, Self::OverDeviation(other), Self::OfFactor(one))
                if one.is_also(other) =>
            {
                Self::PartOfCentered(one.clone())
            }
            (Op::float_add, Self::OfFactor(one), Self::PartOfCentered(other))
            | (Op::float_add, Self::PartOfCentered(other), Self::OfFactor(one))
                if one.is_also(other) =>
            {
                Self::OfCentered(one.clone())
            }
            (Op::float_mul, Self::Fraction, Self::OfMean(gradient)) => {
                Self::OfMeanSpread(gradient.clone())
            }
            (Op::float_add, Self::OfMeanSpread(one), Self::OfCentered(other))
            | (Op::float_add, Self::OfCentered(other), Self::OfMeanSpread(one))
                if one.is_also(other) =>
            {
                return Some(Step::Backward(one.clone(), None));
            }
            (Op::float_add, Self::OfMeanSpread(one), Self::Added(other, added))
            | (Op::float_add, Self::Added(other, added), Self::OfMeanSpread(one))
                if one.is_also(other) =>
            {
                return Some(Step::Backward(one.clone(), Some(added.clone())));
            }
            _ => return None,
        };
        Some(Step::RowNorm(step))
    }
}

impl<B: Backend> RowNorm<B> {
    /// The terms of the gradient of `c` that such a tensor is, if `c` is the input itself.
    fn terms(&self) -> Option<(Arc<Gradient<B>>, Terms<B>)> {
        let (gradient, [over_deviation, of_factors]) = match self {
            Self::Terms(gradient, terms) => return Some((gradient.clone(), terms.clone())),
            Self::OverDeviation(gradient) => (gradient, [1, 0]),
            Self::OfFactor(gradient) => (gradient, [0, 1]),
            _ => return None,
        };
        let terms = Terms {
            over_deviation,
            of_factors,
            added: None,
        };
        let around_zero = matches!(gradient.by.of.moments.around, Around::Zero(_));
        around_zero.then(|| (gradient.clone(), terms))
    }
}

impl<B: Backend> Terms<B> {
    /// What the sum of two tensors is, if at least one of them has terms.
    fn sum(x: &LayeredFloat<B>, y: &LayeredFloat<B>) -> Option<Step<B>> {
        let terms = |of: &LayeredFloat<B>| of.row_norm().and_then(RowNorm::terms);
        match (terms(x), terms(y)) {
            (Some((one, terms)), Some((other, more))) if one.is_also(&other) => terms
                .with(more)?
                .of(if one.x.is_some() { &one } else { &other }),
            (Some((gradient, terms)), None) if y.is_gradient() => terms.and(y)?.of(&gradient),
            (None, Some((gradient, terms))) if x.is_gradient() => terms.and(x)?.of(&gradient),
            _ => None,
        }
    }

    /// These and others, of which one may add another tensor.
    fn with(self, more: Self) -> Option<Self> {
        let added = match (self.added, more.added) {
            (Some(_), Some(_)) => return None,
            (one, other) => one.or(other),
        };
        Some(Self {
            over_deviation: self.over_deviation + more.over_deviation,
            of_factors: self.of_factors + more.of_factors,
            added,
        })
    }

    /// These and another tensor.
    fn and(self, other: &LayeredFloat<B>) -> Option<Self> {
        let added = Some(Box::new(other.clone()));
        self.added.is_none().then_some(Self { added, ..self })
    }

    /// What they are of a gradient.
    fn of(self, gradient: &Arc<Gradient<B>>) -> Option<Step<B>> {
        match (self.over_deviation, self.of_factors) {
            (1, 2) => Some(Step::Backward(gradient.clone(), self.added)),
            (0..=1, 0..=2) => Some(Step::RowNorm(RowNorm::Terms(gradient.clone(), self))),
            _ => None,
        }
    }
}

impl<B: Backend> Gradient<B> {
    fn new(
        x: Option<&LayeredFloat<B>>,
        by: &Arc<Deviations<B>>,
        gradient: &LayeredFloat<B>,
    ) -> Arc<Self> {
        Arc::new(Self {
            x: x.map(LayeredFloat::alone),
            by: by.clone(),
            gradient: gradient.clone(),
        })
    }

    fn is_also(&self, other: &Self) -> bool {
        self.by.of.is(&other.by.of) && self.gradient.identity() == other.gradient.identity()
    }
}

impl<B: BackendIr> Step<B> {
    /// What an op makes of two tensors.
    pub(super) fn of(op: Op, x: &LayeredFloat<B>, y: &LayeredFloat<B>) -> Option<Self> {
        let [left, right] = [x.shape(), y.shape()];
        let by_row = is_of_rows(&right, &left);
        if let (Op::float_mul, true, false) = (op, x.is_gradient(), y.is_gradient())
            && y.part() == Some(Part::Row)
            && is_row(&right, &left)
        {
            let scaled = RowNorm::Scaled(Box::new(x.clone()), Box::new(y.alone()));
            return Some(Self::RowNorm(scaled));
        }
        if !by_row && left != right {
            return None;
        }
        if op == Op::float_add
            && !by_row
            && let Some(step) = Terms::sum(x, y)
        {
            return Some(step);
        }
        let step = match (op, x.row_norm(), y.row_norm()) {
            (Op::float_mul, None, None)
                if x.identity() == y.identity() && x.is_computed() && !x.is_gradient() =>
            {
                RowNorm::SquaredInput(Box::new(x.alone()), x.origin())
            }
            (Op::float_div, None, Some(RowNorm::Deviation(by)))
                if by_row && by.are_of_input(x.identity()) =>
            {
                RowNorm::Normalized(Normalized::new(x, by))
            }
            (Op::float_mul, Some(RowNorm::OfSquared(gradient)), None)
                if gradient.by.are_of_input(y.identity()) =>
            {
                RowNorm::OfFactor(gradient.clone())
            }
            (Op::float_sub, None, Some(RowNorm::Mean(of, moments)))
                if by_row && of.as_ptr() as usize == x.identity() =>
            {
                RowNorm::Centered(Arc::new(Centered {
                    x: x.alone(),
                    moments: moments.clone(),
                }))
            }
            (Op::float_mul, _, Some(RowNorm::Inverse(of))) if x.is_gradient() && by_row => {
                RowNorm::OverDeviation(Gradient::new(None, of, x))
            }
            (Op::float_mul, _, Some(RowNorm::NegOverSquare(of))) if x.is_gradient() => {
                RowNorm::Weighted(Gradient::new(Some(&of.x), &of.by, x))
            }
            (Op::float_mul, _, Some(RowNorm::Normalized(of))) if x.is_gradient() => {
                RowNorm::Projected(Box::new(x.clone()), of.clone())
            }
            (Op::float_add, None, Some(RowNorm::OfCentered(gradient))) => {
                RowNorm::Added(gradient.clone(), Box::new(x.clone()))
            }
            (Op::float_add, Some(RowNorm::OfCentered(gradient)), None) if !by_row => {
                RowNorm::Added(gradient.clone(), Box::new(y.clone()))
            }
            (_, Some(x), Some(y)) => return RowNorm::join(op, x, y),
            _ => return None,
        };
        Some(Self::RowNorm(step))
    }
}

/// Whether a shape is that of one row of another.
fn is_row(shape: &Shape, of: &Shape) -> bool {
    let Some(last) = of.num_dims().checked_sub(1) else {
        return false;
    };
    shape.num_dims() == last + 1
        && shape[last] == of[last]
        && shape[..last].iter().all(|&dim| dim == 1)
}

/// Whether a tensor is the ones that backward makes of a mean.
pub(super) fn is_ones<B: Backend>(x: &LayeredFloat<B>) -> bool {
    x.role().is_some_and(|role| matches!(**role, Role::Ones))
}
