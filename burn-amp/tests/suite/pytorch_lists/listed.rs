//! The ops of PyTorch's lists.

use burn_amp::Op;

const CONVOLUTIONS: &[Op] = &[
    Op::conv1d,
    Op::conv2d,
    Op::conv3d,
    Op::conv_transpose1d,
    Op::conv_transpose2d,
    Op::conv_transpose3d,
];
/// The exponents 2 and -2 Burn sends as a product of a tensor with itself, which runs as a power.
const POWERS: &[Op] = &[
    Op::float_powf,
    Op::float_powi,
    Op::float_powi_scalar,
    Op::float_powi_scalar_impl,
    Op::float_powf_scalar,
    Op::float_powf_scalar_impl,
];

/// PyTorch's ops that are ops of Burn.
pub(super) const SAME: &[(&str, &[Op])] = &[
    ("_convolution", CONVOLUTIONS),
    ("convolution", CONVOLUTIONS),
    ("cudnn_convolution", CONVOLUTIONS),
    ("cudnn_convolution_transpose", CONVOLUTIONS),
    ("conv1d", &[Op::conv1d]),
    ("conv2d", &[Op::conv2d]),
    ("conv3d", &[Op::conv3d]),
    ("conv_transpose1d", &[Op::conv_transpose1d]),
    ("conv_transpose2d", &[Op::conv_transpose2d]),
    ("conv_transpose3d", &[Op::conv_transpose3d]),
    ("prelu", &[Op::prelu]),
    ("matmul", &[Op::float_matmul]),
    ("mm", &[Op::float_matmul]),
    ("mv", &[Op::float_matmul]),
    ("bmm", &[Op::float_matmul]),
    ("linear", &[Op::linear]),
    ("scaled_dot_product_attention", &[Op::attention]),
    ("_scaled_dot_product_flash_attention", &[Op::attention]),
    ("acos", &[Op::float_acos]),
    ("asin", &[Op::float_asin]),
    ("cosh", &[Op::float_cosh]),
    ("exp", &[Op::float_exp]),
    ("log", &[Op::float_log]),
    ("log1p", &[Op::float_log1p]),
    ("reciprocal", &[Op::float_recip]),
    ("sinh", &[Op::float_sinh]),
    ("tan", &[Op::float_tan]),
    ("pow", POWERS),
    ("layer_norm", &[Op::layer_norm]),
    ("native_layer_norm", &[Op::layer_norm]),
    ("upsample_nearest1d", &[Op::interpolate]),
    ("_upsample_nearest_exact1d", &[Op::interpolate]),
    ("upsample_nearest2d", &[Op::interpolate]),
    ("_upsample_nearest_exact2d", &[Op::interpolate]),
    ("upsample_linear1d", &[Op::interpolate]),
    ("upsample_bilinear2d", &[Op::interpolate]),
    ("upsample_bicubic2d", &[Op::interpolate]),
    ("prod", &[Op::float_prod, Op::float_prod_dim]),
    ("softmax", &[Op::softmax]),
    ("log_softmax", &[Op::log_softmax]),
    ("cumprod", &[Op::float_cumprod]),
    ("cumsum", &[Op::float_cumsum]),
    (
        "sum",
        &[Op::float_sum, Op::float_sum_dim, Op::float_sum_dims],
    ),
    ("atan2", &[Op::float_atan2]),
    ("cross", &[Op::float_cross]),
    ("grid_sampler", &[Op::float_grid_sample_2d]),
    (
        "index_put",
        &[
            Op::float_scatter_nd,
            Op::float_select_assign,
            Op::float_slice_assign,
        ],
    ),
    ("scatter_add", &[Op::float_scatter]),
];

/// PyTorch's ops that are functions or modules of Burn, made of these ops. The device sees those and
/// applies their rules, so that the differences of a loss between two tensors that are stored low,
/// which PyTorch takes in f32, are taken low here; a target that comes from outside is f32.
pub(super) const MADE_OF: &[(&str, &[Op])] = &[
    ("einsum", &[Op::float_matmul]),
    // Gates are sigmoids, which have a rule of their own.
    ("_thnn_fused_lstm_cell", &[Op::linear, Op::float_tanh]),
    ("_thnn_fused_gru_cell", &[Op::linear, Op::float_tanh]),
    ("_cudnn_rnn", &[Op::linear, Op::float_tanh]),
    ("lstm_cell", &[Op::linear, Op::float_tanh]),
    ("gru_cell", &[Op::linear, Op::float_tanh]),
    ("rnn_tanh_cell", &[Op::linear, Op::float_tanh]),
    ("rnn_relu_cell", &[Op::linear, Op::relu]),
    ("softplus", &[Op::float_exp, Op::float_log1p]),
    (
        "rms_norm",
        &[Op::float_mean_dim, Op::float_sqrt, Op::float_div],
    ),
    (
        "group_norm",
        &[Op::float_mean_dim, Op::float_sqrt, Op::float_div],
    ),
    (
        "linalg_vector_norm",
        &[Op::float_powf_scalar, Op::float_sum_dims],
    ),
    ("norm", &[Op::float_powf_scalar, Op::float_sum_dims]),
    (
        "cosine_similarity",
        &[Op::float_sum_dims, Op::float_sqrt, Op::float_div],
    ),
    ("dist", &[Op::float_sub, Op::float_sum_dims, Op::float_sqrt]),
    (
        "poisson_nll_loss",
        &[Op::float_exp, Op::float_mul, Op::float_mean],
    ),
    (
        "cosine_embedding_loss",
        &[Op::float_sum_dims, Op::float_div, Op::float_mean],
    ),
    ("nll_loss", &[Op::float_gather, Op::float_mean]),
    (
        "hinge_embedding_loss",
        &[Op::float_clamp_min, Op::float_mean],
    ),
    ("kl_div", &[Op::float_log, Op::float_mul, Op::float_sum]),
    ("l1_loss", &[Op::float_sub, Op::float_abs, Op::float_mean]),
    (
        "smooth_l1_loss",
        &[Op::float_sub, Op::float_abs, Op::float_mean],
    ),
    (
        "huber_loss",
        &[Op::float_sub, Op::float_abs, Op::float_mean],
    ),
    ("mse_loss", &[Op::float_sub, Op::float_mul, Op::float_mean]),
    (
        "margin_ranking_loss",
        &[Op::float_sub, Op::relu, Op::float_mean],
    ),
    (
        "soft_margin_loss",
        &[Op::float_exp, Op::float_log1p, Op::float_mean],
    ),
    (
        "triplet_margin_loss",
        &[Op::float_sub, Op::float_sum_dims, Op::float_mean],
    ),
    (
        "multi_margin_loss",
        &[Op::float_clamp_min, Op::float_sum_dim, Op::float_mean],
    ),
    (
        "binary_cross_entropy_with_logits",
        &[Op::log_sigmoid, Op::float_mean],
    ),
    // Banned by PyTorch, whose probabilities are stored low. Those of a sigmoid are not here.
    (
        "binary_cross_entropy",
        &[Op::float_log, Op::float_log1p, Op::float_mean],
    ),
    // Burn multiplies and sums, the latter in f32, whatever the inputs are stored in.
    ("dot", &[Op::float_mul, Op::float_sum]),
];

/// PyTorch's ops that Burn 0.22 has neither as an op nor as a function: a program that writes them
/// out gets the rules of the ops that it writes.
pub(super) const ABSENT: &[&str] = &[
    "conv_tbc",
    "addmm",
    "addmv",
    "addr",
    "addbmm",
    "baddbmm",
    "chain_matmul",
    "linalg_multi_dot",
    "linalg_vecdot",
    "erfinv",
    "expm1",
    "log10",
    "log2",
    "rsqrt",
    "frobenius_norm",
    "nuclear_norm",
    "linalg_matrix_norm",
    "linalg_matrix_sqrth",
    "nll_loss2d",
    "multilabel_margin_loss",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "_upsample_bicubic2d_aa",
    "addcdiv",
    "addcmul",
    "bilinear",
    "vdot",
    "tensordot",
];
