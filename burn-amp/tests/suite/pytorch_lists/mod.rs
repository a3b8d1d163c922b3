//! The table of rules against PyTorch's lists for CUDA, op by op, both ways.
//!
//! Every op of the lists is here by the ops that Burn has for it, or with what Burn makes it of, or
//! as one that Burn has not. Every op of Burn that is not simply run as it is stored is either one
//! of those, or stands in [`OWN`] with its reason.

mod listed;
mod own;

use burn_amp::{Op, Policy, Rule};
use listed::{ABSENT, MADE_OF, SAME};
use own::OWN;
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
        let lists = include_str!("../../fixtures/pytorch_autocast_lists.json");
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
