//! Checkpoints: whole or not there, the same for all ranks.

use std::{fs, io, path::Path};

use burn_ddp::{Best, Checkpoints, DdpError, ProcessGroup};

use crate::ranks::locally;

fn steps(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn the_last_and_the_best_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("made/if/absent");
    locally(2, |group| {
        let checkpoints = Checkpoints::new(&path, &group).unwrap();
        assert_eq!(checkpoints.latest().unwrap(), None);
        let checkpoints = checkpoints.keep_last(2).keep_best(Best::Highest);
        for (step, metric) in [
            (1, Some(0.5)),
            (2, Some(0.9)),
            (3, None),
            (4, Some(f64::NAN)),
            (5, Some(0.1)),
        ] {
            let write = |folder: &Path| {
                assert!(group.is_main(), "only rank 0 writes");
                fs::create_dir(folder.join("parts"))?;
                fs::write(folder.join("parts/model"), step.to_string())
            };
            checkpoints.save(step, metric, write).unwrap();
        }
        let latest = checkpoints.latest().unwrap().unwrap();
        assert_eq!((latest.step, latest.metric), (5, Some(0.1)));
        assert_eq!(
            fs::read_to_string(latest.folder.join("parts/model")).unwrap(),
            "5"
        );
        assert_eq!(checkpoints.best(Best::Highest).unwrap().unwrap().step, 2);
        assert_eq!(checkpoints.best(Best::Lowest).unwrap().unwrap().step, 5);
    });
    assert_eq!(
        steps(&path),
        [
            "step-000000000002",
            "step-000000000004",
            "step-000000000005"
        ]
    );
}

#[test]
fn a_failed_write_is_everyones_error_and_leaves_the_earlier_ones() {
    let folder = tempfile::tempdir().unwrap();
    locally(3, |group| {
        let checkpoints = Checkpoints::new(folder.path(), &group)
            .unwrap()
            .keep_last(1);
        checkpoints
            .save(1, None, |folder| fs::write(folder.join("model"), "whole"))
            .unwrap();
        let full = |folder: &Path| {
            fs::write(folder.join("model"), "half")?;
            Err(io::Error::new(io::ErrorKind::StorageFull, "no space left"))
        };
        let error = checkpoints.save(2, None, full).unwrap_err();
        assert!(
            matches!(&error, DdpError::Checkpoint { problem, .. } if problem == "no space left")
        );
        let latest = checkpoints.latest().unwrap().unwrap();
        assert_eq!(
            fs::read_to_string(latest.folder.join("model")).unwrap(),
            "whole"
        );
        // Saving the same step again replaces it.
        checkpoints
            .save(1, None, |folder| fs::write(folder.join("model"), "new"))
            .unwrap();
        let latest = checkpoints.latest().unwrap().unwrap();
        assert_eq!(
            fs::read_to_string(latest.folder.join("model")).unwrap(),
            "new"
        );
    });
    assert_eq!(steps(folder.path()), ["step-000000000001"]);
}

#[test]
fn what_was_left_unfinished_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join(".unfinished-7")).unwrap();
    fs::write(folder.path().join(".unfinished-7/model"), "half").unwrap();
    fs::write(folder.path().join("notes.txt"), "the user's").unwrap();
    let group = ProcessGroup::single();
    let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
    assert_eq!(checkpoints.latest().unwrap(), None);
    assert_eq!(steps(folder.path()), ["notes.txt"]);
}

#[test]
fn a_folder_that_cannot_be_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = Checkpoints::new(file.path(), &ProcessGroup::single()).unwrap_err();
    assert!(matches!(error, DdpError::Checkpoint { path, .. } if path == file.path()));
}
