//! Random training after backward and during it: averages are those of all gradients, and ranks stay equal to the bit.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::tensor::FloatDType;
use burn_ddp::{DdpError, ProcessGroup};
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};

use super::{
    config,
    training::{Hook, Seen, Training, train, trainings},
    watched,
};
use crate::suite::ranks::{all_succeed, locally, over_tcp};

/// Checks what all ranks have seen.
fn check(training: &Training, ranks: &[Vec<Seen>]) {
    assert_eq!(ranks.len(), training.ranks);
    for (number, step) in training.steps.iter().enumerate() {
        let seen: Vec<&Seen> = ranks.iter().map(|rank| &rank[number]).collect();
        let active = (0..training.ranks)
            .filter(|rank| step.has >> rank & 1 == 1)
            .count();
        for (rank, of_rank) in seen.iter().enumerate() {
            let first = seen[0];
            let whom = format!("step {number}, rank {rank}");
            assert_eq!(of_rank.active, active, "{whom}");
            assert_eq!(of_rank.averages, first.averages, "averages: {whom}");
            assert_eq!(of_rank.norm, first.norm, "norm: {whom}");
            assert_eq!(of_rank.clipped, first.clipped, "clipped: {whom}");
            assert_eq!(of_rank.parameters, first.parameters, "parameters: {whom}");
        }
        if active == 0 {
            continue;
        }
        let whole: f64 = match (training.hook, training.divide_by_all) {
            (Hook::Sum, true) => 1.0,
            (Hook::Sum, false) => active as f64 / training.ranks as f64,
            (_, true) => training.ranks as f64,
            (_, false) => active as f64,
        };
        let mut squares = 0.0;
        for (place, slot) in training.slots.iter().enumerate() {
            let parts: Vec<&Vec<f64>> = seen
                .iter()
                .filter_map(|it| it.own[place].as_ref())
                .collect();
            let found = &seen[0].averages[place];
            let what = format!("step {number}, parameter {place}");
            let Some(found) = found else {
                assert!(parts.is_empty(), "{what}: nothing");
                continue;
            };
            if parts.is_empty() {
                // Ranks do not tell each other again that the only ones to have it are without a batch.
                assert!(training.static_graph && training.join, "{what}: {found:?}");
            }
            assert!(!slot.frozen, "{what}");
            assert_eq!(found.len(), slot.shape[0] * slot.shape[1], "{what}");
            let tolerance = tolerance(slot.dtype, training.hook);
            // In 16 bits, passes may cancel out after each was rounded.
            let least = if tolerance > 1e-4 { 1.0 } else { 0.1 };
            for (index, found) in found.iter().enumerate() {
                let sum: f64 = parts.iter().map(|part| part[index]).sum();
                let scale: f64 = parts.iter().map(|part| part[index].abs()).sum();
                let near = tolerance * scale.max(least) / whole;
                let expected = sum / whole;
                assert!(
                    (found - expected).abs() <= near,
                    "{what}: {found} for {expected}"
                );
                if slot.tied.is_none() {
                    squares += expected * expected;
                }
            }
        }
        if let Some((max_norm, norm)) = training.max_norm.zip(seen[0].norm) {
            assert!(
                (norm - squares.sqrt()).abs() <= 2e-2 * norm.max(0.1),
                "norm {norm}, step {number}"
            );
            let factor = (max_norm / norm).min(1.0);
            for (average, clipped) in seen[0].averages.iter().zip(&seen[0].clipped) {
                let pairs = average.iter().flatten().zip(clipped.iter().flatten());
                for (average, clipped) in pairs {
                    let near = 1e-2 * average.abs().max(1e-3);
                    assert!(
                        (clipped - average * factor).abs() <= near,
                        "{clipped}, {average} clipped to {max_norm}"
                    );
                }
            }
        }
    }
}

fn tolerance(dtype: FloatDType, hook: Hook) -> f64 {
    match (dtype, hook) {
        (FloatDType::BF16, _) | (FloatDType::F32, Hook::BF16) => 1.2e-2,
        (FloatDType::F16, _) | (FloatDType::F32, Hook::F16) => 2e-3,
        (FloatDType::F64, _) => 1e-12,
        _ => 1e-5,
    }
}

fn run(training: &Training) {
    let body = |group: ProcessGroup| train(&group, training, false).unwrap();
    let ranks = match training.tcp {
        true => over_tcp(training.ranks, 1, body),
        false => locally(training.ranks, body),
    };
    check(training, &ranks);
}

proptest! {
    #![proptest_config(config(50))]
    #[test]
    fn ranks_average_all_gradients(training in trainings()) {
        watched(&training, run);
    }
}

/// Played by processes, all of which draw the same.
pub(crate) fn when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    let config = config(15);
    let cases = config.cases;
    let mut runner = TestRunner::new(config);
    for case in 0..cases {
        let drawn = trainings().new_tree(&mut runner).unwrap().current();
        let training = drawn.overlapped(group.world_size());
        let failed = || println!("case {case}: {training:#?}");
        let seen = train(group, &training, true).inspect_err(|_| failed())?;
        let seen = rmp_serde::to_vec(&seen).unwrap();
        let all = group.all_gather_bytes(&seen)?.into_iter();
        let all: Vec<Vec<Seen>> = all.map(|it| rmp_serde::from_slice(&it).unwrap()).collect();
        catch_unwind(AssertUnwindSafe(|| check(&training, &all))).unwrap_or_else(|panic| {
            failed();
            resume_unwind(panic)
        });
    }
    Ok(())
}

#[test]
fn overlapped_ranks_average_all_gradients() {
    for output in all_succeed("overlapped at random", 3) {
        assert!(!output.contains("LOG"), "{output}");
    }
}
