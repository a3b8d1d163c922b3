//! [`Layer`]: what a layered backend changes about the backend under it.

use crate::{FloatView, Inputs, Op, Plan, Ran, Reduced, Run, scope::Scope};
use burn_backend::{DType, DeviceId, distributed::ReduceOperation};
use core::{any::Any, fmt::Debug};

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
/// #[derive(Debug)]
/// struct LowMatmul;
///
/// impl Layer for LowMatmul {
///     fn plan(&self, op: Op, _inputs: &Inputs) -> Option<Plan> {
///         (op == Op::float_matmul).then(|| Plan::compute(DType::BF16))
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
pub trait Layer: Debug + Send + Sync + 'static {
    /// Decides how `op` runs, given what is known of its float inputs. `None` leaves it to the
    /// next layer below; below the last one, [mixed inputs are promoted](Inputs::promote).
    ///
    /// Not called for ops without float inputs, with one exception: draws of zeros and ones (`Distribution::Bernoulli`), for
    /// which `inputs` has the dtype that the program asks for. Dropout keeps these until backward, and any dtype
    /// [stores](Plan::store) them exactly. As inputs of other ops, they count as the dtype asked for, whatever stores them.
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        let _ = (op, inputs);
        None
    }

    /// Runs an op for which a [plan](Plan::own) said that the layer runs it itself. `None` leaves it to the next layer below.
    /// Below the last one, the op runs on the backend: in the dtypes of the plan if it has one to compute in, otherwise
    /// with mixed inputs promoted. Only called for ops that return one float tensor; all others run on the backend.
    ///
    /// ```
    /// use burn::{backend::Flex, tensor::{Device, Tensor}};
    /// use burn_backend::ops::FloatTensorOps;
    /// use burn_layer::{Inputs, Layer, Layers, Op, Plan, Ran, Run};
    ///
    /// /// Takes sines for cosines.
    /// #[derive(Debug)]
    /// struct Sines;
    ///
    /// impl Layer for Sines {
    ///     fn plan(&self, op: Op, _inputs: &Inputs) -> Option<Plan> {
    ///         (op == Op::float_cos).then(Plan::own)
    ///     }
    ///
    ///     fn run(&self, run: &Run<'_>) -> Option<Ran> {
    ///         run.on::<Flex>(|mut inputs| Flex::float_sin(inputs.remove(0).tensor()))
    ///     }
    /// }
    ///
    /// let device = Layers::on(Device::flex()).layer(Sines).serve()?;
    /// let x = Tensor::<1>::from_floats([0.5], &device);
    /// assert_eq!(x.cos().into_scalar::<f32>(), 0.5f32.sin());
    /// # Ok::<(), burn_layer::LayerError>(())
    /// ```
    fn run(&self, run: &Run<'_>) -> Option<Ran> {
        let _ = run;
        None
    }

    /// Called when `op` is about to run on the backend with its float inputs in `dtype`.
    fn ran(&self, op: Op, dtype: DType) {
        let _ = (op, dtype);
    }

    /// Called when the result of `op` is about to be computed again, because it was dropped as its [plan](Plan::recompute)
    /// allowed. Also called for a result that was held back to be fused with a sum, and is then needed alone: a product that
    /// [waited for the sum over its batch](Plan::over_batch), and, over a backend that fuses ops, the elements that a batch
    /// normalization sums by channel.
    fn recomputed(&self, op: Op) {
        let _ = op;
    }

    /// Called when a float tensor is needed in another dtype than the one it is stored in.
    fn cast(&self, cast: Cast) {
        let _ = cast;
    }

    /// Called when an op's float result with that many elements is stored in `dtype`, while the program sees
    /// `nominal`.
    fn stored(&self, dtype: DType, nominal: DType, elements: usize) {
        let _ = (dtype, nominal, elements);
    }

    /// Whether the layer wants to be shown the [results](Layer::made) of ops. Asked at every op.
    fn watches(&self) -> bool {
        false
    }

    /// Called with every float tensor that an op returns, while the layer [watches](Layer::watches).
    /// Not called for custom ops and collectives, which are no [`Op`].
    fn made(&self, made: &Made<'_>) {
        let _ = made;
    }

    /// Reduces `tensor` over the processes of a group. `None` leaves it to the next layer below, and
    /// below the last one to the backend.
    fn all_reduce(
        &self,
        tensor: FloatView<'_>,
        op: ReduceOperation,
        devices: &[DeviceId],
    ) -> Option<Reduced> {
        let _ = (tensor, op, devices);
        None
    }

    /// Called at the end of a backward pass, when all its [`all_reduce`](Self::all_reduce) calls were made.
    /// `false` leaves it to the next layer below, and below the last one to the backend.
    fn sync_collective(&self) -> bool {
        false
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

/// A float tensor that an op returned.
#[derive(Debug)]
pub struct Made<'a> {
    /// The op.
    pub op: Op,
    /// The dtype that the output was computed in.
    pub dtype: DType,
    /// The float inputs as they are stored, before the casts that the plan asked for.
    pub inputs: Vec<FloatView<'a>>,
    /// The output as it is stored, after the casts that the plan asked for.
    pub output: FloatView<'a>,
    pub(crate) scope: Option<&'a Scope>,
}

impl Made<'_> {
    /// The values of type `T` of the [scopes](crate::scoped) that the op is in, outermost first.
    pub fn scopes<T: Any>(&self) -> Vec<&T> {
        crate::scope::values(self.scope)
    }
}
