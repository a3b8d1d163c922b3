//! [`LayeredFloat`]: the float tensors of a layered backend, with what is known of them.

mod cast;
mod facts;

use crate::{
    LayerSet, LayeredDevice,
    held::Held,
    ops::{
        batch::Products, batch_norm::Norm, layer_norm::RowNorm, rotation::Rotation, softmax::Role,
    },
    rows::Rows,
    source::{Later, Source},
};
use burn_backend::{
    Backend, DType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use core::fmt;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// A copy in another dtype, which a tensor shares with its clones and reshapes. A narrower copy lives as long as they do if the
/// tensor is no activation, so that a parameter is cast once and not once per op, or can be computed again, so that its wider
/// elements need not be kept. Other copies are kept for a [while](crate::recent::Recent).
pub(crate) type Copied<P> = Arc<Mutex<Option<(DType, P)>>>;

/// A float tensor of a layered backend: its storage, whose dtype the layers choose, and the
/// dtype that the program sees.
#[derive(Clone)]
pub struct LayeredFloat<B: Backend> {
    source: Source<FloatTensor<B>>,
    nominal: DType,
    /// Shared by all clones of the tensor, which are recognized by it.
    identity: Arc<()>,
    copied: Copied<FloatTensor<B>>,
    rows: Arc<Rows>,
    /// If this tensor is the transposition of another: the rows of that one.
    columns: Option<Arc<Rows>>,
    /// If this tensor is the maximum of another along a dimension: that one.
    maximum_of: Option<Origin>,
    /// Whether the tensor is a gradient.
    gradient: bool,
    /// Whether the tensor was computed by a product or a similar op of a network.
    computed: bool,
    /// Which part of something that Burn computes by several ops the tensor may be.
    part: Option<Part>,
    /// The product that gives the tensor, if it waits for the sum over its batch.
    products: Option<Arc<Products<B>>>,
    /// What the tensor is to a batch normalization.
    norm: Option<Arc<Norm<B>>>,
    /// What the tensor is to a softmax.
    role: Option<Arc<Role<B>>>,
    /// What the tensor is to a layer normalization.
    row_norm: Option<Arc<RowNorm<B>>>,
    /// What the tensor is to a rotation.
    rotation: Option<Arc<Rotation<B>>>,
    layer: Held,
}

/// A part of something that Burn computes by several ops: of a linear layer, which is a product and its sum with a row; of
/// dropout, which multiplies by a mask; of `silu`, which multiplies by a gate; or of backward, which begins with a one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Product,
    /// A vector, reshaped.
    Row,
    /// Zeros and ones that were drawn.
    Mask,
    /// A sigmoid, reshaped or not, or one more than a [`Tanh`](Self::Tanh), as in the approximate GELU.
    Gate,
    /// A hyperbolic tangent.
    Tanh,
    /// What is multiplied by a gate in forward.
    Gated,
    /// The gradient of that.
    OfGated,
    /// What the first so many ops of a gate's derivative make in backward, `(1 - gate) gate`.
    OfGateSlope(usize),
    /// The gradient of what a gate is computed from.
    OfGate,
    /// What the first so many ops of a sigmoid make.
    OfSigmoid(usize),
    /// A one alone, as backward begins with, a number times it, or a reshape of these.
    One,
    /// A vector times a number, as a moving average is the sum of two.
    Weighted,
    /// Zeros that were made in backward, to which it adds gradients, or what an op that keeps zeros makes of these.
    Zeros,
}

/// The identity of the tensor that another one was made of. While this lives, no other tensor's identity has its address.
pub(crate) type Origin = Weak<()>;

impl<B: Backend> LayeredFloat<B> {
    pub(crate) fn new(primitive: FloatTensor<B>, nominal: DType, layer: Arc<LayerSet>) -> Self {
        Self::with_source(Source::Ready(primitive), nominal, layer)
    }

    /// A tensor of that shape and dtype, whose elements may have to be waited for or computed again.
    pub(crate) fn later(
        value: Later<FloatTensor<B>>,
        (shape, dtype): (Shape, DType),
        device: Device<B>,
        nominal: DType,
        layer: Arc<LayerSet>,
    ) -> Self {
        let source = Source::Later(value, (shape, dtype), device);
        Self::with_source(source, nominal, layer)
    }

    fn with_source(source: Source<FloatTensor<B>>, nominal: DType, layer: Arc<LayerSet>) -> Self {
        Self {
            source,
            nominal,
            identity: Arc::new(()),
            copied: Arc::default(),
            rows: Arc::default(),
            columns: None,
            maximum_of: None,
            gradient: false,
            computed: false,
            part: None,
            products: None,
            norm: None,
            role: None,
            row_norm: None,
            rotation: None,
            layer: Held::new(layer),
        }
    }

    /// The same elements as an input of an op that may run again, without anything else that is known of the tensor or shared.
    pub(crate) fn alone(&self) -> Self {
        Self::with_source(self.source.clone(), self.nominal, self.layer().clone())
    }
}

impl<B: Backend> fmt::Debug for LayeredFloat<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayeredFloat")
            .field("nominal", &self.nominal)
            .field("source", &self.source)
            .finish()
    }
}

impl<B: Backend> TensorMetadata for LayeredFloat<B> {
    type Device = LayeredDevice<B::Device>;

    fn dtype(&self) -> DType {
        self.nominal
    }

    fn shape(&self) -> Shape {
        self.source.shape()
    }

    fn device(&self) -> Self::Device {
        LayeredDevice::with_shared(self.storage_device(), self.layer().clone())
    }

    fn can_mut(&self) -> bool {
        match &self.source {
            Source::Ready(tensor) => tensor.can_mut(),
            Source::Later(..) => false,
        }
    }
}
