//! Delegation of Burn's op traits.

mod again;
mod average;
pub(crate) mod batch;
pub(crate) mod batch_norm;
mod biased;
pub(crate) mod call;
mod computed;
mod constants;
mod convolution;
mod delegate;
mod distributed;
mod gradient_sum;
mod identity;
mod inherited;
pub(crate) mod kernel_end;
pub(crate) mod layer_norm;
mod lineage;
mod parts;
mod product;
pub(crate) mod rotation;
mod select_assign;
pub(crate) mod softmax;
mod sum_of_rows;
pub(crate) mod table;
mod transaction;
mod view;

pub(crate) use batch_norm::LastProduct;
pub(crate) use product::Multiply;
#[cfg(feature = "cubecl")]
pub(crate) use {
    batch_norm::BatchNorms,
    convolution::{Convolution, Convolutions, Wanted},
    layer_norm::{LayerNorms, NormBackward},
    product::product_by_kernels,
    rotation::{Rotations, Turn},
    softmax::{Logits, Mask, Scale, SoftmaxBackward, Softmaxes},
};
