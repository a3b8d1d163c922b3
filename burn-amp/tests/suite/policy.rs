//! The table of rules, against Burn's ops and PyTorch's lists.

use burn::tensor::FloatDType;
use burn_amp::{Op, Policy, Rule};

#[test]
fn every_float_op_has_a_rule_and_no_other_op() {
    for op in Op::ALL {
        assert_eq!(
            Policy::bf16().rule(*op).is_some(),
            op.takes_float(),
            "{op}: every op that takes a float tensor needs a rule in burn-amp's table"
        );
    }
}

#[test]
fn presets_are_apexs() {
    assert_eq!(Policy::o1().low_dtype(), FloatDType::F16);
    assert!(!Policy::o1().low_outputs() && Policy::o2().low_outputs());
    assert_eq!(Policy::o2().rule(Op::softmax), Some(Rule::Full));
    assert_eq!(Policy::o3().rule(Op::softmax), Some(Rule::FullKeep));
    // Gradients of parameters are f32.
    let backward = Policy::o3().rule(Op::deform_conv2d_backward);
    assert_eq!(backward, Some(Rule::Accumulate));
    assert_eq!(Policy::default(), Policy::o0());
    for name in ["bf16", "fp16", "O0", "O1", "O2", "O3"] {
        assert_eq!(Policy::from_name(name).unwrap().name(), name);
    }
}

#[test]
fn a_policy_survives_writing() {
    let custom = Policy::builder(FloatDType::BF16)
        .name("mine")
        .rule(Op::float_exp, Rule::Promote)
        .low_outputs(true)
        .build();
    for policy in [custom, Policy::bf16(), Policy::o0(), Policy::o3()] {
        let written = serde_json::to_string(&policy).unwrap();
        assert_eq!(
            serde_json::from_str::<Policy>(&written).unwrap(),
            policy,
            "{written}"
        );
    }
    let unknown = r#"{"name":"x","low":"BF16","rules":{"float_expp":"full"}}"#;
    let error = serde_json::from_str::<Policy>(unknown)
        .unwrap_err()
        .to_string();
    assert!(error.contains("float_expp"), "{error}");
}

/// PyTorch's backward runs in the dtype of its forward.
#[test]
fn a_rule_covers_the_backward_of_its_op() {
    let builder = || Policy::builder(FloatDType::BF16).rule(Op::conv2d, Rule::Full);
    let policy = builder().build();
    let rules = Op::conv2d.backward().map(|op| policy.rule(op).unwrap());
    let full = [Rule::Full, Rule::Accumulate, Rule::Accumulate];
    assert_eq!(rules.collect::<Vec<_>>(), full);
    // Back to low, weights' gradients are stored in f32 as before.
    let back = builder().rule(Op::conv2d, Rule::Lower).name("bf16").build();
    assert_eq!(back, Policy::bf16());
    // What is said of one alone holds, and is written.
    let alone = builder().rule(Op::conv2d_x_backward, Rule::Lower).build();
    assert_eq!(alone.rule(Op::conv2d_x_backward), Some(Rule::Lower));
    assert_eq!(
        alone.rule(Op::conv2d_weight_backward),
        Some(Rule::Accumulate)
    );
    for policy in [policy, alone] {
        let written = serde_json::to_string(&policy).unwrap();
        let read: Policy = serde_json::from_str(&written).unwrap();
        assert_eq!(read, policy, "{written}");
    }
    let by_hand = r#"{"name":"custom","low":"BF16","rules":{"conv2d":"full"}}"#;
    let read: Policy = serde_json::from_str(by_hand).unwrap();
    assert_eq!(read, builder().build());
}

#[test]
fn a_policy_prints_its_table() {
    let printed = Policy::bf16().to_string();
    let line = |name: &str| printed.lines().find(|line| line.trim().starts_with(name));
    assert!(line("softmax").unwrap().ends_with("full"), "{printed}");
    assert!(line("conv2d ").unwrap().ends_with("lower"));
}

#[test]
fn a_policy_shows_what_differs_from_the_table() {
    let shown = |policy: Policy| format!("{policy:?}");
    let plain = shown(Policy::bf16());
    assert!(
        plain.contains(r#"name: "bf16""#) && plain.contains("rules: {}"),
        "{plain}"
    );
    let policy = Policy::builder(FloatDType::BF16).rule(Op::softmax, Rule::Promote);
    let changed = shown(policy.build());
    assert!(
        changed.contains(r#"rules: {"softmax": Promote}"#),
        "{changed}"
    );
}

#[test]
#[should_panic(expected = "takes no float tensor")]
fn a_rule_for_an_int_op_is_refused() {
    let _ = Policy::builder(FloatDType::BF16).rule(Op::int_add, Rule::Lower);
}
