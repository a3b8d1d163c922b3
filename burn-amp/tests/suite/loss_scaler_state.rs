//! What a scaler remembers and tells: its state in checkpoints, its history, its warning.

use super::logged::logged;
use burn::lr_scheduler::LrSchedulerRecord;
use burn_amp::{LossScalerConfig, LossScalerError, ScaleChange, ScaleHistory};

#[test]
fn the_state_survives_a_checkpoint() {
    let config = LossScalerConfig::new().with_hysteresis(2);
    let mut scaler = config.init().unwrap();
    for overflow in [true, true, false, true] {
        scaler.update(overflow);
    }
    let written = serde_json::to_string(scaler.state()).unwrap();
    let state = serde_json::from_str(&written).unwrap();
    let mut loaded = config.init().unwrap().load_state(state).unwrap();
    assert_eq!(loaded.state(), scaler.state());
    assert_eq!(loaded.config(), scaler.config());
    for overflow in [true, false, true] {
        scaler.update(overflow);
        loaded.update(overflow);
        assert_eq!(loaded.state(), scaler.state());
    }
}

#[test]
fn the_state_survives_burns_record() {
    let config = LossScalerConfig::new()
        .with_init_scale(1.1)
        .with_backoff_factor(0.3)
        .with_hysteresis(2);
    let mut scaler = config.init().unwrap();
    for overflow in [true, true, false, true, false] {
        scaler.update(overflow);
    }
    let file = tempfile::tempdir().unwrap();
    let file = file.path().join("scaler.bpk");
    scaler.to_record().save(&file).unwrap();
    let record = LrSchedulerRecord::load(&file).unwrap();
    let loaded = config.init().unwrap().load_record(&record).unwrap();
    assert_eq!(loaded.state(), scaler.state());
    // The steps before are not in the new history, their number is.
    let first = ScaleChange {
        step: 5,
        scale: scaler.current_scale(),
        overflow: false,
    };
    assert_eq!(loaded.history().changes().collect::<Vec<_>>(), [first]);

    let foreign = LrSchedulerRecord::new().with_scalar("scale", 2.0f32);
    let error = config.init().unwrap().load_record(&foreign).unwrap_err();
    let missing = "growth_tracker";
    assert_eq!(error, LossScalerError::Record { missing });
}

/// PyTorch's scale only falls at an overflow. A minimum above it does not raise it.
#[test]
fn an_overflow_never_raises_the_scale() {
    let config = LossScalerConfig::new()
        .with_init_scale(1.0)
        .with_min_scale(Some(128.0));
    let mut scaler = config.init().unwrap();
    scaler.update(true);
    assert_eq!(scaler.current_scale(), 1.0);
}

#[test]
fn the_history_is_every_overflow_and_every_change() {
    let config = LossScalerConfig::new()
        .with_init_scale(8.0)
        .with_growth_interval(2)
        .with_hysteresis(2);
    let mut scaler = config.init().unwrap();
    let mut every_step = vec![(0, 8.0, false)];
    for overflow in [false, true, true, false, false, false, true] {
        scaler.update(overflow);
        every_step.push((scaler.state().steps, scaler.current_scale(), overflow));
    }
    let mut last = None;
    every_step.retain(|(_, scale, overflow)| last.replace(*scale) != Some(*scale) || *overflow);
    let kept = scaler.history().changes();
    let kept: Vec<_> = kept
        .map(|change| (change.step, change.scale, change.overflow))
        .collect();
    assert_eq!(kept, every_step);
    assert_eq!(kept[1..3], [(2, 8.0, true), (3, 4.0, true)]);

    scaler.set_scale(64.0).unwrap();
    let mut csv = Vec::new();
    scaler.history().write_csv(&mut csv).unwrap();
    let csv = String::from_utf8(csv).unwrap();
    assert_eq!(csv.lines().next(), Some("step,scale,overflow"));
    assert_eq!(csv.lines().count(), 1 + scaler.history().changes().len());
    assert!(csv.ends_with("\n7,64,false\n"), "{csv}");
    let line: Vec<_> = scaler.history().line(9).collect();
    assert_eq!(line[line.len() - 2..], [(7, 64.0), (9, 64.0)]);
    assert!(line.windows(2).all(|pair| pair[0].0 <= pair[1].0));
}

#[test]
fn the_history_is_bounded() {
    let mut scaler = LossScalerConfig::new().with_dynamic(false).init().unwrap();
    for _ in 0..ScaleHistory::CAPACITY + 10 {
        scaler.update(true);
    }
    let mut changes = scaler.history().changes();
    assert_eq!(changes.len(), ScaleHistory::CAPACITY);
    assert_eq!(changes.next().unwrap().step, 11);
}

fn warnings(config: &LossScalerConfig, overflows: impl IntoIterator<Item = bool>) -> Vec<String> {
    let mut scaler = config.init().unwrap();
    let overflows = overflows.into_iter();
    logged(|| overflows.for_each(|overflow| scaler.update(overflow)))
}

#[test]
fn a_scale_that_keeps_falling_warns_once() {
    let config = LossScalerConfig::new();
    // From 2^16, the 17th overflow takes it below 1, whatever is between them.
    let pattern = |overflows: usize| (0..3 * overflows).map(|step| step % 3 == 2);
    assert_eq!(warnings(&config, pattern(16)), [""; 0]);
    let warned = warnings(&config, pattern(40));
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(
        warned[0].starts_with("17 of 51 steps overflowed"),
        "{warned:?}"
    );
    assert!(warned[0].contains("lower the learning rate"), "{warned:?}");
    // A scale that cannot fall.
    let bounded = config.with_min_scale(Some(1024.0));
    assert_eq!(warnings(&bounded, vec![true; 19]), [""; 0]);
    assert_eq!(warnings(&bounded, pattern(40)), [""; 0]);
    let warned = warnings(&bounded, vec![true; 60]);
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(warned[0].contains("the last 20 in a row"), "{warned:?}");
    // Again, after a step that was clean.
    let twice = [vec![true; 30], vec![false], vec![true; 30]].concat();
    assert_eq!(warnings(&bounded, twice).len(), 2);
}
