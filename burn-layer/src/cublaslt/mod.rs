//! Products in 16 bits by cuBLASLt, on NVIDIA GPUs where it is installed. On an H200 they are several times as fast as CubeCL's.

mod fused;
mod padded;
mod plan;
mod repacked;
#[cfg(all(test, feature = "cuda"))]
mod tests;

use burn_backend::{
    Backend, DType, Shape, TensorMetadata, calculate_matmul_output, tensor::FloatTensor,
};
use burn_cubecl::{
    Cube, CubeBackend, CubeDevice,
    kernel::{into_contiguous, untile},
    ops::{permute, reshape},
    tensor::CubeTensor,
};
use burn_cublaslt::{Element, Library, Matrices, Operands, Product, library};
use burn_std::Metadata;
use core::any::Any;
use padded::Padded;
use parking_lot::Mutex;
use plan::{Plan, View, plan};
use repacked::{Lines, Place, repacked};
use std::{collections::BTreeSet, sync::Arc};

use crate::ops::{Multiply, product_by_kernels};

/// How products are computed by the library, if the device has it.
pub(crate) fn multiplies_on<B: Backend>(device: &B::Device) -> Option<Multiply<B>> {
    let device = (device as &dyn Any).downcast_ref::<CubeDevice>()?;
    library(device)?;
    let multiply = Multiply::<Cube> {
        product: Cube::product,
        over_rows: Cube::over_rows,
    };
    (&multiply as &dyn Any).downcast_ref().copied()
}

/// A backend whose products the library may compute.
trait Multiplies: Backend {
    /// `x y`.
    fn product(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `x^T y` over the rows of all matrices.
    fn over_rows(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl Multiplies for CubeBackend {
    fn product(x: CubeTensor, y: CubeTensor) -> CubeTensor {
        let library = library(&x.device);
        match library.and_then(|library| by_library(&library, &x, &y)) {
            Some(product) => product,
            None => product_by_kernels::<Self>(x, y),
        }
    }

    fn over_rows(x: CubeTensor, y: CubeTensor) -> CubeTensor {
        let shape = over_rows_shape(&x.shape(), &y.shape());
        let [x, y] = [x, y].map(rows);
        reshape(Self::product(permute(x, &[1, 0]), y), shape)
    }
}

/// The shape of a product, whose factors Burn has checked.
fn product_shape(x: &Shape, y: &Shape) -> Shape {
    calculate_matmul_output(x, y).expect("the factors of a product fit")
}

/// The shape of a product over rows.
fn over_rows_shape(x: &Shape, y: &Shape) -> Shape {
    Shape::new([1, x[x.num_dims() - 1], y[y.num_dims() - 1]])
}

/// All rows of a tensor as a matrix.
fn rows(tensor: CubeTensor) -> CubeTensor {
    let mut tensor = untile(tensor);
    match View::of(&tensor.meta).rows() {
        Some(View { shape, strides }) => {
            *tensor.meta = Metadata::new(Shape::from(shape), strides);
            tensor
        }
        None => {
            let columns = tensor.shape()[tensor.shape().num_dims() - 1];
            let rows = tensor.shape().num_elements() / columns.max(1);
            reshape(tensor, Shape::new([rows, columns]))
        }
    }
}

/// The product by cuBLASLt; `None` if kernels have to compute it.
fn by_library(library: &Arc<Library>, x: &CubeTensor, y: &CubeTensor) -> Option<CubeTensor> {
    let [x, y] = [x, y].map(|factor| untile(factor.clone()));
    let [lhs, rhs] = [&x, &y].map(|factor| View::of(&factor.meta));
    if lhs.shape.len() < 2 {
        return None;
    }
    let shape = product_shape(&x.shape(), &y.shape());
    if rhs.is_interleaved(&shape) || !lhs.turned().is_interleaved(&shape) {
        return in_order_of_rhs(library, [x, y]);
    }
    // The gradient of attention's keys, in the order of the queries: the transposition of a product by these.
    let mut axes: Vec<_> = (0..shape.num_dims()).collect();
    axes[shape.num_dims() - 2..].reverse();
    let turned = |factor: CubeTensor| permute(factor, &axes);
    in_order_of_rhs(library, [y, x].map(turned)).map(turned)
}

/// The same, of which the output lies in the order of the right factor.
fn in_order_of_rhs(library: &Arc<Library>, mut factors: [CubeTensor; 2]) -> Option<CubeTensor> {
    let element = match (factors[0].dtype, factors[1].dtype) {
        (DType::BF16, DType::BF16) => Element::BF16,
        (DType::F16, DType::F16) => Element::F16,
        _ => return None,
    };
    let planned = |factors: &[CubeTensor; 2], copied| {
        let [x, y] = factors.each_ref().map(|factor| View::of(&factor.meta));
        plan(&x, &y, element, copied)
    };
    let plan = match planned(&factors, false)? {
        Ok(plan) => plan,
        Err(copies) => {
            for (factor, _) in factors.iter_mut().zip(copies).filter(|(_, copy)| *copy) {
                *factor = into_contiguous(factor.clone());
            }
            planned(&factors, true)?.ok()?
        }
    };
    let Plan {
        product,
        offsets,
        output: lies,
    } = plan;
    let [x, y] = factors;
    let shape = Shape::from(lies.shape);
    let padded = Padded::of(&product).filter(|_| offsets.len() == 1);
    if let Some(padded) = padded.filter(|padded| !library.has_refused(&padded.product)) {
        return by_library_padded(library, [x, y], (&product, padded), shape);
    }
    if library.has_refused(&product) {
        return None;
    }
    let handle = x.client.empty(shape.num_elements() * element.size());
    let (client, device) = (x.client.clone(), x.device.clone());
    let layout = Metadata::new(shape, lies.strides);
    let output = CubeTensor::new(client, handle, layout, device, x.dtype);
    let operands = Operands {
        client: &output.client,
        lhs: x.handle,
        rhs: y.handle,
        output: output.handle.clone(),
        factors: None,
        bias: None,
        offsets,
    };
    match library.submit(&product, operands) {
        Ok(()) => Some(output),
        Err(problem) => {
            warn(&problem.to_string());
            None
        }
    }
}

/// The same, of factors of which some are copied. If it is refused, the next one is not padded.
fn by_library_padded(
    library: &Arc<Library>,
    [x, y]: [CubeTensor; 2],
    (product, padded): (&Product, Padded),
    shape: Shape,
) -> Option<CubeTensor> {
    let place = Place {
        client: x.client.clone(),
        device: x.device.clone(),
        dtype: x.dtype,
    };
    let wide = &padded.product;
    let factor = |copied, tensor: CubeTensor, [from, to]: [&Matrices; 2]| match copied {
        true => repacked(&place, tensor.handle, Lines::of(from), Lines::of(to)).handle,
        false => tensor.handle,
    };
    let lhs = factor(padded.lhs, x, [&product.lhs, &wide.lhs]);
    let rhs = factor(padded.rhs, y, [&product.rhs, &wide.rhs]);
    let [from, to] = [&wide.output, &product.output].map(Lines::of);
    let bytes = from.lines * from.leading * wide.output.element.size();
    let output = place.client.empty(bytes);
    let operands = Operands {
        client: &place.client,
        lhs,
        rhs,
        output: output.clone(),
        factors: None,
        bias: None,
        offsets: vec![[0; 3]],
    };
    if let Err(problem) = library.submit(wide, operands) {
        warn(&problem.to_string());
        return None;
    }
    let output = match padded.output {
        true => repacked(&place, output, from, to).handle,
        false => output,
    };
    let (client, device) = (place.client.clone(), place.device.clone());
    Some(CubeTensor::new_contiguous(
        client,
        device,
        shape,
        output,
        place.dtype,
    ))
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
