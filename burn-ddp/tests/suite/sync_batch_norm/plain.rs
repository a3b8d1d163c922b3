//! Where it is Burn's batch normalization.

use burn::{
    module::Module,
    nn::{BatchNorm, BatchNormConfig},
    tensor::{Device, Tolerance},
};
use burn_ddp::{ProcessGroup, SyncBatchNorm};

use super::sample;
use crate::suite::ranks::locally;

#[test]
fn alone_frozen_and_in_evaluation_it_is_batch_norm() {
    let device = Device::flex().autodiff();
    let plain = BatchNormConfig::new(2).init(&device);
    let single = SyncBatchNorm::new(&plain.clone().fork(&device), &ProcessGroup::single());
    let expected = plain.forward(sample(&device)).into_data();
    single
        .forward(sample(&device))
        .into_data()
        .assert_eq(&expected, true);
    for states in [
        [&plain.running_mean, &single.running_mean],
        [&plain.running_var, &single.running_var],
    ] {
        let [plain, single] = states.map(|it| it.value_sync().into_data());
        plain.assert_eq(&single, true);
    }

    // Without a collective: one rank of two calls alone.
    let inference = Device::flex();
    let results = locally(2, |group| {
        if group.rank() == 1 {
            return None;
        }
        let norm = SyncBatchNorm::new(&plain, &group);
        let frozen = norm.clone().freeze().forward(sample(&device)).into_data();
        let valid = norm.valid().forward(sample(&inference)).into_data();
        Some([frozen, valid])
    });
    let expected = plain.valid().forward(sample(&inference)).into_data();
    for data in results.into_iter().flatten().flatten() {
        data.assert_approx_eq::<f32>(&expected, Tolerance::default());
    }
}

#[test]
fn records_are_those_of_batch_norm() {
    let folder = tempfile::tempdir().unwrap();
    let device = Device::flex().autodiff();
    let group = ProcessGroup::single();
    let trained: BatchNorm = BatchNormConfig::new(2).init(&device);
    trained.forward(sample(&device));
    // Burn's records leave out an update that nobody has asked for yet.
    trained.running_mean.value_sync();
    trained.running_var.value_sync();
    let sync = SyncBatchNorm::new(&trained, &group);

    for (name, to_plain) in [("sync", true), ("plain", false)] {
        let path = folder.path().join(name);
        let state = match to_plain {
            true => {
                sync.clone().save_file(&path).unwrap();
                let fresh = BatchNormConfig::new(2).init(&device);
                let loaded = fresh.try_load_file(&path).unwrap();
                [loaded.running_mean, loaded.running_var]
            }
            false => {
                trained.clone().save_file(&path).unwrap();
                let fresh = BatchNormConfig::new(2).init(&device);
                let fresh = SyncBatchNorm::new(&fresh, &group);
                let loaded = fresh.try_load_file(&path).unwrap();
                [loaded.running_mean, loaded.running_var]
            }
        };
        let expected = [&trained.running_mean, &trained.running_var];
        for (state, expected) in state.iter().zip(expected) {
            let expected = expected.value_sync().into_data();
            state.value_sync().into_data().assert_eq(&expected, true);
        }
    }
    let back = BatchNorm::from(sync);
    assert_eq!(back.gamma.id, trained.gamma.id);
}
