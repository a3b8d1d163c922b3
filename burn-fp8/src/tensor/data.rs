//! Fp8 tensors on the host.

use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use super::{Fp8Tensor, Granularity, check_scale};
use crate::{Fp8Error, Fp8Format};

/// An fp8 tensor on the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fp8Data {
    /// The codes, row by row.
    pub codes: Vec<u8>,
    /// The shape of the codes.
    pub shape: Vec<usize>,
    /// The scales, row by row.
    pub scales: Vec<f32>,
    /// The shape of the scales.
    pub scale_shape: Vec<usize>,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// The format of the codes.
    pub format: Fp8Format,
}

impl<const D: usize> Fp8Tensor<D> {
    /// Codes, scales and the rest as plain data that serializes.
    pub fn into_data(self) -> Fp8Data {
        let shape = self.dims().to_vec();
        let scale_shape = self.scale.dims().to_vec();
        let codes = self.codes.into_data().try_to_vec::<u8>();
        let scales = self.scale.into_data().try_to_vec::<f32>();
        Fp8Data {
            codes: codes.expect("codes are u8"),
            shape,
            scales: scales.expect("scales are f32"),
            scale_shape,
            granularity: self.granularity,
            format: self.format,
        }
    }

    /// The inverse of [`into_data`](Self::into_data).
    ///
    /// # Errors
    /// [`Fp8Error::DataRank`] if the rank of the data is not `D`; [`Fp8Error::CodeLength`] and [`Fp8Error::ScaleLength`] if
    /// elements and shape do not fit; [`Fp8Error::EmptyBlock`], [`Fp8Error::NoMatrix`] and [`Fp8Error::ScaleShape`] if scales and
    /// granularity do not fit; [`Fp8Error::InvalidScale`] for a scale that is not positive and finite, or has no
    /// finite inverse.
    pub fn from_data(data: Fp8Data, device: &Device) -> Result<Self, Fp8Error> {
        let device = device.clone().without_autodiff();
        if data.shape.len() != D {
            return Err(Fp8Error::DataRank {
                data: data.shape.len(),
                tensor: D,
            });
        }
        if elements(&data.shape) != Some(data.codes.len()) {
            return Err(Fp8Error::CodeLength {
                codes: data.codes.len(),
                shape: data.shape,
            });
        }
        data.granularity.check(D)?;
        let expected = data.granularity.scale_shape(&data.shape);
        if data.scale_shape != expected {
            return Err(Fp8Error::ScaleShape {
                scales: data.scale_shape,
                codes: data.shape,
                granularity: data.granularity,
                expected,
            });
        }
        if elements(&data.scale_shape) != Some(data.scales.len()) {
            return Err(Fp8Error::ScaleLength {
                scales: data.scales.len(),
                shape: data.scale_shape,
            });
        }
        data.scales.iter().copied().try_for_each(check_scale)?;
        Ok(Self {
            codes: Tensor::from_data(
                TensorData::new(data.codes, data.shape),
                (&device, DType::U8),
            ),
            scale: Tensor::from_data(
                TensorData::new(data.scales, data.scale_shape),
                (&device, DType::F32),
            ),
            granularity: data.granularity,
            format: data.format,
        })
    }
}

/// The number of elements of a shape; `None` if it overflows.
fn elements(shape: &[usize]) -> Option<usize> {
    shape
        .iter()
        .try_fold(1usize, |count, &length| count.checked_mul(length))
}

impl<const D: usize> Serialize for Fp8Tensor<D> {
    /// As [`Fp8Data`].
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.clone().into_data().serialize(serializer)
    }
}

impl<'de, const D: usize> Deserialize<'de> for Fp8Tensor<D> {
    /// Onto the default device, like Burn's own tensors. Use [`Fp8Data`] and [`from_data`](Fp8Tensor::from_data) for another
    /// device.
    fn deserialize<De: Deserializer<'de>>(deserializer: De) -> Result<Self, De::Error> {
        let data = Fp8Data::deserialize(deserializer)?;
        Self::from_data(data, &Device::default()).map_err(De::Error::custom)
    }
}
