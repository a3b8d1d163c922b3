//! Products in 16 bits by cuBLASLt, on NVIDIA GPUs where it is installed. On an H200 they are several times as fast as CubeCL's.

mod fused;
mod plan;

use burn_backend::{Backend, DType, Shape, TensorMetadata, tensor::FloatTensor};
use burn_cubecl::{Cube, CubeBackend, CubeDevice, kernel::into_contiguous, tensor::CubeTensor};
use burn_cublaslt::{Element, Library, Operands, library};
use burn_std::Metadata;
use core::any::Any;
use parking_lot::Mutex;
use plan::{Plan, View, plan};
use std::{collections::BTreeSet, sync::Arc};

use crate::ops::{Multiply, product_by_kernels};

/// How products are computed by the library, if the device has it.
pub(crate) fn multiplies_on<B: Backend>(device: &B::Device) -> Option<Multiply<B>> {
    let device = (device as &dyn Any).downcast_ref::<CubeDevice>()?;
    library(device)?;
    let multiply: Multiply<Cube> = <Cube as Multiplies>::multiply;
    (&multiply as &dyn Any).downcast_ref().copied()
}

/// A backend whose products the library may compute.
trait Multiplies: Backend {
    fn multiply(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl Multiplies for CubeBackend {
    fn multiply(x: CubeTensor, y: CubeTensor) -> CubeTensor {
        let library = library(&x.device);
        match library.and_then(|library| by_library(&library, &x, &y)) {
            Some(product) => product,
            None => product_by_kernels::<Self>(x, y),
        }
    }
}

/// The shape of a product.
fn shape_of(x: &Shape, y: &Shape) -> Shape {
    let column = x.num_dims() - 1;
    let sizes = (0..=column).map(|dim| match dim {
        _ if dim == column => y[dim],
        _ if dim + 1 == column => x[dim],
        _ => x[dim].max(y[dim]),
    });
    Shape::from(sizes.collect::<Vec<_>>())
}

/// The product by cuBLASLt; `None` if kernels have to compute it.
fn by_library(library: &Arc<Library>, x: &CubeTensor, y: &CubeTensor) -> Option<CubeTensor> {
    let element = match x.dtype {
        DType::BF16 => Element::BF16,
        DType::F16 => Element::F16,
        _ => return None,
    };
    let shape = shape_of(&x.shape(), &y.shape());
    let factors = [x.clone(), y.clone()];
    let planned = |factors: &[CubeTensor; 2], most| {
        let [x, y] = factors.each_ref().map(|factor| View::of(&factor.meta));
        plan(&x, &y, element, most)
    };
    let (factors, plan) = match planned(&factors, plan::LAUNCHES)? {
        Ok(plan) => (factors, plan),
        Err(copies) => {
            let mut copies = copies.into_iter();
            let factors = factors.map(|factor| match copies.next() {
                Some(true) => into_contiguous(factor),
                _ => factor,
            });
            let plan = planned(&factors, usize::MAX)?.ok()?;
            (factors, plan)
        }
    };
    let Plan { product, offsets } = plan;
    if library.has_refused(&product) {
        return None;
    }
    let [x, y] = factors;
    let handle = x.client.empty(shape.num_elements() * element.size());
    let output =
        CubeTensor::new_contiguous(x.client.clone(), x.device.clone(), shape, handle, x.dtype);
    let operands = Operands {
        client: &output.client,
        lhs: x.handle,
        rhs: y.handle,
        output: output.handle.clone(),
        scales: None,
        bias: None,
        offsets,
    };
    match library.submit(&product, operands) {
        Ok(()) => Some(output),
        Err(problem) => {
            warn(&problem);
            None
        }
    }
}

impl View {
    fn of(meta: &Metadata) -> Self {
        Self {
            shape: meta.shape().iter().copied().collect(),
            strides: meta.strides().iter().copied().collect(),
        }
    }
}

/// Warns once for each problem, because the same product returns with every step.
fn warn(problem: &str) {
    static HEARD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if HEARD.lock().insert(problem.to_string()) {
        log::warn!("burn-layer: cuBLASLt left a product to CubeCL's kernels: {problem}");
    }
}
