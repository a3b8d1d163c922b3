//! The ops on Flex: one pass over memory each, on all cores.

mod cast;
mod matmul;

pub(crate) use cast::{amax, dequantize, quantize};
pub(crate) use matmul::matmul;

use burn_flex::{FlexTensor, Layout};
use burn_std::{Bytes, DType, Shape};

use crate::recipe::ScaleUpdate;

/// Elements that are worth a task of their own.
const CHUNK: usize = 1 << 14;

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
