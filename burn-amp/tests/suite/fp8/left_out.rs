//! What is not in fp8: layers that a filter keeps out, regions, wide floats, and products that are no layer's.

use burn::tensor::{DType, Device};
use burn_amp::{
    Autocast, Fp8Filter, Policy, autocast, full_precision, named, recipe::CurrentScaling,
};

use super::{fp8, linear, values, wave};

#[test]
fn a_filter_keeps_layers_out_forward_and_backward() {
    let run = |filter: Fp8Filter, size: [usize; 2], name: &str| {
        let autocast = Autocast::fp8(CurrentScaling::new())
            .unwrap()
            .fp8_filter(filter);
        let device = autocast.lease(Device::flex()).unwrap();
        let on = device.device().autodiff();
        let linear = linear(size, &on);
        let x = wave([4, size[0]], 0.4, &on).require_grad();
        let output = named("model", || named(name, || linear.forward(x)));
        let gradients = output.sum().backward();
        values(linear.weight.grad(&gradients).unwrap());
        device.device().sync().unwrap();
        let runs = device.report().fp8_runs();
        assert!(runs == 0 || runs == 3, "{runs}");
        runs == 3
    };
    let all = Fp8Filter::new();
    assert!(run(all.clone(), [32, 16], "hidden"));
    assert!(!run(all.clone(), [32, 10], "head"));
    assert!(!run(all.clone(), [24, 16], "hidden"));
    assert!(run(all.clone().multiple_of(2), [32, 10], "head"));
    assert!(!run(all.clone().min_size([33, 1]), [32, 16], "hidden"));
    assert!(!run(all.clone().min_size([1, 17]), [32, 16], "hidden"));
    assert!(!run(all.clone().except_up_to([32, 16]), [32, 16], "hidden"));
    assert!(run(all.clone().except_up_to([31, 99]), [32, 16], "hidden"));
    assert!(run(all.clone().except_up_to([99, 15]), [32, 16], "hidden"));
    assert!(!run(all.clone().except_size([32, 16]), [32, 16], "hidden"));
    assert!(run(all.clone().except_size([16, 32]), [32, 16], "hidden"));
    assert!(!run(all.clone().except_name("model"), [32, 16], "hidden"));
    assert!(!run(all.clone().except_name("hidden"), [32, 16], "hidden"));
    assert!(run(all.clone().except_name("head"), [32, 16], "hidden"));

    let filter = all
        .min_size([2, 3])
        .except_up_to([4, 4])
        .except_size([4, 5]);
    let filter = filter.except_name("head");
    let written = serde_json::to_string(&filter).unwrap();
    assert_eq!(serde_json::from_str::<Fp8Filter>(&written).unwrap(), filter);
    assert!(filter.takes([16, 16], ["body"]) && !filter.takes([16, 16], ["body", "head"]));
}

#[test]
fn a_multiple_of_nothing_is_not_read() {
    let written = serde_json::to_string(&Fp8Filter::new()).unwrap();
    let zero = written.replace("\"multiple_of\":16", "\"multiple_of\":0");
    assert_ne!(zero, written);
    assert!(serde_json::from_str::<Fp8Filter>(&zero).is_err());
}

#[test]
#[should_panic(expected = "multiple of 0")]
fn a_multiple_of_nothing_is_refused() {
    let _ = Fp8Filter::new().multiple_of(0);
}

/// Regions decide for what they hold, its backward too; 64-bit floats are left alone.
#[test]
fn regions_and_wide_floats_are_not_in_fp8() {
    let device = fp8(CurrentScaling::new(), Device::flex());
    let on = device.device().autodiff();
    let run = || {
        let (linear, x) = (linear([16, 16], &on), wave([2, 3, 16], 0.4, &on));
        let gradients = linear.forward(x.require_grad()).sum().backward();
        values(linear.weight.grad(&gradients).unwrap());
    };
    full_precision(run);
    autocast(&Policy::bf16(), run);
    assert_eq!(device.report().fp8_runs(), 0);
    let wide = wave([4, 16], 0.4, &device.device()).cast(DType::F64);
    let weight = wave([16, 16], 0.7, &device.device()).cast(DType::F64);
    burn::tensor::module::linear(wide, weight, None).into_data();
    assert_eq!(device.report().fp8_runs(), 0);
    // Nor is the product by a batch.
    let scores = wave([2, 16, 16], 0.1, &device.device());
    scores.clone().matmul(scores.transpose()).into_data();
    assert_eq!(device.report().fp8_runs(), 0);
    // Nor are the products of a matrix by itself, as in Muon's Newton-Schulz.
    let matrix = wave([16, 16], 0.1, &device.device());
    matrix
        .clone()
        .matmul(matrix.clone().transpose())
        .into_data();
    matrix
        .clone()
        .transpose()
        .matmul(matrix.clone())
        .into_data();
    matrix.clone().matmul(matrix).into_data();
    assert_eq!(device.report().fp8_runs(), 0);
    // Not even where the left one was a layer's input: its size is another.
    let tokens = wave([2, 32, 16], 0.1, &device.device());
    let linear = linear([16, 16], &device.device());
    let projected = linear.forward(tokens.clone());
    device.device().sync().unwrap();
    let before = device.report().fp8_runs();
    assert_eq!(before, 1);
    let mixed = tokens.transpose().matmul(projected.repeat_dim(2, 2));
    assert_eq!(mixed.dims(), [2, 16, 32]);
    mixed.into_data();
    assert_eq!(device.report().fp8_runs(), before);
    run();
    assert_eq!(device.report().fp8_runs(), before + 3);
}
