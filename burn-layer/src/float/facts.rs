//! What is known of a float tensor.

use super::{Copied, LayeredFloat, Origin, Part};
use crate::{
    LayerSet,
    ops::{
        batch::Products, batch_norm::Norm, layer_norm::RowNorm, rotation::Rotation, softmax::Role,
    },
    recompute::Recomputed,
    rows::Rows,
    source::{Later, Source},
};
use burn_backend::{
    Backend, DType,
    tensor::{Device, FloatTensor},
};
use std::sync::Arc;

impl<B: Backend> LayeredFloat<B> {
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
}
