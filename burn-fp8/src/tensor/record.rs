//! Fp8 tensors as part of a state that Burn records, such as an optimizer's.

use burn::optim::{RecordState, StateSink, StateSource};
use burn::tensor::{Device, TensorData};

use super::{Fp8Data, Fp8Tensor, Granularity};
use crate::Fp8Format;

impl<const D: usize> RecordState for Fp8Tensor<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        let data = self.clone().into_data();
        let scales = TensorData::new(data.scales, data.scale_shape);
        out.push_tensor(prefix, "codes", TensorData::new(data.codes, data.shape));
        out.push_tensor(prefix, "scale", scales);
        out.push_scalar(prefix, "e5m2", (data.format == Fp8Format::E5M2).into());
        let [rows, columns] = data.granularity.sides();
        out.push_scalar(prefix, "rows", rows.into());
        out.push_scalar(prefix, "columns", columns.into());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let mut tensor = |leaf| src.take_tensor(prefix, leaf);
        let (codes, scales) = (tensor("codes")?, tensor("scale")?);
        let mut side = |leaf| u64::try_from(src.take_scalar(prefix, leaf)?).ok();
        let sides = [side("rows")?, side("columns")?];
        let data = Fp8Data {
            shape: codes.shape().iter().copied().collect(),
            scale_shape: scales.shape().iter().copied().collect(),
            codes: codes.try_to_vec::<u8>().ok()?,
            scales: scales.try_to_vec::<f32>().ok()?,
            granularity: Granularity::from_sides(sides),
            format: match bool::try_from(src.take_scalar(prefix, "e5m2")?).ok()? {
                false => Fp8Format::E4M3,
                true => Fp8Format::E5M2,
            },
        };
        Self::from_data(data, device).ok()
    }
}
