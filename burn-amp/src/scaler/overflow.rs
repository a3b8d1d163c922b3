//! [`Overflow`]: which gradients were not finite.

use core::fmt;

/// The gradients that overflowed, because of which a step is skipped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overflow {
    /// The paths of the parameters whose gradients hold an infinity or a NaN. Empty if these are
    /// all on [another rank](super::Unscaled::agree).
    pub parameters: Vec<String>,
}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        if self.parameters.is_empty() {
            return f.write_str("the gradients of another rank overflowed");
        }
        let shown = self.parameters.iter().take(SHOWN);
        let shown: Vec<_> = shown.map(String::as_str).collect();
        write!(f, "the gradients of {} overflowed", shown.join(", "))?;
        match self.parameters.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and those of {more} more parameters"),
        }
    }
}
