//! What is computed: [`Convolution`].

#[cfg(any(test, feature = "cuda"))]
use crate::ConvolutionError;

/// The element types of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// bfloat16.
    BF16,
    /// IEEE half precision.
    F16,
}

impl Element {
    /// The size of an element in bytes.
    ///
    /// ```
    /// assert_eq!(burn_cudnn::Element::BF16.size(), 2);
    /// ```
    pub fn size(self) -> usize {
        2
    }
}

/// Which of the three tensors of a convolution is computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wanted {
    /// `y`, from `x` and `w`.
    Output,
    /// `dx`, from `w` and `dy`.
    InputGradient,
    /// `dw`, from `x` and `dy`.
    WeightGradient,
}

impl Wanted {
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) const ALL: [Self; 3] = [Self::Output, Self::InputGradient, Self::WeightGradient];
}

/// A cross-correlation, as deep learning has it, or one of its gradients. Sums are in f32.
///
/// Shapes are `[images, channels, ..]` and `[outputs, channels / groups, ..]`, with one to three spatial dimensions. In memory the channels
/// come last, and there are no gaps: NHWC, and KRSC for weights.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Convolution {
    /// What is computed.
    pub wanted: Wanted,
    /// The type of all elements.
    pub element: Element,
    /// The shape of the input.
    pub x: Vec<usize>,
    /// The shape of the weight. The number of groups is that of the input's channels by its own.
    pub w: Vec<usize>,
    /// From one window to the next, for each spatial dimension.
    pub stride: Vec<usize>,
    /// Zeros before and after the input.
    pub padding: Vec<(usize, usize)>,
    /// From one element of a window to the next.
    pub dilation: Vec<usize>,
}

impl Convolution {
    /// The output of a convolution by a stride of 1, without padding and dilation.
    ///
    /// ```
    /// use burn_cudnn::{Convolution, Element};
    ///
    /// let plain = Convolution::new(Element::BF16, &[8, 64, 56, 56], &[128, 64, 3, 3]);
    /// assert_eq!(plain.y(), [8, 128, 54, 54]);
    /// let halved = Convolution { stride: vec![2; 2], padding: vec![(1, 1); 2], ..plain };
    /// assert_eq!(halved.y(), [8, 128, 28, 28]);
    /// ```
    ///
    /// # Panics
    /// If a shape has fewer than two dimensions.
    pub fn new(element: Element, x: &[usize], w: &[usize]) -> Self {
        let spatial = x.len() - 2;
        Self {
            wanted: Wanted::Output,
            element,
            x: x.to_vec(),
            w: w.to_vec(),
            stride: vec![1; spatial],
            padding: vec![(0, 0); spatial],
            dilation: vec![1; spatial],
        }
    }

    /// The shape of the output.
    pub fn y(&self) -> Vec<usize> {
        let spatial = (0..self.stride.len()).map(|dim| {
            let reach = self.dilation[dim] * (self.w[2 + dim].saturating_sub(1)) + 1;
            let (before, after) = self.padding[dim];
            let size = before + self.x[2 + dim] + after;
            size.checked_sub(reach)
                .map_or(0, |last| last / self.stride[dim] + 1)
        });
        [self.x[0], self.w[0]].into_iter().chain(spatial).collect()
    }

    /// The shapes of the two tensors that are read and of the one that is computed, in the order in which [`Wanted`] names them.
    pub fn shapes(&self) -> [Vec<usize>; 3] {
        let (x, w, y) = (self.x.clone(), self.w.clone(), self.y());
        match self.wanted {
            Wanted::Output => [x, w, y],
            Wanted::InputGradient => [w, y, x],
            Wanted::WeightGradient => [x, y, w],
        }
    }

    /// Whether the sizes are those of a convolution, none of which is 0.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn check(&self) -> Result<(), ConvolutionError> {
        let spatial = self.stride.len();
        let fits = (1..=3).contains(&spatial)
            && [self.x.len(), self.w.len()] == [spatial + 2; 2]
            && [self.padding.len(), self.dilation.len()] == [spatial; 2];
        let positive = || {
            let strides = self.stride.iter().chain(&self.dilation);
            let mut sizes = self.x.iter().chain(&self.w).chain(strides);
            sizes.all(|&size| size > 0) && self.y().iter().all(|&size| size > 0)
        };
        let grouped = || {
            let groups = self.x[1] / self.w[1];
            groups * self.w[1] == self.x[1] && self.w[0].is_multiple_of(groups)
        };
        match fits && positive() && grouped() {
            true => Ok(()),
            false => Err(ConvolutionError::Sizes),
        }
    }

    /// The same with a spatial dimension of size 1 before the only one: cuDNN has no convolutions of one dimension.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn lifted(mut self) -> Self {
        if self.stride.len() == 1 {
            self.x.insert(2, 1);
            self.w.insert(2, 1);
            self.stride.insert(0, 1);
            self.padding.insert(0, (0, 0));
            self.dilation.insert(0, 1);
        }
        self
    }
}

/// The distances between elements of a tensor of that shape, with the channels last.
#[cfg(any(test, feature = "cuda"))]
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    let mut next = shape[1];
    for dim in (2..shape.len()).rev() {
        strides[dim] = next;
        next *= shape[dim];
    }
    strides[0] = next;
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_are_none_of_a_convolution_are_found() {
        let good = Convolution::new(Element::F16, &[2, 6, 5], &[4, 3, 2]);
        assert_eq!(good.check(), Ok(()));
        let bad = |change: fn(&mut Convolution)| {
            let mut bad = good.clone();
            change(&mut bad);
            assert_eq!(bad.check(), Err(ConvolutionError::Sizes), "{bad:?}");
        };
        bad(|it| it.x.push(5));
        bad(|it| it.w = vec![4, 3]);
        bad(|it| it.stride = vec![0]);
        bad(|it| it.stride = Vec::new());
        bad(|it| it.padding = vec![(1, 1); 2]);
        bad(|it| it.dilation = vec![0]);
        // A window that is larger than the input.
        bad(|it| it.dilation = vec![5]);
        bad(|it| it.x[0] = 0);
        // Channels, and outputs, that are no multiple of the groups.
        bad(|it| it.x[1] = 7);
        bad(|it| it.w[0] = 5);
    }

    #[test]
    fn one_dimension_is_two_of_which_one_is_1() {
        let line = Convolution {
            wanted: Wanted::WeightGradient,
            padding: vec![(1, 2)],
            stride: vec![2],
            ..Convolution::new(Element::BF16, &[3, 8, 10], &[4, 8, 3])
        };
        let lifted = line.clone().lifted();
        assert_eq!(line.y(), [3, 4, 6]);
        assert_eq!(lifted.y(), [3, 4, 1, 6]);
        assert_eq!(lifted.padding, [(0, 0), (1, 2)]);
        assert_eq!(lifted.clone().lifted(), lifted);
        let [x, dy, dw] = line.shapes();
        assert_eq!([x, dy, dw], [vec![3, 8, 10], vec![3, 4, 6], vec![4, 8, 3]]);
    }

    #[test]
    fn channels_are_last() {
        assert_eq!(strides(&[2, 3, 5, 7]), [105, 1, 21, 3]);
        assert_eq!(strides(&[2, 3, 5, 7, 4]), [420, 1, 84, 12, 3]);
    }
}
