//! The three files of an epoch: all there, or none.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{AdamConfig, GradientsParams, OptimizerRecord},
    store::{ModuleRecord, RecordError},
    tensor::{Bytes, Tensor},
};
use burn_ddp::{AtomicCheckpointer, DdpError, EpochCheckpoints, ProcessGroup};
use burn_train::checkpoint::{
    AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, FileCheckpointer,
};
use nix::sys::signal::Signal;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::device;
use crate::suite::{
    net::contents,
    ranks::{FOLDER, locally, meeting_place, player, spawn},
};

/// A record of which half is written when the disk is full.
struct TooLarge;

impl Checkpoint for TooLarge {
    fn save(self, path: PathBuf) -> Result<(), CheckpointerError> {
        fs::write(path, "half").unwrap();
        let full = io::Error::new(io::ErrorKind::StorageFull, "no space left");
        Err(CheckpointerError::IOError(full))
    }

    fn load(_path: PathBuf) -> Result<Self, CheckpointerError> {
        Ok(Self)
    }

    fn checkpoint_from_bytes(_bytes: Bytes) -> Result<Self, RecordError> {
        Ok(Self)
    }

    fn checkpoint_into_bytes(self) -> Result<Bytes, RecordError> {
        Ok(Bytes::from_bytes_vec(Vec::new()))
    }
}

fn alone(folder: &Path) -> EpochCheckpoints {
    EpochCheckpoints::open(folder, &ProcessGroup::single()).unwrap()
}

fn parts(epochs: &EpochCheckpoints) -> [AtomicCheckpointer; 3] {
    [epochs.model(), epochs.optimizer(), epochs.scheduler()]
}

fn small() -> Linear {
    LinearConfig::new(2, 2).init(&device())
}

/// A record that is full of a number.
fn record(number: usize) -> ModuleRecord {
    let mut model = small();
    let full = |old: Tensor<2>| Tensor::full([2, 2], number as f32, &old.device());
    model.weight = model.weight.map(full);
    model.into_record()
}

/// The number that a restored record is full of.
fn number(checkpointer: &impl Checkpointer<ModuleRecord>, epoch: usize) -> usize {
    let restored = checkpointer.restore(epoch).unwrap();
    let model = small().try_load_record(restored).unwrap();
    let values: Vec<f32> = model.weight.val().into_data().try_to_vec().unwrap();
    assert_eq!(values, [values[0]; 4]);
    values[0] as usize
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn files(epoch: usize) -> Vec<String> {
    ["model", "optim", "scheduler"]
        .map(|part| format!("{part}-{epoch}.bpk"))
        .into()
}

fn unfinished(name: &String) -> String {
    format!(".unfinished-{name}")
}

/// Of a parameter whose gradient comes late: rank 0 may have deleted the epoch by then.
#[test]
fn a_restored_optimizer_needs_its_file_no_more() {
    let gradients = |model: &Linear| {
        let loss = model.forward(Tensor::<2>::ones([1, 2], &device())).sum();
        GradientsParams::from_grads(loss.backward(), model)
    };
    let adam = || AdamConfig::new().init();
    let (mut straight, model) = (adam(), small());
    let model = straight.step(0.1, model.clone(), gradients(&model));
    let folder = tempfile::tempdir().unwrap();
    let epochs = alone(folder.path());
    epochs.model().save(1, model.clone().into_record()).unwrap();
    epochs.optimizer().save(1, straight.to_record()).unwrap();
    epochs.scheduler().save(1, record(1)).unwrap();
    let restored: OptimizerRecord = epochs.optimizer().restore(1).unwrap();
    let mut resumed = adam().load_record(restored);
    fs::remove_file(folder.path().join("optim-1.bpk")).unwrap();
    let [straight, resumed] = [&mut straight, &mut resumed].map(|optimizer| {
        let model = optimizer.step(0.1, model.clone(), gradients(&model));
        contents(&model)
    });
    assert_eq!(resumed, straight);
}

#[test]
fn a_full_disk_leaves_no_half_of_an_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let epochs = alone(folder.path());
    for part in parts(&epochs) {
        part.save(1, record(1)).unwrap();
    }
    for epoch in [1, 2] {
        let error = epochs.optimizer().save(epoch, TooLarge).unwrap_err();
        assert!(error.to_string().contains("no space left"), "{error}");
        // Nor when the rest is written, and that part again.
        for part in [epochs.model(), epochs.scheduler(), epochs.optimizer()] {
            let error = part.save(epoch, record(9)).unwrap_err();
            assert!(error.to_string().contains("another part"), "{error}");
        }
    }
    let epochs = alone(folder.path());
    assert_eq!(epochs.last(), Some(1));
    assert_eq!(names(folder.path()), files(1));
    assert_eq!(parts(&epochs).map(|part| number(&part, 1)), [1; 3]);
}

#[test]
fn what_an_epoch_that_failed_should_have_deleted_goes_with_the_next() {
    let (folder, epochs) = with_an_epoch();
    let [model, optimizer, scheduler] = parts(&epochs);
    model.save(2, record(2)).unwrap();
    delete(&model, 1).unwrap();
    optimizer.save(2, record(2)).unwrap();
    // Nothing can be noted there.
    let note = folder.path().join(".whole-2");
    fs::create_dir(&note).unwrap();
    scheduler.save(2, record(2)).unwrap_err();
    fs::remove_dir(note).unwrap();
    assert!(folder.path().join("model-1.bpk").exists());
    for part in parts(&epochs) {
        part.save(3, record(3)).unwrap();
    }
    assert!(!folder.path().join("model-1.bpk").exists());
}

#[test]
fn an_epoch_is_there_with_all_its_files_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::write(path.join(".unfinished-business"), "of someone else").unwrap();
    assert_eq!(alone(path).last(), None);
    // Again and again up to the first file, the second, and all.
    for (count, last) in [(1, None), (2, None), (3, Some(7))] {
        for part in &parts(&alone(path))[..count] {
            part.save(7, record(70)).unwrap();
        }
        let epochs = alone(path);
        assert_eq!(epochs.last(), last);
        // The next to write removes what is not whole.
        let left = match count {
            3 => files(7),
            _ => files(7)[..count].iter().map(unfinished).collect(),
        };
        assert_eq!(names(path)[1..], left);
    }
    // Written again: the old one stays until the new one is whole, whatever order the files come in.
    let epochs = alone(path);
    for (part, before) in parts(&epochs).iter().rev().zip([70, 70, 71]) {
        part.save(7, record(71)).unwrap();
        assert_eq!(parts(&epochs).map(|part| number(&part, 7)), [before; 3]);
    }
    // A kill after some have got their names.
    for part in parts(&epochs) {
        part.save(8, record(80)).unwrap();
    }
    for named in [1, 2, 3] {
        for name in &files(8)[named..] {
            fs::rename(path.join(name), path.join(unfinished(name))).unwrap();
        }
        fs::write(path.join(".whole-8"), "").unwrap();
        let killed = names(path);
        let epochs = alone(path);
        assert_eq!(epochs.last(), Some(8));
        assert_eq!(parts(&epochs).map(|part| number(&part, 8)), [80; 3]);
        assert_eq!(names(path), killed, "who reads changes nothing");
        // Who writes or deletes finishes it first.
        Checkpointer::<ModuleRecord>::delete(&epochs.model(), 1).unwrap();
        assert_eq!(names(path).len(), 1 + 6, "{:?}", names(path));
    }
    // burn-train's own reads them, and writes what is read here.
    let own = ["model", "optim", "scheduler"].map(|part| FileCheckpointer::new(path, part));
    assert_eq!(own.each_ref().map(|part| number(part, 8)), [80; 3]);
    own[0].save(9, record(90)).unwrap();
    assert_eq!(alone(path).last(), Some(8), "a part is missing");
    own[1].save(9, record(90)).unwrap();
    own[2].save(9, record(90)).unwrap();
    let ranks = locally(2, |group| {
        let epochs = EpochCheckpoints::open(path, &group).unwrap();
        epochs
            .last()
            .map(|epoch| parts(&epochs).map(|part| number(&part, epoch)))
    });
    assert_eq!(ranks, [Some([90; 3]); 2]);
}

#[test]
fn who_reads_is_not_in_the_way_of_who_writes() {
    let folder = tempfile::tempdir().unwrap();
    let epochs = alone(folder.path());
    for part in parts(&epochs) {
        assert_eq!(alone(folder.path()).last(), None);
        part.save(1, record(1)).unwrap();
    }
    for part in parts(&epochs) {
        let reader = alone(folder.path());
        assert_eq!(reader.last(), Some(1));
        assert_eq!(parts(&reader).map(|part| number(&part, 1)), [1; 3]);
        part.save(2, record(2)).unwrap();
    }
    let reader = alone(folder.path());
    assert_eq!(reader.last(), Some(2));
    assert_eq!(parts(&reader).map(|part| number(&part, 2)), [2; 3]);
}

/// A folder that has epoch 1.
fn with_an_epoch() -> (tempfile::TempDir, EpochCheckpoints) {
    let folder = tempfile::tempdir().unwrap();
    let epochs = alone(folder.path());
    for part in parts(&epochs) {
        part.save(1, record(1)).unwrap();
    }
    (folder, epochs)
}

fn delete(part: &AtomicCheckpointer, epoch: usize) -> Result<(), CheckpointerError> {
    Checkpointer::<ModuleRecord>::delete(part, epoch)
}

#[test]
fn nothing_is_deleted_before_the_next_epoch_is_whole() {
    let (folder, epochs) = with_an_epoch();
    let [model, optimizer, scheduler] = parts(&epochs);
    model.save(2, record(2)).unwrap();
    delete(&model, 1).unwrap();
    optimizer.save(2, record(2)).unwrap();
    delete(&optimizer, 1).unwrap();
    assert_eq!(names(folder.path())[2..], files(1));
    scheduler.save(2, record(2)).unwrap();
    delete(&scheduler, 1).unwrap();
    assert_eq!(names(folder.path()), files(2));
    // Nor when it never will be; one of the three deletes is not sooner than the others.
    model.save(3, record(3)).unwrap();
    delete(&model, 2).unwrap();
    optimizer.save(3, TooLarge).unwrap_err();
    delete(&optimizer, 2).unwrap();
    scheduler.save(3, record(3)).unwrap_err();
    delete(&scheduler, 2).unwrap();
    assert_eq!(alone(folder.path()).last(), Some(2));
    assert_eq!(names(folder.path()), files(2));
    for part in [&model, &optimizer, &scheduler] {
        part.save(4, record(4)).unwrap();
    }
    assert_eq!(names(folder.path()), files(4));
}

/// burn-train's `MetricCheckpointingStrategy` deletes the best first, and then saves what is better.
#[test]
fn the_only_epoch_is_not_deleted_before_another_is_whole() {
    let (folder, epochs) = with_an_epoch();
    for part in parts(&epochs) {
        delete(&part, 1).unwrap();
        assert_eq!(alone(folder.path()).last(), Some(1));
        part.save(2, record(2)).unwrap();
    }
    assert_eq!(names(folder.path()), files(2));
    // A thread that is ahead of the others: they still write what it has been told to delete.
    let [model, optimizer, scheduler] = parts(&epochs);
    model.save(3, record(3)).unwrap();
    delete(&model, 3).unwrap();
    optimizer.save(3, record(3)).unwrap();
    delete(&optimizer, 3).unwrap();
    scheduler.save(3, record(3)).unwrap();
    delete(&scheduler, 3).unwrap();
    assert_eq!(alone(folder.path()).last(), Some(3));
    optimizer.save(4, TooLarge).unwrap_err();
    assert_eq!(alone(folder.path()).last(), Some(3));
    for part in parts(&epochs) {
        part.save(5, record(5)).unwrap();
    }
    let mut left = [files(2), files(5)].concat();
    left.sort();
    assert_eq!(names(folder.path()), left);
}

#[test]
fn a_folder_that_cannot_be_used_is_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    for error in locally(2, |group| {
        EpochCheckpoints::open(&file, &group).unwrap_err()
    }) {
        assert!(
            matches!(&error, DdpError::Checkpoint { path, .. } if *path == file),
            "{error}"
        );
    }
}

/// Writes epochs as burn-train does, and keeps the last, for ever.
pub(crate) fn epochs_for_ever(group: &ProcessGroup) -> Result<String, DdpError> {
    let folder = std::env::var(FOLDER).unwrap();
    let epochs = EpochCheckpoints::open(&folder, group)?;
    let threads = parts(&epochs).map(AsyncCheckpointer::<ModuleRecord>::new);
    for epoch in 1 + epochs.last().unwrap_or(0).. {
        for thread in &threads {
            thread.save(epoch, record(epoch)).unwrap();
        }
        if epoch > 1 {
            for thread in &threads {
                thread.delete(epoch - 1).unwrap();
            }
        }
        println!("STEP");
    }
    unreachable!("it is killed")
}

#[test]
fn a_kill_at_any_moment_leaves_the_last_epoch_whole() {
    let folder = tempfile::tempdir().unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let mut reached = 0;
    for _ in 0..12 {
        let (_place, url) = meeting_place();
        let mut command = player("epochs for ever");
        let command = command.env(FOLDER, folder.path());
        let mut rank = spawn(command, "epochs for ever", 0, 1, &url, 60.0);
        let steps = random.random_range(1..8);
        rank.wait_for_steps(steps);
        thread::sleep(Duration::from_micros(random.random_range(0..3000)));
        rank.signal(Signal::SIGKILL);
        drop(rank);
        let epochs = alone(folder.path());
        let last = epochs.last().unwrap_or(0);
        // Before the last word, the threads took the epoch of that word, after they had written the one before.
        assert!(last + 1 >= reached + steps, "{last} {reached} {steps}");
        if last > 0 {
            assert_eq!(parts(&epochs).map(|part| number(&part, last)), [last; 3]);
        }
        reached = last;
    }
    assert!(reached > 12);
}
