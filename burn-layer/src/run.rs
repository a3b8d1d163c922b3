//! [`Run`]: an op that a layer runs itself.

use crate::{Inputs, Kept, LayeredFloat, Op};
use burn_backend::{
    Backend, DType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use core::{any::Any, fmt};

/// An op for which a layer's [plan](crate::Plan::own) said that the layer runs it itself.
pub struct Run<'a> {
    pub(crate) op: Op,
    pub(crate) store: Option<DType>,
    pub(crate) inputs: &'a Inputs,
    pub(crate) sums_batch: bool,
    /// A `Vec<LayeredFloat<B>>` of the backend `B` underneath.
    pub(crate) tensors: &'a dyn Any,
}

impl Run<'_> {
    /// The op.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The dtype that the plan stores the result in. A result in another dtype is cast to it.
    pub fn store(&self) -> Option<DType> {
        self.store
    }

    /// Whether the sum of the products over their batch is to be computed: see [`Plan::over_batch`](crate::Plan::over_batch). The result has
    /// as many elements as one of them.
    pub fn sums_batch(&self) -> bool {
        self.sums_batch
    }

    /// What the layer was told of the inputs when it planned the op.
    pub fn inputs(&self) -> &Inputs {
        self.inputs
    }

    /// The values of type `T` of the [scopes](crate::scoped) that the op is in, outermost first.
    pub fn scopes<T: Any>(&self) -> Vec<&T> {
        self.inputs.scopes()
    }

    /// Runs the op with `kernel` if the backend underneath is `B`; otherwise returns `None`. The kernel gets the float inputs in
    /// the op's order (absent optional ones are left out), in the dtypes that they are stored in.
    pub fn on<B: Backend>(
        &self,
        kernel: impl FnOnce(Vec<RunInput<'_, B>>) -> FloatTensor<B>,
    ) -> Option<Ran> {
        let inputs: &Vec<LayeredFloat<B>> = self.tensors.downcast_ref()?;
        let inputs = inputs.iter().map(|tensor| RunInput {
            tensor,
            turned: false,
            kept: Kept::of(tensor.rows()),
            transposed: tensor.columns().map(|columns| Kept::of(columns)),
        });
        Some(Ran(Box::new(kernel(inputs.collect()))))
    }
}

impl fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run")
            .field("op", &self.op)
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

/// A float input of an op that a layer runs itself.
#[derive(Clone, Debug)]
pub struct RunInput<'a, B: Backend> {
    tensor: &'a LayeredFloat<B>,
    /// Whether to swap the last two dimensions of `tensor`.
    turned: bool,
    /// What layers keep with this input.
    pub kept: Kept<'a>,
    /// If this input is the transposition (of the last two dimensions) of another tensor: what layers keep with that tensor.
    pub transposed: Option<Kept<'a>>,
}

impl<B: Backend> RunInput<'_, B> {
    /// The tensor of the backend underneath, in the dtype that it is stored in. If it was not kept, this
    /// [computes it again](crate::Plan::recompute), so call it only where the tensor is needed.
    pub fn tensor(&self) -> FloatTensor<B> {
        let tensor = self.tensor.clone().into_storage();
        let rank = tensor.shape().num_dims();
        match self.turned {
            true => B::float_swap_dims(tensor, rank - 2, rank - 1),
            false => tensor,
        }
    }

    /// The shape.
    pub fn shape(&self) -> Shape {
        let mut shape = self.tensor.shape();
        if self.turned {
            let rank = shape.num_dims();
            shape.as_mut_slice().swap(rank - 2, rank - 1);
        }
        shape
    }

    /// The device, of the backend underneath.
    pub fn device(&self) -> Device<B> {
        self.tensor.storage_device()
    }

    /// The tensor that this input is the transposition of, with what is kept with that tensor. `None` if it is no transposition.
    pub fn untransposed(self) -> Option<Self> {
        Some(Self {
            turned: !self.turned,
            kept: self.transposed?,
            transposed: None,
            tensor: self.tensor,
        })
    }
}

/// The result of an op that a layer ran itself.
pub struct Ran(pub(crate) Box<dyn Any>);

impl fmt::Debug for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ran")
    }
}
