//! [`LayeredFloat`]: the float tensors of a layered backend, with what is known of them.

use crate::{
    Cast, LayerSet, LayeredDevice,
    held::Held,
    ops::{
        batch::Products, batch_norm::Norm, kernel_end::alone_in_kernel, layer_norm::RowNorm,
        rotation::Rotation, softmax::Role,
    },
    recent::GiveUp,
    recompute::Recomputed,
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

    pub(crate) fn columns(&self) -> Option<&Arc<Rows>> {
        self.columns.as_ref()
    }

    pub(crate) fn with_columns(self, columns: Option<Arc<Rows>>) -> Self {
        Self { columns, ..self }
    }

    pub(crate) fn rows(&self) -> &Arc<Rows> {
        &self.rows
    }

    pub(crate) fn with_rows(self, rows: Arc<Rows>) -> Self {
        Self { rows, ..self }
    }

    /// This tensor's identity, for what is made of it to refer to.
    pub(crate) fn origin(&self) -> Origin {
        Arc::downgrade(&self.identity)
    }

    /// The tensor that this one is the maximum of along a dimension, if it is one.
    pub(crate) fn maximum_of(&self) -> Option<&Origin> {
        self.maximum_of.as_ref()
    }

    /// Whether the tensor is the maximum along a dimension of the one with that identity.
    pub(crate) fn is_maximum_of(&self, identity: usize) -> bool {
        let of = self.maximum_of.as_ref();
        of.is_some_and(|of| of.as_ptr() as usize == identity)
    }

    pub(crate) fn with_maximum_of(self, maximum_of: Option<Origin>) -> Self {
        Self { maximum_of, ..self }
    }

    /// Whether the tensor is a gradient: computed from the one that a backward pass begins with.
    pub(crate) fn is_gradient(&self) -> bool {
        self.gradient
    }

    pub(crate) fn with_gradient(self, gradient: bool) -> Self {
        Self { gradient, ..self }
    }

    /// Whether the tensor was computed by a product or a similar op of a network, as activations are and parameters are not.
    pub(crate) fn is_computed(&self) -> bool {
        self.computed
    }

    pub(crate) fn with_computed(self, computed: bool) -> Self {
        Self { computed, ..self }
    }

    /// Which part of something that Burn computes by several ops the tensor may be.
    pub(crate) fn part(&self) -> Option<Part> {
        self.part
    }

    pub(crate) fn with_part(self, part: Option<Part>) -> Self {
        Self { part, ..self }
    }

    /// The product that gives the tensor, if it waits for the sum over its batch.
    pub(crate) fn products(&self) -> Option<&Arc<Products<B>>> {
        self.products.as_ref()
    }

    pub(crate) fn with_products(self, products: Option<Arc<Products<B>>>) -> Self {
        Self { products, ..self }
    }

    /// What the tensor is to a batch normalization, if anything.
    pub(crate) fn norm(&self) -> Option<&Norm<B>> {
        self.norm.as_deref()
    }

    pub(crate) fn with_norm(self, norm: Option<Arc<Norm<B>>>) -> Self {
        Self { norm, ..self }
    }

    /// What the tensor is to a softmax, if anything.
    pub(crate) fn role(&self) -> Option<&Arc<Role<B>>> {
        self.role.as_ref()
    }

    pub(crate) fn with_role(self, role: Option<Arc<Role<B>>>) -> Self {
        Self { role, ..self }
    }

    /// What the tensor is to a layer normalization, if anything.
    pub(crate) fn row_norm(&self) -> Option<&RowNorm<B>> {
        self.row_norm.as_deref()
    }

    pub(crate) fn with_row_norm(self, row_norm: Option<Arc<RowNorm<B>>>) -> Self {
        Self { row_norm, ..self }
    }

    /// What the tensor is to a rotation, if anything.
    pub(crate) fn rotation(&self) -> Option<&Rotation<B>> {
        self.rotation.as_deref()
    }

    pub(crate) fn with_rotation(self, rotation: Option<Arc<Rotation<B>>>) -> Self {
        Self { rotation, ..self }
    }

    pub(crate) fn layer(&self) -> &Arc<LayerSet> {
        &self.layer
    }

    /// A number that the clones of a tensor share while one of them lives.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.identity) as usize
    }

    /// Whether the tensor has other clones, such as one that the program still holds.
    pub(crate) fn has_clones(&self) -> bool {
        Arc::strong_count(&self.identity) > 1
    }

    pub(crate) fn copied(&self) -> &Copied<FloatTensor<B>> {
        &self.copied
    }

    pub(crate) fn with_copied(self, copied: Copied<FloatTensor<B>>) -> Self {
        Self { copied, ..self }
    }

    /// The elements in the narrower dtype that they were computed in, if they are cast to a wider one where they are needed.
    pub(crate) fn exact(&self) -> Option<&FloatTensor<B>> {
        self.source.narrow()
    }

    /// The dtype of the narrower copy, if there is one and the tensor is neither computed nor a gradient.
    pub(crate) fn copied_as_parameter(&self) -> Option<DType> {
        if self.computed || self.gradient {
            return None;
        }
        let dtype = self.copied.lock().as_ref().map(|(dtype, _)| *dtype)?;
        (dtype.size() < self.storage_dtype().size()).then_some(dtype)
    }

    /// The copy in another dtype, if there is one.
    pub(crate) fn copy(&self) -> Option<(DType, FloatTensor<B>)> {
        let (dtype, copy) = self.copied.lock().clone()?;
        Some((dtype, in_shape::<B>(copy, self.shape())))
    }

    pub(crate) fn storage_device(&self) -> Device<B> {
        self.source.device()
    }

    /// The length of the chain of tensors that are computed from each other to compute this one again. `None` if it never has to
    /// be.
    pub(crate) fn recomputed(&self) -> Option<usize> {
        self.source.depth()
    }

    /// Whether the elements are there, and need not be waited for, computed again or viewed.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.source, Source::Ready(_))
    }

    /// Whether the elements are waited for.
    pub(crate) fn waits(&self) -> bool {
        matches!(self.source, Source::Later(Later::Deferred(_), ..))
    }

    /// Whether the tensor is a view that may be cast before it is taken.
    pub(crate) fn is_view(&self) -> bool {
        matches!(self.source, Source::Later(Later::View(_), ..))
    }

    /// The value that can be computed again, if the tensor is one.
    pub(crate) fn value(&self) -> Option<&Arc<Recomputed<FloatTensor<B>>>> {
        self.source.value()
    }

    /// The dtype that the elements are stored in.
    pub fn storage_dtype(&self) -> DType {
        self.source.dtype()
    }

    /// The dtype that tells the precision of the elements: the one that they are stored in, except for a mask, whose zeros and
    /// ones are exact in any dtype. For a mask, it is the one that the program sees.
    pub(crate) fn meant_dtype(&self) -> DType {
        match self.part {
            Some(Part::Mask) => self.nominal,
            _ => self.storage_dtype(),
        }
    }

    /// The same elements as an input of an op that may run again, without anything else that is known of the tensor or shared.
    pub(crate) fn alone(&self) -> Self {
        Self::with_source(self.source.clone(), self.nominal, self.layer().clone())
    }

    /// The tensor in `dtype`, or as it is stored for `None`, without keeping a copy.
    pub(crate) fn in_dtype(&self, dtype: Option<DType>) -> FloatTensor<B> {
        let from = self.storage_dtype();
        match dtype.filter(|dtype| *dtype != from) {
            Some(to) => {
                let source = self.source.clone();
                source.cast(&self.layer, to, |stored| {
                    self.layer().cast(Cast {
                        from,
                        to,
                        elements: self.shape().num_elements(),
                        saved: false,
                    });
                    B::float_cast(stored, to.into())
                })
            }
            None => self.clone().into_storage(),
        }
    }

    /// The tensor of the backend underneath, as it is stored.
    pub fn into_storage(self) -> FloatTensor<B> {
        self.source.get(&self.layer)
    }

    /// The tensor of the backend underneath in the dtype that it was computed in, which may be narrower than the one it is stored in.
    pub(crate) fn into_computed(self) -> FloatTensor<B> {
        let exact = self.exact().cloned();
        exact.unwrap_or_else(|| self.into_storage())
    }

    /// The tensor of the backend underneath in `dtype`. Uses an earlier cast of the same tensor if there
    /// is one.
    pub fn into_dtype(self, dtype: DType) -> FloatTensor<B> {
        self.cast(dtype, true)
    }

    /// The same, but keeps no copy. This is for ops that are wide only inside: a backend that fuses ops does not write a copy
    /// that nobody keeps.
    pub(crate) fn into_dtype_once(self, dtype: DType) -> FloatTensor<B> {
        self.cast(dtype, false)
    }

    fn cast(self, dtype: DType, keep: bool) -> FloatTensor<B> {
        let from = self.storage_dtype();
        if from == dtype {
            return self.into_storage();
        }
        let cast = Cast {
            from,
            to: dtype,
            elements: self.shape().num_elements(),
            saved: false,
        };
        // The last holder has no use for a copy beyond this op.
        let is_shared = keep && Arc::strong_count(&self.copied) > 1;
        // A tensor that can be computed again gives up its wider elements below, so that only the narrower copy takes memory.
        let narrower = dtype.size() < from.size();
        let of_parameter = narrower && !self.computed && !self.gradient;
        let lasts = narrower && (!self.computed || self.recomputed().is_some());
        let copied = self.copied.clone();
        let layer = self.layer().clone();
        let copy = copied.lock().clone();
        let exact = self.exact().cloned();
        let copy = copy.or_else(|| exact.map(|exact| (exact.dtype(), exact)));
        if let Some((at, tensor)) = copy
            && at == dtype
        {
            layer.cast(Cast {
                saved: true,
                ..cast
            });
            return in_shape::<B>(tensor, self.shape());
        }
        let value = self.value().cloned();
        let tensor = self.source.cast(&layer, dtype, |stored| {
            layer.cast(cast);
            if let Some(value) = value.filter(|_| is_shared && lasts) {
                // The copy is all that products need.
                value.give_up();
            }
            B::float_cast(stored, dtype.into())
        });
        // The next ops of the network use the copy, and none of them goes on in its kernel.
        let tensor = match is_shared && of_parameter && layer.is_fused() {
            true => alone_in_kernel::<B>(tensor),
            false => tensor,
        };
        if is_shared {
            *copied.lock() = Some((dtype, tensor.clone()));
            if !lasts {
                layer.keep_for_now(&copied);
            }
        }
        tensor
    }

    /// The tensor of the backend underneath in the dtype that the program sees.
    pub fn into_nominal(self) -> FloatTensor<B> {
        let nominal = self.nominal;
        self.into_dtype(nominal)
    }
}

fn in_shape<B: Backend>(tensor: FloatTensor<B>, shape: Shape) -> FloatTensor<B> {
    if tensor.shape() == shape {
        return tensor;
    }
    B::float_reshape(tensor, shape)
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
