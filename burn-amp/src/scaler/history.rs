//! [`ScaleHistory`]: how the scale has changed.

use serde::Serialize;
use std::{collections::VecDeque, io};

/// The latest [`CAPACITY`](Self::CAPACITY) overflows and changes of a loss scale.
/// Steps at which nothing happened are not recorded, so that a whole training fits.
///
/// ```
/// use burn_amp::LossScalerConfig;
///
/// let mut scaler = LossScalerConfig::new().with_growth_interval(2).init()?;
/// for overflow in [true, false, false] {
///     scaler.update(overflow);
/// }
/// let mut csv = Vec::new();
/// scaler.history().write_csv(&mut csv)?;
/// assert_eq!(
///     String::from_utf8(csv)?,
///     "step,scale,overflow\n0,65536,false\n1,32768,true\n3,65536,false\n"
/// );
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ScaleHistory {
    changes: VecDeque<ScaleChange>,
}

/// An overflow, a change of the scale, or both.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ScaleChange {
    /// The number of the step, from 1. The entry that a history begins with has the number of steps taken before.
    pub step: u64,
    /// The scale from the next step on.
    pub scale: f32,
    /// Whether the step overflowed and was skipped.
    pub overflow: bool,
}

impl ScaleHistory {
    /// The largest number of entries. After that, each new entry replaces the oldest.
    pub const CAPACITY: usize = 4096;

    pub(super) fn new(step: u64, scale: f32) -> Self {
        let first = ScaleChange {
            step,
            scale,
            overflow: false,
        };
        Self {
            changes: VecDeque::from([first]),
        }
    }

    /// Records `change` if it is an overflow or changes the scale.
    pub(super) fn push(&mut self, change: ScaleChange) {
        let before = self.changes.back().map(|last| last.scale);
        if !change.overflow && before == Some(change.scale) {
            return;
        }
        if self.changes.len() == Self::CAPACITY {
            self.changes.pop_front();
        }
        self.changes.push_back(change);
    }

    /// Removes the entries of `step`, which is the last step.
    pub(super) fn take_back(&mut self, step: u64) {
        while self.changes.len() > 1 && self.changes.back().is_some_and(|last| last.step == step) {
            self.changes.pop_back();
        }
    }

    /// The entries, oldest first. Between two entries, the scale is that of the earlier one.
    pub fn changes(&self) -> impl ExactSizeIterator<Item = ScaleChange> + '_ {
        self.changes.iter().copied()
    }

    /// The corners `(step, scale)` of the scale's staircase up to step `until`, for a plotting
    /// library to draw as a line.
    ///
    /// ```
    /// use burn_amp::LossScalerConfig;
    ///
    /// let mut scaler = LossScalerConfig::new().with_init_scale(8.0).init()?;
    /// for overflow in [false, true, false] {
    ///     scaler.update(overflow);
    /// }
    /// let line: Vec<_> = scaler.history().line(3).collect();
    /// assert_eq!(line, [(0, 8.0), (2, 8.0), (2, 4.0), (3, 4.0)]);
    /// # Ok::<(), burn_amp::LossScalerError>(())
    /// ```
    pub fn line(&self, until: u64) -> impl Iterator<Item = (u64, f32)> + '_ {
        let ends = self.changes().skip(1).map(|change| change.step);
        self.changes()
            .zip(ends.chain([until]))
            .flat_map(|(change, end)| [(change.step, change.scale), (end, change.scale)])
    }

    /// Writes the entries as CSV, with a header. The columns are the fields of [`ScaleChange`].
    ///
    /// # Errors
    ///
    /// When writing fails.
    pub fn write_csv(&self, mut out: impl io::Write) -> io::Result<()> {
        writeln!(out, "step,scale,overflow")?;
        for change in self.changes() {
            writeln!(out, "{},{},{}", change.step, change.scale, change.overflow)?;
        }
        Ok(())
    }
}
