use burn::backend::Dispatch;
use burn::tensor::{FloatDType, Tensor};

use crate::{Bias, Fp8Error, Fp8Ops, Fp8Tensor, Granularity, MatmulSpec};

/// The matrix product of two fp8 tensors: `lhs * rhs + bias` of their values, accumulated in f32.
///
/// # Shapes
/// - `lhs`: `[..., m, k]`, `rhs`: `[..., k, n]`, batch dimensions equal or 1 (broadcast), any sizes
/// - `bias`: `[n]`
/// - output: `[..., m, n]` in `dtype` (F32, BF16 or F16)
///
/// All four pairs of formats work. Operands scaled as a whole, rows of `lhs` and columns of `rhs` are scaled after the
/// sum; scales that change along `k` are applied to the partial sums of each of their blocks, which are added in f32
/// (as DeepSeek-V3 does, arXiv:2412.19437).
///
/// # Errors
/// [`Fp8Error`] where shapes, bias or dtype do not fit.
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
    check(lhs, rhs, bias.as_ref(), dtype)?;
    let spec = MatmulSpec {
        lhs: lhs.format(),
        rhs: rhs.format(),
        output: dtype,
    };
    let [left, right] = [lhs, rhs].map(|side| side.codes().into_dispatch());
    let bias = match bias {
        Some(bias) => Bias::Row(bias.into_dispatch()),
        None => Bias::None,
    };
    Ok(Tensor::from_dispatch(
        match (lhs.granularity(), rhs.granularity()) {
            (Granularity::Tensor, Granularity::Tensor) => {
                let scales = [lhs, rhs].map(|side| side.scale().reshape([1]).into_dispatch());
                let [left_scale, right_scale] = scales;
                Dispatch::fp8_matmul(left, right, left_scale, right_scale, bias, spec)
            }
            (left_granularity, right_granularity) => Dispatch::fp8_matmul_blocks(
                left,
                right,
                lhs.scale().into_dispatch(),
                rhs.scale().into_dispatch(),
                bias,
                [left_granularity, right_granularity],
                spec,
            ),
        },
    ))
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
