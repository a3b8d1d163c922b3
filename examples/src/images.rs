//! Images in the CIFAR-10 binary layout.
//!
//! A record is one byte for the label (0 to 9), and 3,072 bytes for the pixels: 32x32 red, then green, then blue, row by row
//! (<https://www.cs.toronto.edu/~kriz/cifar.html>, "binary version").

use std::path::{Path, PathBuf};

use thiserror::Error;

/// The number of color channels of an image.
pub const CHANNELS: usize = 3;
/// The height and width of an image, in pixels.
pub const SIDE: usize = 32;
/// The size of an image's pixels, in bytes.
pub const PIXELS: usize = CHANNELS * SIDE * SIDE;
/// The size of a record (the label, then the pixels), in bytes.
pub const RECORD: usize = 1 + PIXELS;
/// The number of classes. Labels are below it.
pub const CLASSES: usize = 10;

/// The number of records in each file of the published data.
const RECORDS_PER_FILE: usize = 10_000;
/// The five files of the published data to train on. `TEST_FILE` is the one held out.
const TRAIN_FILES: [&str; 5] = [
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
];
const TEST_FILE: &str = "test_batch.bin";
/// The folder to which the published archive unpacks.
const ARCHIVE_FOLDER: &str = "cifar-10-batches-bin";

/// What is wrong with image data.
#[derive(Debug, Error)]
pub enum DataError {
    /// The folder does not have the published files.
    #[error(
        "no CIFAR-10 data in {}: expected {} and the other files of the binary version, there or in {ARCHIVE_FOLDER}/",
        .0.display(), TRAIN_FILES[0]
    )]
    NotFound(PathBuf),
    /// A file could not be read.
    #[error("cannot read {}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file does not have the size that its records need: it is truncated, or not the binary version.
    #[error(
        "{name} holds {found} bytes, expected {expected} ({records} records of {RECORD} bytes): get the file again"
    )]
    Size {
        /// The file.
        name: String,
        /// Its size in bytes.
        found: u64,
        /// The size it should have.
        expected: u64,
        /// The number of records of that size.
        records: u64,
    },
    /// A label is not below the number of classes.
    #[error(
        "{name}: record {record} has the label {label}, expected 0 to 9: not the CIFAR-10 binary version"
    )]
    Label {
        /// The file.
        name: String,
        /// The record, counted from 0.
        record: usize,
        /// The record's label.
        label: u8,
    },
}

/// Images with labels, kept as the bytes of their CIFAR-10 records.
///
/// ```
/// use examples::images::{Images, RECORD};
///
/// let mut record = vec![128; RECORD];
/// record[0] = 7;
/// let images = Images::from_records(record, "one image")?;
/// assert_eq!((images.len(), images.label(0)), (1, 7));
/// # Ok::<(), examples::images::DataError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Images {
    records: Vec<u8>,
}

/// Images to train on and images held out for evaluation.
#[derive(Debug, Clone)]
pub struct Split {
    /// The name of the data set, which does not depend on where it is stored.
    pub name: String,
    /// The images to train on.
    pub train: Images,
    /// The images held out.
    pub test: Images,
    /// Whether a mirrored image keeps its class (true of photographs, not of digits).
    pub mirror: bool,
}

impl Images {
    /// Creates images from whole records. Errors refer to them by `name`.
    ///
    /// # Errors
    /// [`DataError::Size`] if the bytes are not a whole number of records, [`DataError::Label`] if a label is
    /// not below [`CLASSES`].
    pub fn from_records(records: Vec<u8>, name: &str) -> Result<Self, DataError> {
        let whole = records.len().next_multiple_of(RECORD);
        check_size(name, records.len() as u64, (whole / RECORD) as u64)?;
        match records
            .chunks(RECORD)
            .position(|record| record[0] >= CLASSES as u8)
        {
            Some(record) => Err(DataError::Label {
                name: name.to_owned(),
                record,
                label: records[record * RECORD],
            }),
            None => Ok(Self { records }),
        }
    }

    /// The number of images.
    pub fn len(&self) -> usize {
        self.records.len() / RECORD
    }

    /// Whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The class of image `index`.
    ///
    /// # Panics
    /// If there is no such image.
    pub fn label(&self, index: usize) -> u8 {
        self.records[index * RECORD]
    }

    /// The pixels of image `index`: `[CHANNELS, SIDE, SIDE]`, 0 to 255.
    ///
    /// # Panics
    /// If there is no such image.
    pub fn pixels(&self, index: usize) -> &[u8] {
        &self.records[index * RECORD + 1..(index + 1) * RECORD]
    }
}

impl Split {
    /// The CRC-32 of all records: those to train on, then those held out.
    pub fn checksum(&self) -> u32 {
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&self.train.records);
        checksum.update(&self.test.records);
        checksum.finalize()
    }
}

/// Reads the published CIFAR-10 binary version, from `dir` or its subfolder `cifar-10-batches-bin`.
///
/// # Errors
/// [`DataError`] if the files do not exist, cannot be read, or have a wrong size or label.
pub fn read_cifar10(dir: &Path) -> Result<Split, DataError> {
    let dir = [dir.to_owned(), dir.join(ARCHIVE_FOLDER)]
        .into_iter()
        .find(|dir| dir.join(TRAIN_FILES[0]).is_file())
        .ok_or_else(|| DataError::NotFound(dir.to_owned()))?;
    Ok(Split {
        name: "CIFAR-10".to_owned(),
        train: read_files(&dir, &TRAIN_FILES)?,
        test: read_files(&dir, &[TEST_FILE])?,
        mirror: true,
    })
}

fn read_files(dir: &Path, files: &[&str]) -> Result<Images, DataError> {
    let mut records = Vec::with_capacity(files.len() * RECORDS_PER_FILE * RECORD);
    for file in files {
        let path = dir.join(file);
        let io = |source| DataError::Io {
            path: path.clone(),
            source,
        };
        let name = path.display().to_string();
        // The size is checked first, so that a wrong file is not read into memory.
        check_size(
            &name,
            std::fs::metadata(&path).map_err(io)?.len(),
            RECORDS_PER_FILE as u64,
        )?;
        records.extend(Images::from_records(std::fs::read(&path).map_err(io)?, &name)?.records);
    }
    Ok(Images { records })
}

fn check_size(name: &str, found: u64, records: u64) -> Result<(), DataError> {
    let expected = records * RECORD as u64;
    if found == expected {
        return Ok(());
    }
    Err(DataError::Size {
        name: name.to_owned(),
        found,
        expected,
        records,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    /// Creates the published files with zeros only, so that every label is class 0. They are sparse, and take no disk space.
    fn published(dir: &Path) {
        for name in TRAIN_FILES.iter().chain([&TEST_FILE]) {
            File::create(dir.join(name))
                .unwrap()
                .set_len(30_730_000)
                .unwrap();
        }
    }

    #[test]
    fn a_record_is_a_label_and_three_planes() {
        let mut records: Vec<u8> = (0..2 * RECORD).map(|i| (i % 251) as u8).collect();
        records[RECORD] = 9;
        let images = Images::from_records(records, "two").unwrap();
        assert_eq!(images.len(), 2);
        assert_eq!([images.label(0), images.label(1)], [0, 9]);
        assert_eq!(images.pixels(0)[..3], [1, 2, 3]);
        assert_eq!(images.pixels(1).len(), 3 * 32 * 32);
        assert!(!images.is_empty());
    }

    #[test]
    fn half_a_record_and_a_label_of_ten_are_refused() {
        let error = Images::from_records(vec![0; RECORD + 5], "half").unwrap_err();
        assert!(
            matches!(
                error,
                DataError::Size {
                    found: 3078,
                    expected: 6146,
                    records: 2,
                    ..
                }
            ),
            "{error}"
        );
        let mut records = vec![0; 3 * RECORD];
        records[2 * RECORD] = 10;
        let error = Images::from_records(records, "ten").unwrap_err();
        assert!(
            matches!(
                error,
                DataError::Label {
                    record: 2,
                    label: 10,
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn the_published_files_are_found_here_and_in_the_archive_folder() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join(ARCHIVE_FOLDER);
        std::fs::create_dir(&inner).unwrap();
        published(&inner);
        let splits = [dir.path(), &inner].map(|dir| read_cifar10(dir).unwrap());
        for split in &splits {
            assert_eq!((split.train.len(), split.test.len()), (50_000, 10_000));
        }
        let [one, other] = splits;
        assert_eq!(one.name, other.name);
    }

    #[test]
    fn the_checksum_is_of_both_parts() {
        let images = |label| {
            let mut record = vec![0; RECORD];
            record[0] = label;
            Images::from_records(record, "one").unwrap()
        };
        let checksum = |train, test| {
            let (train, test) = (images(train), images(test));
            let (name, mirror) = (String::new(), false);
            Split {
                name,
                train,
                test,
                mirror,
            }
            .checksum()
        };
        assert_eq!(checksum(1, 2), checksum(1, 2));
        assert_ne!(checksum(1, 2), checksum(3, 2));
        assert_ne!(checksum(1, 2), checksum(1, 3));
    }

    #[test]
    fn a_missing_and_a_truncated_file_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = read_cifar10(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&dir.path().display().to_string()), "{error}");

        published(dir.path());
        let third = dir.path().join("data_batch_3.bin");
        File::create(&third).unwrap().set_len(30_729_999).unwrap();
        let error = read_cifar10(dir.path()).unwrap_err().to_string();
        for part in ["data_batch_3.bin", "30729999", "30730000"] {
            assert!(error.contains(part), "{error}");
        }
        std::fs::remove_file(&third).unwrap();
        let error = read_cifar10(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains("cannot read") && error.contains("data_batch_3.bin"),
            "{error}"
        );
    }
}
