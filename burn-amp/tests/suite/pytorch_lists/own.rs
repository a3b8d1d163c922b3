//! The ops of Burn that are in none of PyTorch's lists.

use super::Precision;
use burn_amp::Op;

/// Burn's forward ops that do not run as they are stored and are in no list of PyTorch's.
pub(super) const OWN: &[(Op, Precision, &str)] = &[
    (
        Op::float_mean,
        Precision::Full,
        "PyTorch's kernel sums in f32 inside",
    ),
    (
        Op::float_mean_dim,
        Precision::Full,
        "PyTorch's kernel sums in f32 inside",
    ),
    (
        Op::float_max_dim,
        Precision::Full,
        "what PyTorch's softmax subtracts, which computes in f32 inside",
    ),
    (
        Op::float_max_dim_with_indices,
        Precision::Full,
        "what attention subtracts in training, as the softmax of PyTorch's does in f32 inside",
    ),
    (
        Op::log_sigmoid,
        Precision::Full,
        "PyTorch's kernel computes in f32 inside",
    ),
    (
        Op::sigmoid,
        Precision::Full,
        "PyTorch bans the loss that takes its logarithms",
    ),
    (
        Op::softmin,
        Precision::Full,
        "in PyTorch, softmax of the negation",
    ),
    (
        Op::ctc_loss,
        Precision::Full,
        "PyTorch's takes no half precision",
    ),
    (
        Op::batch_norm,
        Precision::Full,
        "PyTorch's kernel computes in f32 inside",
    ),
    (
        Op::batch_norm_train,
        Precision::Full,
        "PyTorch's kernel computes in f32 inside",
    ),
    (
        Op::float_add_scalar,
        Precision::Full,
        "PyTorch's kernel takes the scalar in f32",
    ),
    (
        Op::float_sub_scalar,
        Precision::Full,
        "PyTorch's kernel takes the scalar in f32",
    ),
    (
        Op::float_mul_scalar,
        Precision::Full,
        "PyTorch's kernel takes the scalar in f32",
    ),
    (
        Op::float_div_scalar,
        Precision::Full,
        "PyTorch's kernel takes the scalar in f32",
    ),
    (
        Op::float_remainder_scalar,
        Precision::Full,
        "PyTorch's kernel takes the scalar in f32",
    ),
    (
        Op::avg_pool1d,
        Precision::Full,
        "PyTorch's kernel sums in f32 inside",
    ),
    (
        Op::avg_pool2d,
        Precision::Full,
        "PyTorch's kernel sums in f32 inside",
    ),
    (
        Op::adaptive_avg_pool1d,
        Precision::Full,
        "PyTorch's kernel sums in f32 inside",
    ),
    (
        Op::adaptive_avg_pool2d,
        Precision::Full,
        "PyTorch's kernel sums in f32 inside",
    ),
    (
        Op::adaptive_avg_pool3d,
        Precision::Full,
        "PyTorch's kernel sums in f32 inside",
    ),
    (
        Op::leaky_relu,
        Precision::Full,
        "PyTorch's kernel computes in f32 inside",
    ),
    (
        Op::float_hypot,
        Precision::Full,
        "PyTorch's kernel computes in f32 inside",
    ),
    (
        Op::float_remainder,
        Precision::Full,
        "PyTorch's kernel computes in f32 inside",
    ),
    (
        Op::float_erf,
        Precision::Full,
        "PyTorch's kernel computes in f32 inside",
    ),
    (
        Op::float_acosh,
        Precision::Full,
        "PyTorch's kernel computes in f32 inside",
    ),
    (
        Op::float_asinh,
        Precision::Full,
        "PyTorch's kernel computes in f32 inside",
    ),
    (
        Op::float_atanh,
        Precision::Full,
        "PyTorch's kernel computes in f32 inside",
    ),
    (Op::deform_conv2d, Precision::Full, "torchvision's"),
    (
        Op::q_matmul,
        Precision::Low,
        "a matmul of dequantized values",
    ),
];
