use burn::backend::{
    Dispatch,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{FloatDType, Tensor};

use super::{check_dtype, check_product};
use crate::{Bias, Fp8Error, Fp8Ops, Fp8Tensor, MatmulSpec};

/// The matrix product of two fp8 tensors: `lhs * rhs + bias` of their values, with sums in f32.
///
/// # Shapes
/// - `lhs`: `[..., m, k]`, `rhs`: `[..., k, n]`, of any sizes; batch dimensions are equal, or 1 (broadcast)
/// - `bias`: `[n]`
/// - output: `[..., m, n]` in `dtype` (F32, BF16 or F16)
///
/// All four pairs of formats work. Scales of a whole tensor, of a row of `lhs` or of a column of `rhs` are applied after the sum.
/// Scales that change along `k` are applied to the partial sum of each block, and the results are added in f32 (as in
/// DeepSeek-V3, arXiv:2412.19437). A sum is divided by the scale of `lhs` first and then by that of `rhs`, in f32. So it is infinite
/// where the first quotient is, even if the second were not: do not multiply a side of magnitudes near f32's largest.
///
/// # Errors
/// [`Fp8Error`] if shapes, bias or dtype do not fit, if the device does not support the dtype (bf16 on WebGPU), or, on CubeCL's
/// devices, if the product or one side of it has more elements than any routine can count ([`Fp8Error::TooLarge`]).
///
/// ```
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_fp8::{Fp8Format, Fp8Tensor, scaled_matmul};
///
/// let device = Device::flex();
/// let a = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &device);
/// let a = Fp8Tensor::quantize_with_scale(a, 1.0, Fp8Format::E4M3)?;
/// let product = scaled_matmul(&a, &a.clone().transpose(), None, FloatDType::F32)?;
/// assert_eq!(product.into_data().try_to_vec::<f32>().unwrap(), [5.0, 11.0, 11.0, 25.0]);
/// # Ok::<(), burn_fp8::Fp8Error>(())
/// ```
pub fn scaled_matmul<const D: usize>(
    lhs: &Fp8Tensor<D>,
    rhs: &Fp8Tensor<D>,
    bias: Option<Tensor<1>>,
    dtype: FloatDType,
) -> Result<Tensor<D>, Fp8Error> {
    let Product {
        codes: [lhs, rhs],
        scales: [left, right],
        bias,
        spec,
    } = Product::new(lhs, rhs, bias, dtype)?;
    let product = Dispatch::fp8_matmul(lhs, rhs, left, right, bias, spec);
    Ok(Tensor::from_dispatch(product))
}

/// [`scaled_matmul`], and the amax of the returned product (f32, of shape `[1]`), which gives the scale for casting the product.
///
/// CubeCL finds the amax before it stores the output, by every routine but cuBLASLt, and so does Flex if both operands have one
/// scale each. Otherwise the output is read once more for it.
///
/// # Errors
/// As [`scaled_matmul`].
///
/// ```
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_fp8::{Fp8Format, Fp8Tensor, scaled_matmul_with_amax};
///
/// let a = Tensor::<2>::from_floats([[1.0, 2.0], [-3.0, 1.0]], &Device::flex());
/// let a = Fp8Tensor::quantize_with_scale(a, 1.0, Fp8Format::E4M3)?;
/// let (_, amax) = scaled_matmul_with_amax(&a, &a, None, FloatDType::F32)?;
/// assert_eq!(amax.into_scalar::<f32>(), 6.0); // [[-5, 4], [-6, -5]]
/// # Ok::<(), burn_fp8::Fp8Error>(())
/// ```
pub fn scaled_matmul_with_amax<const D: usize>(
    lhs: &Fp8Tensor<D>,
    rhs: &Fp8Tensor<D>,
    bias: Option<Tensor<1>>,
    dtype: FloatDType,
) -> Result<(Tensor<D>, Tensor<1>), Fp8Error> {
    let Product {
        codes: [lhs, rhs],
        scales: [left, right],
        bias,
        spec,
    } = Product::new(lhs, rhs, bias, dtype)?;
    let (product, amax) = Dispatch::fp8_matmul_amax(lhs, rhs, left, right, bias, spec);
    let amax = Tensor::<1>::from_dispatch(amax).without_autodiff();
    Ok((Tensor::from_dispatch(product), amax))
}

/// The arguments of a product, after all checks.
struct Product {
    codes: [IntTensor<Dispatch>; 2],
    scales: [FloatTensor<Dispatch>; 2],
    bias: Bias<Dispatch>,
    spec: MatmulSpec,
}

impl Product {
    fn new<const D: usize>(
        lhs: &Fp8Tensor<D>,
        rhs: &Fp8Tensor<D>,
        bias: Option<Tensor<1>>,
        dtype: FloatDType,
    ) -> Result<Self, Fp8Error> {
        check(lhs, rhs, bias.as_ref(), dtype)?;
        let spec = MatmulSpec::new(lhs.format(), rhs.format(), dtype)
            .with_granularities([lhs.granularity(), rhs.granularity()]);
        check_product(lhs, rhs, spec)?;
        Ok(Self {
            codes: [lhs, rhs].map(|side| side.codes().into_dispatch()),
            scales: [lhs, rhs].map(|side| side.scale().into_dispatch()),
            bias: match bias {
                Some(bias) => Bias::Row(bias.into_dispatch()),
                None => Bias::None,
            },
            spec,
        })
    }
}

fn check<const D: usize>(
    lhs: &Fp8Tensor<D>,
    rhs: &Fp8Tensor<D>,
    bias: Option<&Tensor<1>>,
    dtype: FloatDType,
) -> Result<(), Fp8Error> {
    if D < 2 {
        return Err(Fp8Error::Rank { rank: D });
    }
    if !matches!(dtype, FloatDType::F32 | FloatDType::BF16 | FloatDType::F16) {
        return Err(Fp8Error::OutputDType {
            dtype: format!("{dtype:?}"),
        });
    }
    check_dtype(&lhs.device(), dtype)?;
    let (left, right) = (lhs.dims(), rhs.dims());
    let shapes = || (left.to_vec(), right.to_vec());
    if left[D - 1] != right[D - 2] {
        let (lhs, rhs) = shapes();
        return Err(Fp8Error::InnerDimension {
            lhs,
            rhs,
            inner_lhs: left[D - 1],
            inner_rhs: right[D - 2],
        });
    }
    for dim in 0..D - 2 {
        if left[dim] != right[dim] && left[dim] != 1 && right[dim] != 1 {
            let (lhs, rhs) = shapes();
            return Err(Fp8Error::BatchDimension { lhs, rhs, dim });
        }
    }
    match bias.map(|bias| bias.dims()[0]) {
        Some(bias) if bias != right[D - 1] => Err(Fp8Error::BiasLength {
            bias,
            columns: right[D - 1],
        }),
        _ => Ok(()),
    }
}
