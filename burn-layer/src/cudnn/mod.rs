//! Convolutions in 16 bits by cuDNN, on NVIDIA GPUs where it is installed. It is loaded when the first one is computed.

mod fused;
#[cfg(all(test, feature = "cuda"))]
mod tests;

use burn_backend::{Backend, DType, TensorMetadata, tensor::FloatTensor};
use burn_cubecl::{Cube, CubeBackend, CubeDevice, ops::permute, tensor::CubeTensor};
use burn_cudnn::{ALIGNMENT, Element, Library, Operands, library};
use core::any::Any;
use std::sync::Arc;

use crate::{
    ops::{Convolution, Convolutions, Wanted},
    rowwise::channels_last,
};

/// How convolutions are computed, if the device is one of CubeCL's. Without the library, none is.
pub(crate) fn convolves_on<B: Backend>(device: &B::Device) -> Option<Convolutions<B>> {
    (device as &dyn Any).downcast_ref::<CubeDevice>()?;
    let convolutions = Convolutions::<Cube> {
        can,
        compute: Cube::convolved,
    };
    (&convolutions as &dyn Any).downcast_ref().copied()
}

/// Whether the library is installed, and has a plan for the convolution.
fn can(convolution: &Convolution, device: &CubeDevice) -> bool {
    let Some((library, described)) = library(device).zip(described(convolution)) else {
        return false;
    };
    let prepared = library.prepare(&described);
    if let Err(problem) = &prepared {
        log::debug!("burn-layer: left to CubeCL's kernels: {convolution:?}: {problem}");
    }
    prepared.is_ok()
}

/// The convolution in the library's terms, if it has any for that dtype.
fn described(convolution: &Convolution) -> Option<burn_cudnn::Convolution> {
    let element = match convolution.dtype {
        DType::BF16 => Element::BF16,
        DType::F16 => Element::F16,
        _ => return None,
    };
    Some(burn_cudnn::Convolution {
        wanted: match convolution.wanted {
            Wanted::Output => burn_cudnn::Wanted::Output,
            Wanted::InputGradient => burn_cudnn::Wanted::InputGradient,
            Wanted::WeightGradient => burn_cudnn::Wanted::WeightGradient,
        },
        element,
        x: convolution.x.to_vec(),
        w: convolution.weight.to_vec(),
        stride: convolution.stride.clone(),
        padding: convolution.padding.clone(),
        dilation: convolution.dilation.clone(),
    })
}

/// A backend whose convolutions the library may compute.
trait Convolves: Backend {
    /// The tensor that is wanted, from the other two.
    fn convolved(inputs: [FloatTensor<Self>; 2], of: Convolution) -> FloatTensor<Self>;
}

impl Convolves for CubeBackend {
    fn convolved(inputs: [CubeTensor; 2], of: Convolution) -> CubeTensor {
        let library = library(&inputs[0].device);
        match library.and_then(|library| by_library(&library, &inputs, &of)) {
            Some(tensor) => tensor,
            None => of.by_backend::<Self>(inputs),
        }
    }
}

fn by_library(
    library: &Arc<Library>,
    inputs: &[CubeTensor; 2],
    of: &Convolution,
) -> Option<CubeTensor> {
    let described = described(of)?;
    let [a, b] = inputs.each_ref().map(aligned);
    let mut shape = of.shape();
    let channels = shape.as_mut_slice();
    channels[1..].rotate_left(1);
    let handle = a.client.empty(shape.num_elements() * a.dtype.size());
    let (client, device, dtype) = (a.client.clone(), a.device.clone(), a.dtype);
    let output = CubeTensor::new_contiguous(client, device, shape, handle, dtype);
    let operands = Operands {
        client: &output.client,
        inputs: [a.handle, b.handle],
        output: output.handle.clone(),
    };
    let submitted = library.submit(&described, operands);
    submitted
        .inspect_err(|problem| {
            log::warn!("burn-layer: cuDNN left a convolution to CubeCL's kernels: {problem}")
        })
        .ok()?;
    Some(channels_second(output))
}

/// With the channels last, and aligned.
fn aligned(tensor: &CubeTensor) -> CubeTensor {
    let tensor = channels_last(tensor.clone());
    let start = tensor.handle.offset_start.unwrap_or(0);
    match start.is_multiple_of(ALIGNMENT) {
        true => tensor,
        false => tensor.copy(),
    }
}

/// The view `[images, channels, ..]`.
fn channels_second(tensor: CubeTensor) -> CubeTensor {
    let mut axes: Vec<usize> = (0..tensor.shape().num_dims()).collect();
    axes[1..].rotate_right(1);
    permute(tensor, &axes)
}
