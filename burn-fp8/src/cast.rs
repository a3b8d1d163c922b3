use serde::{Deserialize, Serialize};

use crate::{Fp8Format, Granularity};

/// How a tensor is cast with scales from its own amaxes: the format, and which elements share a scale.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp8::{Fp8Cast, Fp8Format, Fp8Tensor, Granularity};
///
/// let cast = Fp8Cast::new(Granularity::Row, Fp8Format::E4M3).with_power_of_two(true);
/// let x = Tensor::<2>::from_floats([[1.0, -3.0], [7.0, 0.5]], &Device::flex());
/// let q = Fp8Tensor::quantize_as(x, cast)?;
/// // 448 / 3 and 448 / 7, rounded down to powers of two.
/// assert_eq!(q.scale().into_data().try_to_vec::<f32>().unwrap(), [128.0, 64.0]);
/// # Ok::<(), burn_fp8::Fp8Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fp8Cast {
    /// The format of the codes.
    pub format: Fp8Format,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// Whether scales are rounded down to powers of two, so that scaling itself rounds nothing.
    pub power_of_two: bool,
}

impl Fp8Cast {
    /// A cast whose scales are not rounded.
    pub fn new(granularity: Granularity, format: Fp8Format) -> Self {
        Self {
            format,
            granularity,
            power_of_two: false,
        }
    }

    /// Sets whether scales are rounded down to powers of two.
    #[must_use]
    pub fn with_power_of_two(self, power_of_two: bool) -> Self {
        Self {
            power_of_two,
            ..self
        }
    }

    /// Panics for one scale a tensor, which is no cast by rows, columns or blocks: its amax is of all matrices of a batch.
    pub(crate) fn assert_several_scales(self) {
        assert!(
            self.granularity != Granularity::Tensor,
            "fp8_quantize_blocks: one scale for the whole tensor; take fp8_amax, fp8_scales and fp8_quantize, or Operand::cast"
        );
    }
}
