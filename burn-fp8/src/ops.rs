//! The backend extension: the fp8 ops that a backend provides.
//!
//! Codes are `u8` int tensors. Scales are f32 float tensors, of one element or of one for each row, column or block. They live on
//! the device, so that no op waits for the host. A scale multiplies before the cast, and its inverse multiplies after: `value =
//! code / scale`. The default bodies are composed of Burn's standard ops, so `impl Fp8Ops for MyBackend {}` is enough.

use burn::backend::{
    Backend, ExtensionType, TensorMetadata, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{FloatDType, Shape};
use serde::{Deserialize, Serialize};

use crate::{
    Fp8Cast, Fp8Format, Granularity, Operand, granular,
    linear::GradAmaxSlot,
    portable,
    provider::Native,
    recipe::{LinearCasts, ScaleUpdate},
};

/// The optional bias of [`Fp8Ops::fp8_matmul`], which is added to every row of the product.
#[derive(Clone, Debug, ExtensionType)]
pub enum Bias<B: Backend> {
    /// No bias.
    None,
    /// A bias with one element for each column of the product.
    Row(FloatTensor<B>),
}

#[cfg(any(feature = "cubecl", feature = "remote"))]
impl<B: Backend> Bias<B> {
    /// The bias, if there is one.
    pub(crate) fn row(self) -> Option<FloatTensor<B>> {
        match self {
            Self::None => None,
            Self::Row(bias) => Some(bias),
        }
    }
}

/// The formats, the granularities, the output dtype and the precision of [`Fp8Ops::fp8_matmul`].
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_fp8::{Fp8Format, MatmulSpec};
///
/// let spec = MatmulSpec::new(Fp8Format::E4M3, Fp8Format::E5M2, FloatDType::BF16);
/// assert!(!spec.fast_accumulation);
/// assert!(spec.with_fast_accumulation(true).fast_accumulation);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MatmulSpec {
    /// Format of the left side's codes.
    pub lhs: Fp8Format,
    /// Format of the right side's codes.
    pub rhs: Fp8Format,
    /// Which elements of each side share a scale.
    pub granularities: [Granularity; 2],
    /// Dtype of the product: F32, BF16 or F16.
    pub output: FloatDType,
    /// Whether the whole sum may stay in the tensor cores' own precision (about 14 bits on Hopper), for speed. Only cuBLASLt
    /// makes use of this. A layer's forward pass allows it and its backward pass does not, as in Transformer Engine.
    pub fast_accumulation: bool,
}

impl MatmulSpec {
    /// A product of sides with one scale each, whose sums are as precise as the device allows.
    pub fn new(lhs: Fp8Format, rhs: Fp8Format, output: FloatDType) -> Self {
        Self {
            lhs,
            rhs,
            granularities: [Granularity::Tensor; 2],
            output,
            fast_accumulation: false,
        }
    }

    /// Sets which elements of each side share a scale.
    #[must_use]
    pub fn with_granularities(self, granularities: [Granularity; 2]) -> Self {
        Self {
            granularities,
            ..self
        }
    }

    /// Sets whether sums may be less precise, for speed.
    #[must_use]
    pub fn with_fast_accumulation(self, fast_accumulation: bool) -> Self {
        Self {
            fast_accumulation,
            ..self
        }
    }
}

/// How [`Fp8Ops::fp8_linear`] casts, and where its backward pass stores the amax of the gradient.
#[derive(Clone, Debug)]
pub struct LinearSpec {
    /// Format of input and weight.
    pub forward: Fp8Format,
    /// Format of the output's gradient.
    pub gradient: Fp8Format,
    /// Whether the gradient is scaled by its own amax instead of by the given scale.
    pub current_gradient_scale: bool,
    /// Whether the scale from the gradient's own amax is rounded down to a power of two.
    pub power_of_two: bool,
    /// Whether the product for the gradient of the weight is computed in the input's dtype.
    pub high_precision_weight_gradient: bool,
    /// Receives the amax of the gradient in backward.
    pub gradient_amax: GradAmaxSlot,
}

/// How [`Fp8Ops::fp8_linear_blocks`] casts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLinearSpec {
    /// Format of input and weight.
    pub forward: Fp8Format,
    /// Format of the output's gradient.
    pub gradient: Fp8Format,
    /// Which elements share a scale in each of the three products.
    pub casts: LinearCasts,
    /// Whether scales are rounded down to powers of two.
    pub power_of_two: bool,
    /// Whether the product for the gradient of the weight is computed in the input's dtype.
    pub high_precision_weight_gradient: bool,
}

impl BlockLinearSpec {
    /// The cast of an input or a weight.
    pub(crate) fn forward_cast(&self, granularity: Granularity) -> Fp8Cast {
        Fp8Cast::new(granularity, self.forward).with_power_of_two(self.power_of_two)
    }

    /// The cast of a gradient.
    pub(crate) fn gradient_cast(&self, granularity: Granularity) -> Fp8Cast {
        Fp8Cast::new(granularity, self.gradient).with_power_of_two(self.power_of_two)
    }
}

/// The fp8 ops of a backend.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cubecl"),
    Remote: cfg(feature = "remote"),
    Autodiff,
)]
pub trait Fp8Ops: Backend {
    /// The largest absolute value of `input`, as an f32 tensor of shape `[1]`: NaN if there is a NaN, 0 for an empty tensor.
    fn fp8_amax(input: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::amax::<Self>(input)
    }

    /// The scale for each amax (f32, of any shape), in the same shape: `max / amax`, but 1 if the amax is zero, infinite or NaN,
    /// and the largest f32 if the quotient overflows. With `power_of_two`, scales are rounded down to powers of two.
    fn fp8_scales(
        amax: FloatTensor<Self>,
        format: Fp8Format,
        power_of_two: bool,
    ) -> FloatTensor<Self> {
        portable::scales::<Self>(amax, format, power_of_two)
    }

    /// The codes of `input * scale` and the amax of `input` (of shape `[1]`), from one read of the input.
    fn fp8_quantize(
        input: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        portable::quantize::<Self>(input, scale, format)
    }

    /// [`fp8_quantize`](Self::fp8_quantize), and the transpose of the codes (of the last two dimensions) in the layout in which
    /// products read it. Returns codes, transposed codes and amax, from one read of the input.
    ///
    /// A backend whose products read codes equally fast in any order returns the same codes with swapped strides as the
    /// transpose. Flex does so, and CubeCL on devices where products run neither on fp8 tensor cores nor by cuBLASLt.
    fn fp8_quantize_transposed(
        input: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
    ) -> (IntTensor<Self>, IntTensor<Self>, FloatTensor<Self>) {
        portable::quantize_transposed::<Self, Native>(input, scale, format)
    }

    /// The values of `codes` divided by their scales: one element in any shape, or the scales that
    /// [`fp8_quantize_blocks`](Self::fp8_quantize_blocks) returns.
    fn fp8_dequantize(
        codes: IntTensor<Self>,
        scale: FloatTensor<Self>,
        granularity: Granularity,
        format: Fp8Format,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        portable::dequantize::<Self, Native>(codes, scale, granularity, format, dtype)
    }

    /// The matrix product of two code tensors of equal rank, with batch dimensions broadcast: summed in f32, divided by both
    /// sides' scales (as those of [`fp8_dequantize`](Self::fp8_dequantize)), plus the bias. Scales that change along the inner
    /// dimension are applied to the partial sum of each block, and the results are added in f32.
    fn fp8_matmul(
        lhs: IntTensor<Self>,
        rhs: IntTensor<Self>,
        lhs_scale: FloatTensor<Self>,
        rhs_scale: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        spec: MatmulSpec,
    ) -> FloatTensor<Self> {
        portable::matmul::<Self, Native>(lhs, rhs, lhs_scale, rhs_scale, bias, spec)
    }

    /// [`fp8_matmul`](Self::fp8_matmul), and the amax of the returned product (of shape `[1]`).
    fn fp8_matmul_amax(
        lhs: IntTensor<Self>,
        rhs: IntTensor<Self>,
        lhs_scale: FloatTensor<Self>,
        rhs_scale: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        spec: MatmulSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        portable::matmul_amax::<Self, Native>(lhs, rhs, lhs_scale, rhs_scale, bias, spec)
    }

    /// One step of delayed scaling: puts `amax` (`[1]`) into `history` (`[length]`) and returns the new history and the new scale
    /// (`[1]`). See [`ScaleUpdate`].
    fn fp8_update_scale(
        history: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        update: ScaleUpdate,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        portable::update_scale::<Self>(history, scale, amax, update)
    }

    /// Quantizes with a scale for each row, column or block, from its own amax. Returns the codes and the scales (f32; the last
    /// two dimensions are numbers of rows, columns or blocks).
    ///
    /// # Panics
    /// If the granularity is [`Granularity::Tensor`](crate::Granularity::Tensor). [`Operand::cast`](crate::Operand::cast)
    /// takes it.
    fn fp8_quantize_blocks(
        input: FloatTensor<Self>,
        cast: Fp8Cast,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        granular::quantize::<Self, Native>(input, cast)
    }

    /// The product of `input` (`[rows, d_input]`), which is cast with `input_scale`, and a weight (`[d_input, d_output]`), which
    /// comes already cast, with one scale; and the amax of `input`. Under autodiff, backward casts the gradient too, and runs
    /// both of its products in fp8 (only one with [`LinearSpec::high_precision_weight_gradient`]). `weight` itself is only there to receive its gradient.
    fn fp8_linear(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] weight_codes: Operand<Self>,
        input_scale: FloatTensor<Self>,
        gradient_scale: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        spec: LinearSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let _ = (weight, gradient_scale);
        let output = output_dtype(&input);
        let (input, amax) = Operand::<Self>::cast_left(input, input_scale, spec.forward);
        (input.matmul_fast(weight_codes, bias, output), amax)
    }

    /// [`fp8_linear`](Self::fp8_linear) with a scale for each row, column or block of every operand, from its own amax. The
    /// weight comes already cast, once for the product of the output and once for that of the input's gradient. (The second is
    /// ignored if the input has no gradient.)
    fn fp8_linear_blocks(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] output_weight: Operand<Self>,
        #[extension_type] gradient_weight: Operand<Self>,
        #[extension_type] bias: Bias<Self>,
        spec: BlockLinearSpec,
    ) -> FloatTensor<Self> {
        let _ = (weight, gradient_weight);
        let output = output_dtype(&input);
        let cast = spec.forward_cast(spec.casts.output[0]);
        Operand::<Self>::cast(input, cast).matmul(output_weight, bias, output)
    }

    /// Takes the amax that a backward pass left in `slot`; 0 if none did (of shape `[1]`, on the device of `like`).
    fn fp8_gradient_amax(like: FloatTensor<Self>, slot: GradAmaxSlot) -> FloatTensor<Self> {
        slot.take()
            .unwrap_or_else(|| Self::float_zeros(Shape::new([1]), &like.device(), FloatDType::F32))
    }
}

/// The dtype of a product whose left side was cast from `input`.
pub(crate) fn output_dtype(input: &impl TensorMetadata) -> FloatDType {
    input.dtype().into()
}
