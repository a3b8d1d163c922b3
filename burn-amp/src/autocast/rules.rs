//! The table: which [`Rule`] each float op of Burn runs under.
//!
//! It is written to be read beside PyTorch's lists for CUDA (`aten/src/ATen/autocast_mode.cpp`), which are the same for fp16 and
//! bf16; `tests/suite/pytorch_lists` compares them, op by op and both ways. For an op that both have, the rule is PyTorch's.
//! The docs of [`Policy`](super::Policy) list the ops that are not in its lists, or differ.
//!
//! A weight may also be used in a plain product, whose backward is a plain product again. The one
//! that computes the weight's gradient has its left factor transposed (`x^T dy`), so the result
//! of such a product is stored in f32 as well. (The product that computes the gradient of a left factor, `dy w^T`, is told from
//! a product of forward by its inputs, and its result is stored in f32 if the factor was.)
//!
//! PyTorch's autocast decides about forward ops, and backward ops run in the dtype of their forward. Burn's
//! backward consists of ops as well, so these are in the table beside their forward.

use super::Rule;
use burn_layer::Op;

/// The rules of `O1`, `bf16` and `fp16`, group by group.
pub(super) const RULES: &[(Rule, &[Op])] = &[
    // matmul, mm, bmm, baddbmm, addmm, linear, einsum
    (
        Rule::Lower,
        &[
            Op::float_matmul,
            Op::linear,
            Op::linear_x_backward,
            Op::q_matmul,
        ],
    ),
    (Rule::WeightGrad, &[Op::linear_weight_backward]),
    // conv1d/2d/3d, conv_transpose1d/2d/3d
    (
        Rule::Lower,
        &[
            Op::conv1d,
            Op::conv1d_x_backward,
            Op::conv2d,
            Op::conv2d_x_backward,
            Op::conv3d,
            Op::conv3d_x_backward,
            Op::conv_transpose1d,
            Op::conv_transpose1d_x_backward,
            Op::conv_transpose2d,
            Op::conv_transpose2d_x_backward,
            Op::conv_transpose3d,
            Op::conv_transpose3d_x_backward,
        ],
    ),
    (
        Rule::WeightGrad,
        &[
            Op::conv1d_weight_backward,
            Op::conv1d_bias_backward,
            Op::conv2d_weight_backward,
            Op::conv2d_bias_backward,
            Op::conv3d_weight_backward,
            Op::conv3d_bias_backward,
            Op::conv_transpose1d_weight_backward,
            Op::conv_transpose1d_bias_backward,
            Op::conv_transpose2d_weight_backward,
            Op::conv_transpose2d_bias_backward,
            Op::conv_transpose3d_weight_backward,
            Op::conv_transpose3d_bias_backward,
        ],
    ),
    // scaled_dot_product_attention, prelu
    (Rule::Lower, &[Op::attention, Op::prelu]),
    // acos, asin, cosh, exp, log, log1p, reciprocal, sinh, tan, pow
    (
        Rule::Full,
        &[
            Op::float_acos,
            Op::float_asin,
            Op::float_cosh,
            Op::float_exp,
            Op::float_log,
            Op::float_log1p,
            Op::float_recip,
            Op::float_sinh,
            Op::float_tan,
            Op::float_powf,
            Op::float_powi,
            Op::float_powi_scalar,
            Op::float_powi_scalar_impl,
            Op::float_powf_scalar,
            Op::float_powf_scalar_impl,
        ],
    ),
    // prod, sum, cumsum, cumprod (and mean); gradients of weights that are computed in f32
    (
        Rule::Accumulate,
        &[
            Op::float_sum,
            Op::float_sum_dim,
            Op::float_sum_dims,
            Op::float_prod,
            Op::float_prod_dim,
            Op::float_mean,
            Op::float_mean_dim,
            Op::float_cumsum,
            Op::float_cumprod,
            Op::linear_bias_backward,
            Op::batch_norm_train_backward,
            Op::deform_conv2d_backward,
        ],
    ),
    // softmax, log_softmax, softplus; losses
    (
        Rule::Full,
        &[
            Op::softmax,
            Op::log_softmax,
            Op::softmin,
            Op::log_sigmoid,
            Op::log_sigmoid_backward,
            Op::ctc_loss,
            Op::ctc_loss_backward,
        ],
    ),
    // The maximum that softmax subtracts. It is just as exact in 16 bits, but a softmax can only be one kernel if all of it is
    // f32. In training, Burn's attention takes the one with indices, and bounds it by the lowest f32, which would be -inf there.
    (
        Rule::Full,
        &[Op::float_max_dim, Op::float_max_dim_with_indices],
    ),
    // layer_norm, native_layer_norm; batch norm
    (Rule::Full, &[Op::layer_norm, Op::batch_norm_train]),
    (Rule::FullKeep, &[Op::batch_norm]),
    // In no list of PyTorch, whose kernels use a scalar in f32 and round once.
    (
        Rule::FullKeep,
        &[
            Op::float_add_scalar,
            Op::float_sub_scalar,
            Op::float_mul_scalar,
            Op::float_div_scalar,
            Op::float_remainder_scalar,
        ],
    ),
    // In no list of PyTorch, whose kernels compute in f32. CubeCL's devices compute them by several ops.
    (
        Rule::FullKeep,
        &[
            Op::leaky_relu,
            Op::float_hypot,
            Op::float_remainder,
            Op::float_erf,
            Op::float_acosh,
            Op::float_asinh,
            Op::float_atanh,
        ],
    ),
    // In no list of PyTorch, whose kernels sum in f32.
    (
        Rule::FullKeep,
        &[
            Op::avg_pool1d,
            Op::avg_pool1d_backward,
            Op::avg_pool2d,
            Op::avg_pool2d_backward,
            Op::adaptive_avg_pool1d,
            Op::adaptive_avg_pool1d_backward,
            Op::adaptive_avg_pool2d,
            Op::adaptive_avg_pool2d_backward,
            Op::adaptive_avg_pool3d,
            Op::adaptive_avg_pool3d_backward,
        ],
    ),
    // If 16 bits round a probability to 1, its complement has no logarithm, and that has no gradient.
    (Rule::Full, &[Op::sigmoid, Op::sigmoid_backward]),
    // upsample_*; torchvision's deform_conv2d
    (
        Rule::Full,
        &[Op::interpolate, Op::interpolate_backward, Op::deform_conv2d],
    ),
    // atan2, cross, grid_sampler, index_put, scatter_add, dot
    (
        Rule::Promote,
        &[
            Op::float_atan2,
            Op::float_cross,
            Op::float_grid_sample_2d,
            Op::float_scatter,
            Op::float_scatter_nd,
            Op::float_select_assign,
        ],
    ),
    // In no list of PyTorch. They compute in the dtype of their inputs, and mixed inputs are promoted.
    (
        Rule::Promote,
        &[
            // arithmetic
            Op::float_add,
            Op::float_sub,
            Op::float_mul,
            Op::float_div,
            Op::float_neg,
            Op::float_clamp,
            Op::float_clamp_min,
            Op::float_clamp_max,
            Op::float_sqrt,
            Op::float_abs,
            Op::float_sign,
            Op::float_cos,
            Op::float_sin,
            Op::float_tanh,
            Op::float_atan,
            Op::float_round,
            Op::float_floor,
            Op::float_ceil,
            Op::float_trunc,
            // activations
            Op::relu,
            Op::relu_backward,
            Op::gelu,
            Op::gelu_backward,
            Op::hard_sigmoid,
            // shape and place
            Op::float_into_data,
            Op::float_to_device,
            Op::float_into_int,
            Op::float_cast,
            Op::float_repeat_dim,
            Op::float_transpose,
            Op::float_swap_dims,
            Op::float_permute,
            Op::float_flip,
            Op::float_reshape,
            Op::float_expand,
            Op::float_unfold,
            Op::float_pad,
            Op::float_cat,
            Op::float_gather,
            Op::float_gather_nd,
            Op::float_select,
            Op::float_slice,
            Op::float_slice_assign,
            Op::float_mask_where,
            Op::float_mask_fill,
            Op::float_mask_select,
            Op::embedding,
            Op::embedding_backward,
            Op::unfold4d,
            Op::fold4d,
            // comparison, order
            Op::float_equal,
            Op::float_not_equal,
            Op::float_equal_elem,
            Op::float_not_equal_elem,
            Op::float_greater,
            Op::float_greater_elem,
            Op::float_greater_equal,
            Op::float_greater_equal_elem,
            Op::float_lower,
            Op::float_lower_elem,
            Op::float_lower_equal,
            Op::float_lower_equal_elem,
            Op::float_is_nan,
            Op::float_is_inf,
            Op::float_any,
            Op::float_any_dim,
            Op::float_all,
            Op::float_all_dim,
            Op::float_max,
            Op::float_min,
            Op::float_min_dim,
            Op::float_min_dim_with_indices,
            Op::float_max_abs,
            Op::float_max_abs_dim,
            Op::float_argmax,
            Op::float_argmin,
            Op::float_argtopk,
            Op::float_topk,
            Op::float_topk_with_indices,
            Op::float_sort,
            Op::float_sort_with_indices,
            Op::float_argsort,
            Op::float_cummin,
            Op::float_cummax,
            // pooling
            Op::max_pool1d,
            Op::max_pool1d_with_indices,
            Op::max_pool1d_with_indices_backward,
            Op::max_pool2d,
            Op::max_pool2d_with_indices,
            Op::max_pool2d_with_indices_backward,
            // quantization
            Op::quantize,
            Op::quantize_dynamic,
        ],
    ),
];

/// Elementwise ops on two tensors whose result is stored in the wider dtype of both, although they compute in f32.
pub(super) const OF_TWO: [Op; 2] = [Op::float_hypot, Op::float_remainder];

/// Ops that compute in f32 if the low dtype is fp16, because it cannot hold their intermediate results.
pub(super) const OVERFLOWS_IN_FP16: [Op; 2] = [Op::gelu, Op::gelu_backward];

/// The f32 ops whose results the program computes with further, and which 16 bits may not hold: a power that becomes a
/// norm, an exponential or a probability that becomes a logarithm, a maximum that is -inf. A policy with low outputs keeps them in f32.
pub(super) const STAY_FULL: [Op; 16] = [
    Op::float_cosh,
    Op::float_exp,
    Op::float_log,
    Op::float_log1p,
    Op::float_recip,
    Op::float_sinh,
    Op::float_tan,
    Op::float_powf,
    Op::float_powi,
    Op::float_powi_scalar,
    Op::float_powi_scalar_impl,
    Op::float_powf_scalar,
    Op::float_powf_scalar_impl,
    Op::float_max_dim,
    Op::float_max_dim_with_indices,
    Op::sigmoid,
];

/// The rule of every op, indexed by [`Op::index`]; `None` for ops without a float input.
pub(super) const fn table() -> [Option<Rule>; Op::ALL.len()] {
    let mut table = [None; Op::ALL.len()];
    let mut group = 0;
    while group < RULES.len() {
        let (rule, ops) = RULES[group];
        let mut op = 0;
        while op < ops.len() {
            let index = ops[op].index();
            assert!(table[index].is_none(), "an op stands in the table twice");
            table[index] = Some(rule);
            op += 1;
        }
        group += 1;
    }
    table
}
