//! [`Run`]: an op that a layer runs itself.

use crate::{Inputs, Kept, LayeredFloat, Op};
use burn_backend::{
    Backend, DType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use core::{any::Any, fmt};

/// An op that a layer's [plan](crate::Plan::own) asked to run itself.
pub struct Run<'a> {
    pub(crate) op: Op,
    pub(crate) store: Option<DType>,
    pub(crate) inputs: &'a Inputs,
    /// A `Vec<LayeredFloat<B>>` of the backend `B` underneath.
    pub(crate) tensors: &'a dyn Any,
}

impl Run<'_> {
    /// The op.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The dtype that the plan stores the result in. A result in another one is cast.
    pub fn store(&self) -> Option<DType> {
        self.store
    }

    /// What the layer planned the op by.
    pub fn inputs(&self) -> &Inputs {
        self.inputs
    }

    /// The values of type `T` of the [scopes](crate::scoped) that the op is in, outermost first.
    pub fn scopes<T: Any>(&self) -> Vec<&T> {
        self.inputs.scopes()
    }

    /// Runs the op by `kernel`, if the backend underneath is `B`. The kernel gets the float inputs in
    /// the op's order (those that are not there left out), in the dtypes that they are stored in.
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
    /// Whether its last two dimensions are to be swapped.
    turned: bool,
    /// What is kept with it.
    pub kept: Kept<'a>,
    /// What is kept with the tensor that it is the transposition of (of the last two dimensions), where it is one.
    pub transposed: Option<Kept<'a>>,
}

impl<B: Backend> RunInput<'_, B> {
    /// The tensor of the backend underneath, in the dtype that it is stored in. If it was not kept, it is
    /// [computed again](crate::Plan::recompute), so this is for where it is needed.
    pub fn tensor(&self) -> FloatTensor<B> {
        let tensor = self.tensor.clone().into_storage();
        let rank = tensor.shape().num_dims();
        match self.turned {
            true => B::float_swap_dims(tensor, rank - 2, rank - 1),
            false => tensor,
        }
    }

    /// Its shape.
    pub fn shape(&self) -> Shape {
        let mut shape = self.tensor.shape();
        if self.turned {
            let rank = shape.num_dims();
            shape.as_mut_slice().swap(rank - 2, rank - 1);
        }
        shape
    }

    /// Its device.
    pub fn device(&self) -> Device<B> {
        self.tensor.storage_device()
    }

    /// The tensor that it is the transposition of, with what is kept with that; `None` if it is no transposition.
    pub fn untransposed(self) -> Option<Self> {
        Some(Self {
            turned: !self.turned,
            kept: self.transposed?,
            transposed: None,
            tensor: self.tensor,
        })
    }
}

/// What came of an op that a layer ran itself.
pub struct Ran(pub(crate) Box<dyn Any>);

impl fmt::Debug for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ran")
    }
}
