//! [`Picks`]: the choices that a step makes.

/// Numbers that a step picks by, one after the other. When they are used up, they are 0.
pub(super) struct Picks<'a>(core::slice::Iter<'a, u8>);

impl<'a> Picks<'a> {
    pub(super) fn new(numbers: &'a [u8]) -> Self {
        Self(numbers.iter())
    }

    pub(super) fn next(&mut self) -> usize {
        self.0.next().copied().unwrap_or(0) as usize
    }

    /// A number below `count`, which is not 0.
    pub(super) fn below(&mut self, count: usize) -> usize {
        self.next() % count
    }

    pub(super) fn flag(&mut self) -> bool {
        self.below(2) == 1
    }
}
