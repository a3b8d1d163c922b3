//! [`Layer`]: what a layered backend changes about the backend under it.

use crate::{Deferred, Op};
use burn_backend::{Backend, DType, DeviceId, distributed::ReduceOperation, tensor::FloatTensor};
use burn_ir::BackendIr;
use core::fmt::Debug;

/// What a layer changes. Every method has a default that changes nothing, so `impl Layer for X {}`
/// is a layer that passes every op through.
///
/// A layer is shared by all tensors of its device and called from any thread.
///
/// ```
/// use burn::tensor::{DType, Tensor};
/// use burn_layer::{Inputs, Layer, Layers, Op, Plan};
///
/// /// Multiplies matrices in bf16.
/// #[derive(Debug, Default)]
/// struct LowMatmul;
///
/// impl Layer for LowMatmul {
///     fn plan(&self, op: Op, inputs: &Inputs) -> Plan {
///         match op {
///             Op::float_matmul => Plan::compute(DType::BF16),
///             _ => inputs.promote(),
///         }
///     }
/// }
///
/// let device = Layers::on(burn::tensor::Device::flex()).layer(LowMatmul).serve()?;
/// let x = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 1.00390625]], &device);
/// let y = x.matmul(Tensor::from_floats([[1.0, 0.0], [0.0, 1.0]], &device));
/// // The program sees f32; 1 + 2^-8 is no bf16 number.
/// assert_eq!(y.dtype(), DType::F32);
/// assert_eq!(y.into_data().try_to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 1.0]);
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
pub trait Layer: Debug + Default + Send + Sync + 'static {
    /// How `op` runs, given the dtypes that its float inputs are stored in. Not called for ops
    /// without float inputs.
    fn plan(&self, op: Op, inputs: &Inputs) -> Plan {
        let _ = op;
        inputs.promote()
    }

    /// `op` is about to run with float inputs stored in `dtype`.
    fn ran(&self, op: Op, dtype: DType) {
        let _ = (op, dtype);
    }

    /// A float tensor was needed in another dtype than the one it is stored in.
    fn cast(&self, cast: Cast) {
        let _ = cast;
    }

    /// The output `tensor` of `op` was computed; a layer may look at it (and pay for the wait).
    fn computed<B: Backend>(&self, op: Op, tensor: &FloatTensor<B>) {
        let _ = (op, tensor);
    }

    /// Reduce `tensor` over the processes of a group. `None` leaves it to the backend underneath.
    fn all_reduce<B: BackendIr>(
        &self,
        tensor: &FloatTensor<B>,
        op: ReduceOperation,
        devices: &[DeviceId],
    ) -> Option<Reduced<B>> {
        let _ = (tensor, op, devices);
        None
    }

    /// The end of a backward pass: every [`all_reduce`](Self::all_reduce) of it was submitted.
    /// `false` leaves it to the backend underneath.
    fn sync_collective<B: BackendIr>(&self, device: &B::Device) -> bool {
        let _ = device;
        false
    }
}

/// The float inputs of an op: what they are stored in, and what the program believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inputs {
    /// The dtype that the program sees: that of the first float input.
    pub nominal: DType,
    /// The dtype that the first float input is stored in.
    pub first: DType,
    /// Whether the first float input comes straight from a transposition.
    pub first_transposed: bool,
    /// The narrowest dtype that holds every input's storage dtype (f16 and bf16 together: f32).
    pub widest: DType,
    /// Whether the inputs are stored in more than one dtype.
    pub mixed: bool,
}

impl Inputs {
    /// The inputs as they are; where they differ, all of them in the widest dtype.
    pub fn promote(&self) -> Plan {
        Plan {
            compute: self.mixed.then_some(self.widest),
            store: None,
        }
    }

    /// Whether the first float input is stored in 16 bits.
    pub fn stored_low(&self) -> bool {
        matches!(self.first, DType::F16 | DType::BF16)
    }

    pub(crate) fn with(self, storage: DType) -> Self {
        Self {
            nominal: self.nominal,
            first: self.first,
            first_transposed: self.first_transposed,
            widest: widest(self.widest, storage),
            mixed: self.mixed || self.widest != storage,
        }
    }
}

fn widest(a: DType, b: DType) -> DType {
    match (a, b) {
        _ if a == b => a,
        (DType::F64, _) | (_, DType::F64) => DType::F64,
        // f16 and bf16 hold different numbers: only f32 holds both.
        _ => DType::F32,
    }
}

/// How an op runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The dtype that every float input is cast to first. `None`: as they are.
    pub compute: Option<DType>,
    /// The dtype that float outputs are stored in. `None`: as computed.
    pub store: Option<DType>,
}

impl Plan {
    /// Run in `dtype` and keep the output as computed.
    pub const fn compute(dtype: DType) -> Self {
        Self {
            compute: Some(dtype),
            store: None,
        }
    }

    /// Store the outputs in `dtype`.
    pub const fn store(self, dtype: DType) -> Self {
        Self {
            compute: self.compute,
            store: Some(dtype),
        }
    }
}

/// A cast that a layer's plan asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cast {
    /// The dtype of the storage.
    pub from: DType,
    /// The dtype that was needed.
    pub to: DType,
    /// How many elements the tensor has.
    pub elements: usize,
    /// Whether an earlier cast of the same tensor was used again.
    pub saved: bool,
}

/// What became of a tensor given to [`Layer::all_reduce`].
#[derive(Debug)]
pub enum Reduced<B: Backend> {
    /// The reduced tensor.
    Ready(FloatTensor<B>),
    /// It is under way: the first use of the result waits for it.
    Deferred(Deferred<FloatTensor<B>>),
}
