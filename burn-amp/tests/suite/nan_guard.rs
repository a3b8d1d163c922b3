//! What the NaN guard finds, and what it does not take for a find.

use super::devices::cube_devices;
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor, activation, ops::PadMode};
use burn_amp::{Autocast, AutocastLease, NanGuard, Op, Policy, Rule, named};

fn guarded(autocast: Autocast) -> (NanGuard, AutocastLease) {
    let guard = NanGuard::new();
    let lease = autocast.nan_guard(&guard).lease(Device::flex()).unwrap();
    (guard, lease)
}

#[test]
fn it_names_the_first_op_that_overflowed_in_fp16() {
    let (guard, lease) = guarded(Autocast::fp16());
    let device = lease.device();
    let x = Tensor::<2>::full([2, 3], 300.0, &device);
    let square = named("block", || {
        named("attention", || x.clone().matmul(x.transpose()))
    });
    // 3 * 300^2 is more than fp16 holds; what comes of the infinity is no find of its own.
    (square.clone() - square).log().into_data();
    let found = guard.first().unwrap();
    assert_eq!(
        (found.op, found.nan, found.dtype),
        (Op::float_matmul, false, DType::F16)
    );
    assert_eq!(found.shape, Shape::from([2, 2]));
    assert_eq!(found.inputs, [Shape::from([2, 3]), Shape::from([3, 2])]);
    assert_eq!(found.path, ["block", "attention"]);
    let text = found.to_string();
    assert!(
        text.contains("float_matmul in F16 made an infinity"),
        "{text}"
    );
    assert!(text.contains("in block.attention"), "{text}");
}

/// 1e5 is no fp16 number: a product of it overflows in the cast before it.
#[test]
fn it_names_the_op_whose_cast_overflowed() {
    let (guard, lease) = guarded(Autocast::fp16());
    let device = lease.device();
    let x = Tensor::<2>::full([2, 2], 1e5, &device);
    x.matmul(Tensor::eye(2, &device)).exp().into_data();
    let found = guard.first().unwrap();
    assert_eq!((found.op, found.dtype), (Op::float_matmul, DType::F16));
}

/// A power that is computed in f32 and stored in fp16, which holds nothing above 65504.
#[test]
fn it_names_the_op_that_was_stored_as_an_infinity() {
    let policy = Policy::builder(FloatDType::F16).rule(Op::float_powi_scalar, Rule::FullKeep);
    let (guard, lease) = guarded(Autocast::new(policy.build()));
    let device = lease.device();
    let low = Tensor::<2>::full([2, 2], 300.0, &device).matmul(Tensor::eye(2, &device));
    low.powi_scalar(2).add_scalar(1.0).into_data();
    let found = guard.first().unwrap();
    assert_eq!(
        (found.nan, found.dtype, found.stored),
        (false, DType::F32, DType::F16),
        "{found}"
    );
    let text = found.to_string();
    assert!(
        text.contains("in F32, stored in F16, made an infinity"),
        "{text}"
    );
}

/// The derivative of a square root is infinite at 0, where the square root itself is finite.
#[test]
fn it_looks_at_backward() {
    let (guard, lease) = guarded(Autocast::bf16());
    let device = lease.device().autodiff();
    let x = Tensor::<1>::from_floats([0.0, 4.0], &device).require_grad();
    let loss = named("loss", || x.clone().sqrt().sum());
    device.sync().unwrap();
    assert_eq!(guard.first(), None);
    let grads = named("backward", || loss.backward());
    x.grad(&grads).unwrap().into_data();
    let found = guard.first().unwrap();
    assert!(!found.nan, "{found}");
    assert_eq!(found.path, ["backward"]);
}

#[test]
fn infinities_of_the_program_are_no_find() {
    let (guard, lease) = guarded(Autocast::bf16());
    let device = lease.device();
    let scores = Tensor::<2>::ones([2, 2], &device);
    let mask = Tensor::<2>::from_floats([[0.0, f32::NEG_INFINITY], [0.0, 0.0]], &device);
    let masked = scores.mask_fill(mask.clone().lower_elem(0.0), f32::NEG_INFINITY) + mask;
    activation::softmax(masked, 1).into_data();
    // Asymmetric padding of a max pool, in evaluation, is this op too.
    let x = Tensor::<2>::ones([2, 2], &device);
    x.pad([(0, 1), (1, 0)], PadMode::Constant(f32::NEG_INFINITY))
        .into_data();
    assert_eq!(guard.first(), None);
    // A NaN in the data is.
    Tensor::<1>::from_floats([f32::NAN], &device).into_data();
    assert_eq!(guard.first().unwrap().op, Op::float_from_data);
}

/// Of a row that is masked altogether, the softmax subtracts -inf from -inf.
#[test]
fn a_nan_of_infinities_is_a_find() {
    let (guard, lease) = guarded(Autocast::bf16());
    let device = lease.device();
    let scores = Tensor::<2>::ones([2, 2], &device);
    let mask = Tensor::<2>::from_floats([[1.0, 1.0], [0.0, 1.0]], &device);
    let masked = scores.mask_fill(mask.greater_elem(0.5), f32::NEG_INFINITY);
    let masked = masked.clone() - masked.max_dim(1);
    masked.exp().into_data();
    let found = guard.first().unwrap();
    assert_eq!(
        (found.op, found.nan, found.of_finite),
        (Op::float_sub, true, false)
    );
    let text = found.to_string();
    assert!(text.contains("made a NaN of infinities"), "{text}");
}

/// Burn's GRU, LSTM and RNN begin with memory that may hold anything.
#[test]
fn memory_without_a_value_is_no_find() {
    for plain in cube_devices() {
        let guard = NanGuard::new();
        let device = guard.device(plain.clone()).unwrap();
        // What it held before, where the device gives it out again.
        let values = Tensor::<1>::full([99_991], f32::NAN, &plain);
        values.clone().into_data();
        drop(values);
        plain.sync().unwrap();
        let empty = Tensor::<1>::empty([99_991], &device);
        empty.into_data();
        assert_eq!(guard.first(), None, "{plain:?}");
    }
}

#[test]
fn it_pauses_resumes_and_forgets() {
    let (guard, lease) = guarded(Autocast::bf16());
    let device = lease.device();
    let overflow = |x: f32| Tensor::<1>::from_floats([x], &device).exp().into_data();
    guard.pause();
    overflow(1000.0);
    assert_eq!(guard.first(), None);
    guard.resume();
    overflow(1000.0);
    let first = guard.first().unwrap();
    overflow(2000.0);
    assert_eq!(guard.first().as_ref(), Some(&first));
    guard.reset();
    assert_eq!(guard.first(), None);
    overflow(2000.0);
    assert!(guard.first().unwrap().ops > first.ops);
}

#[test]
fn it_guards_plain_devices() {
    let guard = NanGuard::new();
    let device = guard.device(Device::flex()).unwrap();
    let zero = Tensor::<1>::zeros([1], &device);
    (zero.clone() / zero).into_data();
    let found = guard.first().unwrap();
    assert_eq!((found.op, found.nan), (Op::float_div, true));
}
