//! FP8 tensors.

mod blocks;
mod data;
mod granularity;
mod record;

pub use data::Fp8Data;
pub use granularity::Granularity;

use core::fmt;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

use crate::{Fp8Cast, Fp8Error, Fp8Format, Fp8Ops, functions};

/// A tensor of fp8 numbers: one byte per element on the device, with its scales and its format.
///
/// The value of an element is its code's value divided by its scale. Nothing here is differentiable; for gradients, use modules
/// such as [`Fp8Linear`](crate::Fp8Linear).
///
/// On WebGPU, Burn's ops on `u8` are missing, such as a slice or a copy of the codes: there a tensor that was transposed, or cast with
/// its transpose, can be neither read back nor reshaped. Casts and products work, but not in bf16, which WGSL does not have. (Burn
/// 0.22.1 itself refuses nothing, and its `cast` to bf16 gives wrong values there.)
///
/// ```
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_fp8::{Fp8Format, Fp8Tensor};
///
/// let x = Tensor::<2>::from_floats([[1.0, -2.0], [0.5, 4.0]], &Device::flex());
/// let q = Fp8Tensor::quantize(x, Fp8Format::E4M3);
/// assert_eq!(q.scale().into_scalar::<f32>(), 448.0 / 4.0);
/// let y = q.dequantize(FloatDType::F32).into_data().try_to_vec::<f32>().unwrap();
/// assert_eq!(y, [1.0, -2.0, 0.5, 4.0]);
/// ```
#[derive(Clone)]
pub struct Fp8Tensor<const D: usize> {
    codes: Tensor<D, Int>,
    /// One element, or one for each row, column or block of the codes.
    scale: Tensor<D>,
    granularity: Granularity,
    format: Fp8Format,
}

impl<const D: usize> Fp8Tensor<D> {
    /// Quantizes with a scale from the tensor's own amax: the largest absolute value becomes the format's largest. The device
    /// reads the tensor twice, and the host does not wait. An amax that is zero, infinite or NaN gives a scale of 1.
    ///
    /// # Panics
    /// If CubeCL's kernels cannot count the elements (see [`quantize_as`](Self::quantize_as), which returns an error instead).
    pub fn quantize(tensor: Tensor<D>, format: Fp8Format) -> Self {
        Self::cast(tensor, Fp8Cast::new(Granularity::Tensor, format))
    }

    /// Quantizes with scales from the tensor's own amaxes.
    fn cast(tensor: Tensor<D>, cast: Fp8Cast) -> Self {
        let Fp8Cast {
            format,
            granularity,
            power_of_two,
        } = cast;
        let tensor = tensor.without_autodiff();
        if granularity == Granularity::Tensor {
            let amax = functions::amax(tensor.clone());
            let scale = functions::scales(amax, format, power_of_two);
            return Self::quantize_with_device_scale(tensor, scale, format).0;
        }
        let (codes, scale) = Dispatch::fp8_quantize_blocks(tensor.into_dispatch(), cast);
        Self {
            codes: Tensor::from_dispatch(codes),
            scale: Tensor::from_dispatch(scale),
            granularity,
            format,
        }
    }

    /// Quantizes with a given scale, which multiplies before the cast. Values out of range saturate.
    ///
    /// # Errors
    /// [`Fp8Error::InvalidScale`] unless the scale and its inverse are positive and finite, and [`Fp8Error::TooLarge`] if CubeCL's kernels cannot
    /// count the elements.
    pub fn quantize_with_scale(
        tensor: Tensor<D>,
        scale: f32,
        format: Fp8Format,
    ) -> Result<Self, Fp8Error> {
        check_scale(scale)?;
        functions::check_cast(&tensor, Granularity::Tensor)?;
        let device = tensor.device().without_autodiff();
        let scale = Tensor::from_data(TensorData::from([scale]), (&device, DType::F32));
        Ok(Self::quantize_with_device_scale(tensor, scale, format).0)
    }

    /// Quantizes with a scale that is already on the device (f32, of shape `[1]`), and returns the tensor's amax (of shape `[1]`)
    /// from the same read. The scale's value is not checked, because that would wait for the device.
    ///
    /// # Panics
    /// If the scale is not a single f32, or CubeCL's kernels cannot count the elements.
    #[track_caller]
    pub fn quantize_with_device_scale(
        tensor: Tensor<D>,
        scale: Tensor<1>,
        format: Fp8Format,
    ) -> (Self, Tensor<1>) {
        functions::assert_scalar("quantize_with_device_scale", "scale", &scale);
        let scale = scale.without_autodiff();
        let (codes, amax) = Dispatch::fp8_quantize(
            tensor.without_autodiff().into_dispatch(),
            scale.clone().into_dispatch(),
            format,
        );
        let quantized = Self::with_scale(Tensor::from_dispatch(codes), scale, format);
        (quantized, Tensor::from_dispatch(amax))
    }

    /// [`quantize_with_device_scale`](Self::quantize_with_device_scale), and the transpose (of the last two dimensions). Returns
    /// the tensor, its transpose and the amax, from one read of the input.
    ///
    /// On a device with fp8 tensor cores, which read both sides of a product along its inner dimension, the transpose is a tensor
    /// of its own, laid out row by row, so that the right side `transposed.transpose()` is not copied before a product. On other
    /// devices it is the same as [`transpose`](Self::transpose), which costs nothing.
    ///
    /// # Panics
    /// If the tensor has rank 1, the scale is not a single f32, or CubeCL's kernels cannot count the elements.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp8::{Fp8Format, Fp8Tensor};
    ///
    /// let x = Tensor::<2>::from_floats([[1.0, -2.0, 0.5]], &Device::flex());
    /// let scale = Tensor::<1>::from_floats([64.0], &Device::flex());
    /// let (q, transposed, amax) = Fp8Tensor::quantize_with_transpose(x, scale, Fp8Format::E4M3);
    /// assert_eq!((q.dims(), transposed.dims()), ([1, 3], [3, 1]));
    /// assert_eq!(amax.into_scalar::<f32>(), 2.0);
    /// ```
    #[track_caller]
    pub fn quantize_with_transpose(
        tensor: Tensor<D>,
        scale: Tensor<1>,
        format: Fp8Format,
    ) -> (Self, Self, Tensor<1>) {
        assert!(
            D > 1,
            "quantize_with_transpose: a tensor of rank 1 has no transpose"
        );
        functions::assert_scalar("quantize_with_transpose", "scale", &scale);
        let scale = scale.without_autodiff();
        let (codes, transposed, amax) = Dispatch::fp8_quantize_transposed(
            tensor.without_autodiff().into_dispatch(),
            scale.clone().into_dispatch(),
            format,
        );
        let [codes, transposed] = [codes, transposed].map(Tensor::from_dispatch);
        (
            Self::with_scale(codes, scale.clone(), format),
            Self::with_scale(transposed, scale, format),
            Tensor::from_dispatch(amax),
        )
    }

    fn with_scale(codes: Tensor<D, Int>, scale: Tensor<1>, format: Fp8Format) -> Self {
        Self {
            codes,
            scale: scale.reshape([1; D]),
            granularity: Granularity::Tensor,
            format,
        }
    }

    /// The values, in `dtype`.
    ///
    /// # Panics
    /// If the device does not support the dtype (bf16 on WebGPU).
    pub fn dequantize(&self, dtype: FloatDType) -> Tensor<D> {
        functions::check_dtype(&self.device(), dtype)
            .unwrap_or_else(|error| panic!("dequantize: {error}"));
        Tensor::from_dispatch(Dispatch::fp8_dequantize(
            self.codes.clone().into_dispatch(),
            self.scale.clone().into_dispatch(),
            self.granularity,
            self.format,
            dtype,
        ))
    }

    /// The codes, one byte per element (dtype U8).
    pub fn codes(&self) -> Tensor<D, Int> {
        self.codes.clone()
    }

    /// The scales, in f32. With one scale per tensor, all dimensions are 1; otherwise the last dimension, the last but one, or
    /// both are numbers of rows, columns or blocks.
    pub fn scale(&self) -> Tensor<D> {
        self.scale.clone()
    }

    /// Which elements share a scale.
    pub fn granularity(&self) -> Granularity {
        self.granularity
    }

    /// The format of the codes.
    pub fn format(&self) -> Fp8Format {
        self.format
    }

    /// The shape.
    pub fn dims(&self) -> [usize; D] {
        self.codes.dims()
    }

    /// The device that holds the codes.
    pub fn device(&self) -> Device {
        self.codes.device()
    }

    /// The same elements in another shape.
    ///
    /// # Panics
    /// If the number of elements differs, as in Burn's own `reshape`, and for tensors with more than one scale, because a reshape
    /// would tear their rows or blocks apart: dequantize those first.
    pub fn reshape<const E: usize>(self, shape: [usize; E]) -> Fp8Tensor<E> {
        assert!(
            self.granularity == Granularity::Tensor,
            "reshape: a tensor scaled by {:?} has its scales bound to its shape; dequantize it first",
            self.granularity
        );
        Fp8Tensor {
            codes: self.codes.reshape(shape),
            scale: self.scale.reshape([1; E]),
            granularity: Granularity::Tensor,
            format: self.format,
        }
    }

    /// Swaps the last two dimensions. Nothing is copied if the backend has strides (Flex, CubeCL).
    ///
    /// # Panics
    /// If the tensor has rank 1, as in Burn's own `transpose`.
    pub fn transpose(self) -> Self {
        Self {
            codes: self.codes.transpose(),
            scale: self.scale.transpose(),
            granularity: self.granularity.transposed(),
            format: self.format,
        }
    }

    /// The same tensor on another device.
    pub fn to_device(self, device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        Self {
            codes: self.codes.to_device(&device),
            scale: self.scale.to_device(&device),
            ..self
        }
    }
}

impl<const D: usize> fmt::Debug for Fp8Tensor<D> {
    /// Shape, format, scales, and the values as Burn prints them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fp8Tensor")
            .field("format", &self.format)
            .field("granularity", &self.granularity)
            .field("scale", &format_args!("{}", self.scale))
            .field(
                "values",
                &format_args!("{}", self.dequantize(FloatDType::F32)),
            )
            .finish()
    }
}

fn check_scale(scale: f32) -> Result<(), Fp8Error> {
    if scale.is_finite() && scale > 0.0 && scale.recip().is_finite() {
        Ok(())
    } else {
        Err(Fp8Error::InvalidScale { scale })
    }
}
