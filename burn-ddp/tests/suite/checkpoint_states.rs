//! What differs from rank to rank in a checkpoint.

use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt, path::Path};

use burn_ddp::{Checkpoints, DdpError, DistributedSampler, ProcessGroup, SamplerState};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::suite::ranks::locally;

#[test]
fn each_rank_gets_its_state_back() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct State {
        place: u128,
        name: String,
    }
    let folder = tempfile::tempdir().unwrap();
    let state = |rank: usize, step: u64| State {
        place: u128::MAX - rank as u128,
        name: format!("[rank {rank}, \"step\" {step}]"),
    };
    locally(3, |group| {
        let rank = group.rank();
        let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
        let write = |folder: &Path| fs::write(folder.join("model"), "weights");
        for step in [1, 2] {
            let saved = checkpoints.save_with(step, None, &state(rank, step), write);
            saved.unwrap();
        }
        let latest = checkpoints.latest().unwrap().unwrap();
        assert!(latest.folder.join("model").exists());
        for rank in 0..3 {
            assert_eq!(latest.state::<State>(rank).unwrap(), state(rank, 2));
        }
        // As many ranks as there were, and of the type that it was.
        let error = latest.state::<State>(3).unwrap_err().to_string();
        assert!(error.contains("the states of 3 ranks"), "{error}");
        assert!(error.contains("`state(0)`"), "what to do: {error}");
        assert!(latest.state::<Vec<u8>>(rank).is_err());
        // What cannot be serialized is everyone's error, and nothing is saved.
        let odd = match rank {
            1 => Path::new(OsStr::from_bytes(b"no text: \xff")),
            _ => Path::new("text"),
        };
        let error = checkpoints.save_with(3, None, &odd, write).unwrap_err();
        assert!(error.to_string().contains("the state of rank 1"), "{error}");
        assert_eq!(checkpoints.latest().unwrap().unwrap().step, 2);
        checkpoints.save(4, None, write).unwrap();
        let without = checkpoints.latest().unwrap().unwrap();
        assert!(matches!(
            without.state::<State>(rank),
            Err(DdpError::Checkpoint { .. })
        ));
        assert!(matches!(without.ranks(), Err(DdpError::Checkpoint { .. })));
    });
}

/// As the documentation of `save_with` does it.
#[test]
fn other_numbers_of_ranks_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let sampler = |group: &ProcessGroup| {
        DistributedSampler::new(24, group.rank(), group.world_size()).shuffle(true)
    };
    locally(2, |group| {
        let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
        let state = (sampler(&group).state(6), group.rank());
        let saved = checkpoints.save_with(1, None, &state, |_| Ok(()));
        saved.unwrap();
    });
    for ranks in [1, 2, 3] {
        let left = locally(ranks, |group| {
            let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
            let last = checkpoints.latest().unwrap().unwrap();
            assert_eq!(last.ranks().unwrap(), 2);
            let rank = group.rank().min(last.ranks().unwrap() - 1);
            let (state, saved_by): (SamplerState, usize) = last.state(rank).unwrap();
            assert_eq!(saved_by, group.rank().min(1));
            let mut sampler = sampler(&group);
            sampler.load_state(&state);
            sampler.len()
        });
        // Twelve of the items were taken.
        assert_eq!(left.iter().sum::<usize>(), 12, "{left:?}");
    }
}

#[test]
fn floats_in_states_come_back_bit_by_bit() {
    #[derive(Serialize, Deserialize)]
    struct State {
        best_loss: f64,
        scale: f32,
        #[serde(default)]
        losses: Vec<f64>,
    }
    let folder = tempfile::tempdir().unwrap();
    let group = ProcessGroup::single();
    let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(4);
    let mut losses: Vec<f64> = (0..2000).map(|_| f64::from_bits(random.random())).collect();
    losses.extend([
        f64::NEG_INFINITY,
        f64::NAN,
        -0.0,
        0.1 + 0.2,
        f64::MIN_POSITIVE / 2.0,
    ]);
    let state = State {
        best_loss: f64::INFINITY,
        scale: f32::NAN,
        losses,
    };
    checkpoints.save_with(1, None, &state, |_| Ok(())).unwrap();
    let latest = checkpoints.latest().unwrap().unwrap();
    let back: State = latest.state(0).unwrap();
    assert_eq!(back.best_loss, f64::INFINITY);
    assert_eq!(back.scale.to_bits(), state.scale.to_bits());
    let bits = |losses: &[f64]| -> Vec<u64> { losses.iter().map(|it| it.to_bits()).collect() };
    assert_eq!(bits(&back.losses), bits(&state.losses));
    // A type with a new field still reads what was written without it.
    #[derive(Serialize)]
    struct Old {
        scale: f32,
        best_loss: f64,
    }
    let old = Old {
        scale: 2.0,
        best_loss: 0.5,
    };
    checkpoints.save_with(2, None, &old, |_| Ok(())).unwrap();
    let back: State = checkpoints.latest().unwrap().unwrap().state(0).unwrap();
    assert_eq!(
        (back.best_loss, back.scale, back.losses.len()),
        (0.5, 2.0, 0)
    );
}
