//! The table of rules against PyTorch's lists for CUDA, op by op, both ways.
//!
//! Every op of the lists is here by the ops that Burn has for it, or with what Burn makes it of, or
//! as one that Burn has not. Every op of Burn that is not simply run as it is stored is either one
//! of those, or stands in [`OWN`] with its reason.

use burn_amp::{Op, Policy, Rule};
use serde::Deserialize;
use std::collections::BTreeSet;

#[derive(Deserialize)]
struct Lists {
    lower_precision_fp: Vec<String>,
    fp32: Vec<String>,
    fp32_set_opt_dtype: Vec<String>,
    fp32_append_dtype: Vec<String>,
    promote: Vec<String>,
    banned: Vec<String>,
}

impl Lists {
    fn read() -> Self {
        let lists = include_str!("../fixtures/pytorch_autocast_lists.json");
        serde_json::from_str(lists).unwrap()
    }

    /// Every op, with what its list means here.
    fn ops(&self) -> impl Iterator<Item = (&str, Precision)> {
        let lists = [
            (&self.lower_precision_fp, Precision::Low),
            (&self.fp32, Precision::Full),
            (&self.fp32_set_opt_dtype, Precision::Full),
            (&self.fp32_append_dtype, Precision::Full),
            (&self.promote, Precision::Widest),
            (&self.banned, Precision::Banned),
        ];
        let ops = lists.into_iter().flat_map(|(names, precision)| {
            names.iter().map(move |name| (name.as_str(), precision))
        });
        ops.collect::<Vec<_>>().into_iter()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Precision {
    Low,
    Full,
    Widest,
    Banned,
}

impl Precision {
    fn of(rule: Rule) -> Self {
        match rule {
            Rule::Lower | Rule::WeightGrad => Self::Low,
            Rule::Full | Rule::Accumulate | Rule::FullKeep => Self::Full,
            Rule::Promote => Self::Widest,
        }
    }
}

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
const SAME: &[(&str, &[Op])] = &[
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
const MADE_OF: &[(&str, &[Op])] = &[
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
const ABSENT: &[&str] = &[
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

/// Burn's forward ops that do not run as they are stored and are in no list of PyTorch's.
const OWN: &[(Op, Precision, &str)] = &[
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

/// Gradients that are sums run in f32, whatever their forward.
const SUMS_OF_GRADIENTS: &[Op] = &[Op::linear_bias_backward];

/// In f32 inside as PyTorch's kernel where the low dtype is fp16, which has no cube of 41; in bf16 as stored.
const FULL_IN_FP16: [Op; 2] = [Op::gelu, Op::gelu_backward];

fn precision(op: Op) -> Precision {
    let [bf16, fp16] = [Policy::bf16(), Policy::fp16()].map(|policy| policy.rule(op).unwrap());
    match FULL_IN_FP16.contains(&op) {
        true => assert_eq!((bf16, fp16), (Rule::Promote, Rule::FullKeep), "{op}"),
        false => assert_eq!(bf16, fp16, "{op}: both lists are one"),
    }
    Precision::of(bf16)
}

#[test]
fn every_op_of_pytorchs_lists_is_accounted_for_once() {
    let lists = Lists::read();
    let theirs: Vec<_> = lists.ops().map(|(name, _)| name).collect();
    let mut ours: Vec<_> = SAME.iter().map(|(name, _)| *name).collect();
    ours.extend(MADE_OF.iter().map(|(name, _)| *name));
    ours.extend(ABSENT);
    let unique: BTreeSet<_> = ours.iter().copied().collect();
    assert_eq!(unique.len(), ours.len(), "an op stands here twice");
    assert_eq!(
        unique,
        theirs.into_iter().collect(),
        "left: here, right: PyTorch's"
    );
}

#[test]
fn the_rules_are_pytorchs() {
    let lists = Lists::read();
    for (name, expected) in lists.ops() {
        let ops = SAME.iter().find(|(same, _)| *same == name);
        for op in ops.map_or(&[][..], |(_, ops)| *ops) {
            assert_eq!(precision(*op), expected, "{op}, which is PyTorch's {name}");
        }
    }
}

/// Where Burn makes an op of others, the part that decides about its precision has the op's: a
/// product is low, and exponentials, logarithms and sums are f32.
#[test]
fn what_is_made_of_others_has_their_precision() {
    let lists = Lists::read();
    for (name, parts) in MADE_OF {
        let (_, listed) = lists.ops().find(|(op, _)| op == name).unwrap();
        let precisions: Vec<_> = parts.iter().map(|part| precision(*part)).collect();
        let (decides, never) = match listed {
            Precision::Low => (Precision::Low, Precision::Full),
            _ => (Precision::Full, Precision::Low),
        };
        assert!(precisions.contains(&decides), "{name}: {precisions:?}");
        assert!(!precisions.contains(&never), "{name}: {precisions:?}");
    }
}

#[test]
fn every_other_rule_has_its_reason() {
    let same: BTreeSet<_> = SAME
        .iter()
        .flat_map(|(_, ops)| ops.iter().map(|op| op.name()))
        .collect();
    let own: BTreeSet<_> = OWN.iter().map(|(op, _, _)| op.name()).collect();
    assert!(same.is_disjoint(&own));
    for (op, expected, why) in OWN {
        assert_eq!(precision(*op), *expected, "{op}: {why}");
    }
    for op in Op::ALL.iter().filter(|op| op.takes_float()) {
        if op.name().ends_with("_backward") {
            continue;
        }
        let listed = same.contains(op.name()) || own.contains(op.name());
        assert!(
            listed || precision(*op) == Precision::Widest,
            "{op} is in no list of PyTorch's: say why it does not run as it is stored"
        );
    }
}

/// PyTorch's backward runs in the dtype of its forward.
#[test]
fn backward_ops_run_as_their_forward() {
    let mut seen = 0;
    for op in Op::ALL.iter().filter(|op| op.takes_float()) {
        let Some(forward) = op.name().strip_suffix("_backward") else {
            continue;
        };
        let operands = ["_x", "_weight", "_bias"];
        let forward = operands
            .iter()
            .find_map(|operand| forward.strip_suffix(operand))
            .unwrap_or(forward);
        let forward = Op::from_name(forward).unwrap_or_else(|| panic!("{op}"));
        let expected = match SUMS_OF_GRADIENTS.contains(op) {
            true => Precision::Full,
            false => precision(forward),
        };
        assert_eq!(precision(*op), expected, "{op}");
        seen += 1;
    }
    assert!(seen > 30, "{seen} backward ops");
}
