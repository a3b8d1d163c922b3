//! Checkpoints: whole or not there, the same for all ranks.

use std::{ffi::OsStr, fs, io, os::unix::ffi::OsStrExt, path::Path, thread, time::Duration};

use burn_ddp::{Best, Checkpoints, DdpError, ProcessGroup};

use crate::suite::ranks::{impatiently, locally};

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
fn the_last_is_the_one_that_was_written_last() {
    let folder = tempfile::tempdir().unwrap();
    let group = ProcessGroup::single();
    let open = || Checkpoints::new(folder.path(), &group).unwrap();
    let write = |step: u64| move |folder: &Path| fs::write(folder.join("model"), step.to_string());
    let checkpoints = open().keep_last(2).keep_best(Best::Highest);
    for (step, metric) in [(300, 0.9), (499, 0.2), (500, 0.1)] {
        checkpoints.save(step, Some(metric), write(step)).unwrap();
    }
    // It goes on from the best, or starts again.
    let checkpoints = open().keep_last(2).keep_best(Best::Highest);
    assert_eq!(checkpoints.latest().unwrap().unwrap().step, 500);
    checkpoints.save(310, Some(0.3), write(310)).unwrap();
    assert_eq!(checkpoints.latest().unwrap().unwrap().step, 310);
    let name = |step| format!("step-{step:012}");
    assert_eq!(steps(folder.path()), [300, 310, 500].map(name));
    checkpoints.save(320, Some(0.4), write(320)).unwrap();
    assert_eq!(steps(folder.path()), [300, 310, 320].map(name));
    // The same step again is the last again.
    checkpoints.save(310, Some(0.3), write(311)).unwrap();
    let latest = open().latest().unwrap().unwrap();
    assert_eq!((latest.step, latest.number), (310, 6));
    assert_eq!(fs::read(latest.folder.join("model")).unwrap(), b"311");

    // Descriptions that say nothing of the order: that of the steps, and what is written now comes after.
    for step in [310, 320] {
        let text = format!("{{\"step\":{step},\"metric\":null}}");
        fs::write(folder.path().join(name(step)).join("checkpoint.json"), text).unwrap();
    }
    fs::remove_dir_all(folder.path().join(name(300))).unwrap();
    assert_eq!(checkpoints.latest().unwrap().unwrap().step, 320);
    checkpoints.save(5, None, write(5)).unwrap();
    assert_eq!(checkpoints.latest().unwrap().unwrap().step, 5);
    assert_eq!(steps(folder.path()), [5, 320].map(name));
}

#[test]
fn folders_that_are_no_checkpoints_are_in_nobodys_way() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("step-7")).unwrap();
    fs::create_dir(folder.path().join("step-8")).unwrap();
    fs::write(folder.path().join("step-8/checkpoint.json"), "{\"step\":").unwrap();
    let group = ProcessGroup::single();
    let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
    let checkpoints = checkpoints.keep_last(1);
    assert_eq!(checkpoints.latest().unwrap(), None);
    for step in [1, 2] {
        checkpoints.save(step, None, |_| Ok(())).unwrap();
        assert_eq!(checkpoints.latest().unwrap().unwrap().step, step);
    }
    let left = ["step-000000000002", "step-7", "step-8"];
    assert_eq!(steps(folder.path()), left);
}

#[test]
fn an_old_one_that_stays_is_no_failed_write() {
    let folder = tempfile::tempdir().unwrap();
    let group = ProcessGroup::single();
    let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
    let checkpoints = checkpoints.keep_last(1);
    checkpoints.save(1, None, |_| Ok(())).unwrap();
    // Where it is moved before it is removed, there is something else.
    let taken = ".unfinished-discarded-step-000000000001";
    fs::write(folder.path().join(taken), "something").unwrap();
    checkpoints.save(2, None, |_| Ok(())).unwrap();
    assert_eq!(checkpoints.latest().unwrap().unwrap().step, 2);
    let old = folder.path().join("step-000000000001");
    assert!(old.exists());
    // The next save tries again.
    fs::remove_file(folder.path().join(taken)).unwrap();
    checkpoints.save(3, None, |_| Ok(())).unwrap();
    assert!(!old.exists());
}

#[test]
fn a_slow_write_has_a_time_limit_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    // The group's calls have a second.
    impatiently(2, |group| {
        let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
        let slow = |_: &Path| {
            thread::sleep(Duration::from_millis(1500));
            Ok(())
        };
        checkpoints.save(1, None, slow).unwrap();
        group.barrier().unwrap();
        let saved = checkpoints
            .timeout(Duration::from_millis(300))
            .save(2, None, slow);
        let Err(DdpError::Timeout { ranks, after, .. }) = saved else {
            panic!("{saved:?}");
        };
        assert_eq!((ranks, after), (vec![0], Duration::from_millis(300)));
    });
}

#[test]
fn other_files_in_the_folder_stay() {
    let folder = tempfile::tempdir().unwrap();
    let others = ["notes.txt", "previous", "step-", "step-by-step"];
    for name in others {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    let group = ProcessGroup::single();
    let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
    let checkpoints = checkpoints.keep_last(1);
    for step in [1, 2] {
        checkpoints.save(step, None, |_| Ok(())).unwrap();
    }
    assert_eq!(checkpoints.latest().unwrap().unwrap().step, 2);
    let mut expected = [&others[..], &["step-000000000002"]].concat();
    expected.sort_unstable();
    assert_eq!(steps(folder.path()), expected);
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
        // Saving the same step again replaces it: when all have looked.
        group.barrier().unwrap();
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
fn what_was_left_unfinished_goes_with_the_next_save() {
    // Of the same step, and of another.
    for step in [7, 8] {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(".unfinished-7")).unwrap();
        fs::write(folder.path().join(".unfinished-7/model"), "half").unwrap();
        fs::write(folder.path().join("notes.txt"), "the user's").unwrap();
        let group = ProcessGroup::single();
        let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
        assert_eq!(checkpoints.latest().unwrap(), None);
        assert_eq!(steps(folder.path()), [".unfinished-7", "notes.txt"]);
        checkpoints.save(step, None, |_| Ok(())).unwrap();
        let saved = format!("step-{step:012}");
        assert_eq!(steps(folder.path()), ["notes.txt", &saved]);
        assert!(
            !checkpoints
                .latest()
                .unwrap()
                .unwrap()
                .folder
                .join("model")
                .exists()
        );
    }
}

#[test]
fn who_reads_is_not_in_the_way_of_who_writes() {
    let folder = tempfile::tempdir().unwrap();
    let group = ProcessGroup::single();
    let open = || Checkpoints::new(folder.path(), &group).unwrap();
    let checkpoints = open();
    // Saved, and saved again.
    for text in ["old", "new"] {
        let write = |half: &Path| {
            fs::write(half.join("model"), text)?;
            let found = open().latest().unwrap();
            let model = found.map(|it| fs::read_to_string(it.folder.join("model")).unwrap());
            assert_eq!(model.as_deref(), (text == "new").then_some("old"));
            assert!(half.join("model").exists());
            Ok(())
        };
        checkpoints.save(1, None, write).unwrap();
    }
    let latest = open().latest().unwrap().unwrap();
    assert_eq!(fs::read(latest.folder.join("model")).unwrap(), b"new");
}

#[test]
fn a_failure_that_says_nothing_is_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    locally(2, |group| {
        let checkpoints = Checkpoints::new(folder.path(), &group).unwrap();
        let error = checkpoints.save(1, None, |_| Err(io::Error::other("")));
        assert!(matches!(error, Err(DdpError::Checkpoint { problem, .. }) if !problem.is_empty()));
        assert_eq!(checkpoints.latest().unwrap(), None);
    });
}

#[test]
fn a_kill_while_a_step_is_saved_again_leaves_one_of_the_two() {
    let model = |step: &Path| fs::read_to_string(step.join("model")).unwrap();
    let group = ProcessGroup::single();
    // The moments of a kill: with the old one put aside, with the new one in its place, and with a half
    // of the old one removed.
    for (new_is_there, old_is_whole) in [(false, true), (true, true), (true, false)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let save = |text: &str| {
            let checkpoints = Checkpoints::new(path, &group).unwrap();
            let saved = checkpoints.save(1, None, |folder| fs::write(folder.join("model"), text));
            saved.unwrap();
        };
        save("old");
        let aside = path.join(".replaced-step-000000000001");
        fs::rename(path.join("step-000000000001"), &aside).unwrap();
        if new_is_there {
            // Not by `save` there, which would remove the old one.
            let other = tempfile::tempdir_in(path).unwrap();
            let checkpoints = Checkpoints::new(other.path(), &group).unwrap();
            let write = |folder: &Path| fs::write(folder.join("model"), "new");
            checkpoints.save(1, None, write).unwrap();
            let step = "step-000000000001";
            fs::rename(other.path().join(step), path.join(step)).unwrap();
        } else {
            fs::create_dir(path.join(".unfinished-1")).unwrap();
        }
        if !old_is_whole {
            fs::remove_file(aside.join("model")).unwrap();
        }
        let checkpoints = Checkpoints::new(path, &group).unwrap();
        let latest = checkpoints.latest().unwrap().unwrap();
        let expected = if new_is_there { "new" } else { "old" };
        assert_eq!(
            (model(&latest.folder).as_str(), latest.number),
            (expected, 1)
        );
        checkpoints.save(2, None, |_| Ok(())).unwrap();
        assert_eq!(steps(path), ["step-000000000001", "step-000000000002"]);
        assert_eq!(model(&path.join("step-000000000001")), expected);
        assert_eq!(checkpoints.latest().unwrap().unwrap().number, 2);
    }
}

#[test]
fn a_folder_that_cannot_be_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = Checkpoints::new(file.path(), &ProcessGroup::single()).unwrap_err();
    assert!(matches!(error, DdpError::Checkpoint { path, .. } if path == file.path()));
}

#[test]
fn a_folder_whose_name_cannot_be_told_is_refused_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join(OsStr::from_bytes(b"no text: \xff"));
    locally(2, |group| {
        let checkpoints = Checkpoints::new(&folder, &group).unwrap();
        assert_eq!(checkpoints.latest().unwrap(), None);
        checkpoints.save(1, None, |_| Ok(())).unwrap();
        let error = checkpoints.latest().unwrap_err();
        assert!(matches!(error, DdpError::Checkpoint { .. }), "{error}");
        group.barrier().unwrap();
    });
}
