//! What holds for all programs.
//!
//! Each in a process of its own. The backward passes of other tests free what this one's programs left, on threads of theirs, and
//! Burn's client (0.22.1) may then send the drop of a tensor before its last use, which ends the device.

use super::{
    check::{check, same},
    exact::exact,
    machine::Seen,
    ops::Kind,
    precision::Precision,
    program::{EVERY_REGION, Form, Program, Region, Sizes, Step},
    train::{MARK, run},
};
use crate::suite::alone::alone;
use burn::tensor::{DType, Device};
use burn_amp::{Autocast, AutocastLease, NanGuard};
use core::cell::{Cell, RefCell};
use proptest::{prop_assert_eq, test_runner::TestCaseError};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn lease(autocast: Autocast) -> AutocastLease {
    autocast
        .lease(Device::flex())
        .expect("Flex carries autocast")
}

/// What the program sees on an autocast device of its own.
fn on(autocast: Autocast, program: &Program) -> Seen {
    run(program, &lease(autocast).device())
}

/// Whether ops reach layers as the program calls them. Their parts are rounded otherwise than on the plain device, and gradients of
/// transposed convolutions are not known by theirs.
fn ops_come_whole() -> bool {
    let whole = burn_layer::ops_come_whole();
    if !whole {
        println!("SKIPPED: with Burn's own fusion, its client sends ops in parts");
    }
    whole
}

/// Whether the gradient of the step is zeros wherever there is one. What a product makes of these is not known as a gradient.
fn has_no_slope(step: &Step) -> bool {
    matches!(step, Step::Op(op, _) if ["sign", "floor", "round", "trunc"].contains(&op.name))
}

/// Runs the body of one of these tests.
fn by_itself(test: &str, body: impl FnOnce()) {
    alone(&format!("suite::programs::properties::{test}"), body);
}

const FORM: Form = Form {
    kind: Kind::Rounded,
    sizes: Sizes::Small,
    precisions: Precision::LOW,
    regions: EVERY_REGION,
    checkpointing: true,
};

#[test]
fn o0_is_the_plain_device() {
    if !ops_come_whole() {
        return;
    }
    by_itself("o0_is_the_plain_device", || {
        let form = Form {
            precisions: &[Precision::O0],
            regions: &[Region::Full, Region::O0, Region::Named],
            ..FORM
        };
        check(50, form, |precision, program| {
            let plain = run(program, &Device::flex());
            same(&plain, &on(precision.autocast(), program))
        });
    });
}

/// With small integers, bf16 and fp16 hold every result. So they give what f32 gives, bit for bit, with gradient checkpointing and
/// without.
#[test]
fn what_16_bits_hold_is_exact() {
    by_itself("what_16_bits_hold_is_exact", || {
        let form = Form {
            kind: Kind::Exact,
            ..FORM
        };
        let [all, held] = [(); 2].map(|()| Cell::new(0));
        check(60, form, |precision, program| {
            // What a program names bf16 may be stored in f32, which is not rounded.
            let program = &program.without(|step| matches!(step, Step::InDtype(..)));
            all.update(|all| all + 1);
            let Some(expected) = exact(program) else {
                return Ok(());
            };
            held.update(|held| held + 1);
            same(&expected, &on(precision.autocast(), program))
        });
        let (all, held) = (all.get(), held.get());
        assert!(held * 4 > all, "only {held} of {all} programs are exact");
    });
}

#[test]
fn what_is_computed_again_is_the_same() {
    by_itself("what_is_computed_again_is_the_same", || {
        let form = Form {
            sizes: Sizes::Large,
            precisions: Precision::EVERY,
            ..FORM
        };
        let recomputed = Cell::new(0);
        check(40, form, |precision, program| {
            let keeps = on(precision.autocast().recompute(false), program);
            let lease = lease(precision.autocast());
            let computes_again = run(program, &lease.device());
            recomputed.update(|sum| sum + lease.report().recomputed);
            same(&keeps, &computes_again)
        });
        assert!(recomputed.get() > 0);
    });
}

/// Wherever `backward` is called. Without other threads, which are not in the region, and without other dtypes: what is elementwise
/// in backward runs by the policy, in f32 if need be.
#[test]
fn backward_of_full_precision_is_in_full_precision() {
    if !ops_come_whole() {
        return;
    }
    by_itself("backward_of_full_precision_is_in_full_precision", || {
        let form = Form {
            regions: &[Region::Full, Region::O0, Region::Named],
            checkpointing: false,
            ..FORM
        };
        check(20, form, |precision, program| {
            let elsewhere = |step: &Step| matches!(step, Step::Thread(_) | Step::InDtype(..));
            let program = Program {
                within: Region::Full,
                ..program.without(|step| elsewhere(step) || has_no_slope(step))
            };
            let plain = run(&program, &Device::flex());
            same(&plain, &on(precision.autocast(), &program))
        });
    });
}

#[test]
fn parameters_and_gradients_are_stored_in_f32() {
    if !ops_come_whole() {
        return;
    }
    by_itself("parameters_and_gradients_are_stored_in_f32", || {
        check(50, FORM, |precision, program| {
            let lease = lease(precision.autocast());
            run(&program.without(has_no_slope), &lease.device());
            let report = lease.report();
            let low = [DType::F16, DType::BF16].map(|dtype| report.runs_of(MARK, dtype));
            match low {
                [0, 0] => Ok(()),
                _ => Err(TestCaseError::fail(format!("{low:?} are stored low"))),
            }
        });
    });
}

/// The program as far as the plain device runs it: some of Burn's own ops panic for tensors without elements.
fn as_plain_runs(program: &Program) -> (Program, Seen) {
    let runs = |steps: usize| {
        let program = Program {
            steps: program.steps[..steps].to_vec(),
            ..program.clone()
        };
        let seen = catch_unwind(AssertUnwindSafe(|| run(&program, &Device::flex())));
        Some((program, seen.ok()?))
    };
    let steps = program.steps.len();
    let longest = (0..=steps).rev().find_map(runs);
    longest.expect("a program without steps runs")
}

#[test]
fn empty_tensors_are_as_on_the_plain_device() {
    if !ops_come_whole() {
        return;
    }
    by_itself("empty_tensors_are_as_on_the_plain_device", || {
        let form = Form {
            sizes: Sizes::Empty,
            precisions: &[Precision::O0],
            regions: &[Region::Full, Region::O0, Region::Named],
            ..FORM
        };
        let [all, run] = [(); 2].map(|()| Cell::new(0));
        check(40, form, |precision, program| {
            all.update(|all| all + program.steps.len());
            let (program, plain) = as_plain_runs(program);
            run.update(|run| run + program.steps.len());
            same(&plain, &on(precision.autocast(), &program))
        });
        let (all, run) = (all.get(), run.get());
        assert!(run * 2 > all, "only {run} of {all} steps run");
    });
}

/// Dtypes and shapes are those of the plain device, and nothing panics.
#[test]
fn empty_tensors_run_in_every_precision() {
    by_itself("empty_tensors_run_in_every_precision", || {
        let form = Form {
            sizes: Sizes::Empty,
            precisions: Precision::EVERY,
            ..FORM
        };
        check(40, form, |precision, program| {
            let (program, plain) = as_plain_runs(program);
            let found = on(precision.autocast(), &program);
            let shapes = |seen: &Seen| -> Vec<_> {
                seen.forms
                    .iter()
                    .map(|(name, _, dims)| (*name, dims.clone()))
                    .collect()
            };
            prop_assert_eq!(shapes(&plain), shapes(&found));
            prop_assert_eq!(plain.data.len(), found.data.len());
            Ok(())
        });
    });
}

#[test]
fn a_guard_changes_nothing() {
    by_itself("a_guard_changes_nothing", || {
        check(20, FORM, |precision, program| {
            let guarded = precision.autocast().nan_guard(&NanGuard::new());
            same(&on(precision.autocast(), program), &on(guarded, program))
        });
    });
}

/// One after the other.
#[test]
fn programs_on_one_device_do_not_disturb_each_other() {
    by_itself("programs_on_one_device_do_not_disturb_each_other", || {
        let form = Form {
            precisions: &[Precision::Bf16],
            ..FORM
        };
        let before = RefCell::new(None);
        check(20, form, |precision, program| {
            let alone = |program: &Program| on(precision.autocast(), program);
            let Some(other) = before.replace(Some(program.clone())) else {
                return Ok(());
            };
            let lease = lease(precision.autocast());
            let device = lease.device();
            let seen = [&other, program, &other].map(|program| run(program, &device));
            let [first, then, after] = seen;
            same(&alone(program), &then)?;
            same(&alone(&other), &first)?;
            same(&alone(&other), &after)
        });
    });
}

/// A device lives with its threads until its last tensor is dropped, so tensors that were left would be seen. In a process of its
/// own, where no other test makes devices.
#[cfg(target_os = "linux")]
#[test]
fn programs_leave_no_tensors() {
    by_itself("programs_leave_no_tensors", || {
        let threads = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let threads = status
                .lines()
                .find_map(|line| line.strip_prefix("Threads:"));
            threads.unwrap().trim().parse::<usize>().unwrap()
        };
        let form = Form {
            sizes: Sizes::Large,
            precisions: Precision::EVERY,
            ..FORM
        };
        let train = |programs| {
            check(programs, form, |precision, program| {
                drop(on(precision.autocast(), program));
                Ok(())
            });
            threads()
        };
        let few = train(10);
        let many = train(40);
        // Each device has two.
        assert!(many < few + 10, "{few}, then {many}");
    });
}
