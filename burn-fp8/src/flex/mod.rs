//! The ops on Flex. Each is one pass over memory, on all cores.

mod cast;
mod matmul;

pub(crate) use cast::{amax, dequantize, quantize};
pub(crate) use matmul::matmul_amax;

use burn_flex::{FlexTensor, Layout};
use burn_std::{Bytes, DType, Shape};

use crate::{Fp8Format, recipe::ScaleUpdate};

/// The number of elements that is worth a task of its own.
const CHUNK: usize = 1 << 14;

/// See [`Fp8Ops::fp8_scales`](crate::Fp8Ops::fp8_scales).
pub(crate) fn scales(amax: FlexTensor, format: Fp8Format, power_of_two: bool) -> FlexTensor {
    let amax = amax.to_contiguous();
    let scale = |&amax: &f32| format.rounded_scale_for(amax, power_of_two);
    let amaxes = amax.as_slice::<f32>().expect("amaxes are f32");
    let scales = amaxes.iter().map(scale).collect();
    tensor_f32(scales, amax.layout().shape().clone())
}

/// See [`Fp8Ops::fp8_update_scale`](crate::Fp8Ops::fp8_update_scale).
pub(crate) fn update_scale(
    history: FlexTensor,
    scale: &FlexTensor,
    amax: &FlexTensor,
    update: ScaleUpdate,
) -> (FlexTensor, FlexTensor) {
    let history = history.to_contiguous();
    let mut values = history
        .as_slice::<f32>()
        .expect("histories are f32")
        .to_vec();
    let scale = update.apply_host(&mut values, scalar(scale), scalar(amax));
    let shape = Shape::new([values.len()]);
    (
        tensor_f32(values, shape),
        tensor_f32(vec![scale], Shape::new([1])),
    )
}

/// The value of an f32 tensor of one element.
fn scalar(tensor: &FlexTensor) -> f32 {
    assert_eq!(tensor.dtype(), DType::F32, "scales and amaxes are f32");
    tensor.storage::<f32>()[tensor.layout().start_offset()]
}

fn tensor_f32(values: Vec<f32>, shape: Shape) -> FlexTensor {
    FlexTensor::new(
        Bytes::from_elems(values),
        Layout::contiguous(shape),
        DType::F32,
    )
}
