//! `metrics.csv`: one row for each step, written at once.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// One optimizer step. The last step of an epoch also has the results on the held-out images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The step, counted from 1.
    pub step: usize,
    /// The epoch, counted from 1.
    pub epoch: usize,
    /// The learning rate of the step.
    pub lr: f64,
    /// The mean training loss of the step's images, over all ranks.
    pub loss: f64,
    /// Training images per second over all ranks, evaluation not counted.
    pub images_per_second: f64,
    /// Wall time since the run began, in seconds.
    pub seconds: f64,
    /// The mean loss of the held-out images.
    pub held_out_loss: Option<f64>,
    /// The fraction of the held-out images that is classified correctly, 0 to 1.
    pub held_out_accuracy: Option<f64>,
}

/// `metrics.csv` could not be written.
#[derive(Debug, Error)]
#[error("cannot write {}: {source}", .path.display())]
pub struct MetricsError {
    path: PathBuf,
    source: csv::Error,
}

/// The rows of a run, both in memory and in its file.
///
/// ```
/// use examples::metrics::{Metrics, Row};
///
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("metrics.csv");
/// let mut metrics = Metrics::create(&path, 0)?;
/// metrics.push(Row {
///     step: 1, epoch: 1, lr: 0.1, loss: 2.3, images_per_second: 500.0, seconds: 0.2,
///     held_out_loss: None, held_out_accuracy: None,
/// })?;
/// assert_eq!(Metrics::read(&path), metrics.rows());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    rows: Vec<Row>,
    writer: csv::Writer<File>,
}

impl Metrics {
    /// Begins the file at `path`. Of an earlier file, it keeps the rows up to `step`, which a resumed run will
    /// not write again. The earlier file exists until the new one replaces it.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn create(path: &Path, step: usize) -> Result<Self, MetricsError> {
        let mut kept = if step > 0 {
            Self::read(path)
        } else {
            Vec::new()
        };
        kept.retain(|row| row.step <= step);
        let partial = path.with_extension("csv.partial");
        let error = |source: io::Error| MetricsError {
            path: path.to_owned(),
            source: source.into(),
        };
        let mut metrics = Self {
            path: path.to_owned(),
            rows: Vec::new(),
            writer: csv::Writer::from_writer(File::create(&partial).map_err(error)?),
        };
        for row in kept {
            metrics.push(row)?;
        }
        fs::rename(&partial, path).map_err(error)?;
        Ok(metrics)
    }

    /// Adds a row, and writes it to the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn push(&mut self, row: Row) -> Result<(), MetricsError> {
        let written = self
            .writer
            .serialize(&row)
            .and_then(|()| self.writer.flush().map_err(csv::Error::from));
        written.map_err(|source| MetricsError {
            path: self.path.clone(),
            source,
        })?;
        self.rows.push(row);
        Ok(())
    }

    /// All rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Reads the rows of a file, up to the first damaged one (a run may have been killed while it wrote). Empty if
    /// there is no such file.
    pub fn read(path: &Path) -> Vec<Row> {
        match csv::Reader::from_path(path) {
            Ok(reader) => reader.into_deserialize().map_while(Result::ok).collect(),
            Err(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: usize) -> Row {
        Row {
            step,
            epoch: 1 + step / 3,
            lr: 0.1 / step as f64,
            loss: f64::from(2.3_f32) / 3.0,
            images_per_second: 512.25,
            seconds: step as f64 * 0.3,
            held_out_loss: step.is_multiple_of(3).then_some(0.7),
            held_out_accuracy: step.is_multiple_of(3).then_some(0.9375),
        }
    }

    #[test]
    fn the_file_is_plain_csv_that_reads_back_bit_for_bit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.csv");
        let mut metrics = Metrics::create(&path, 0).unwrap();
        for step in 1..=3 {
            metrics.push(row(step)).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "step,epoch,lr,loss,images_per_second,seconds,held_out_loss,held_out_accuracy"
        );
        assert!(
            lines[1].starts_with("1,1,0.1,0.7666666") && lines[1].ends_with(",,"),
            "{}",
            lines[1]
        );
        assert!(lines[3].ends_with(",0.7,0.9375"), "{}", lines[3]);
        assert_eq!(Metrics::read(&path), [row(1), row(2), row(3)]);
        assert_eq!(metrics.rows(), Metrics::read(&path));
    }

    #[test]
    fn a_resumed_run_goes_on_where_its_checkpoint_stands() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.csv");
        let mut metrics = Metrics::create(&path, 0).unwrap();
        for step in 1..=5 {
            metrics.push(row(step)).unwrap();
        }
        drop(metrics);
        // The run was killed while it wrote a row.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 20]).unwrap();
        let mut metrics = Metrics::create(&path, 3).unwrap();
        metrics.push(row(4)).unwrap();
        assert_eq!(Metrics::read(&path), [row(1), row(2), row(3), row(4)]);
        assert_eq!(Metrics::create(&path, 0).unwrap().rows(), []);
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let error = Metrics::create(Path::new("/nowhere/metrics.csv"), 0).unwrap_err();
        assert!(
            error.to_string().contains("/nowhere/metrics.csv"),
            "{error}"
        );
        assert_eq!(Metrics::read(Path::new("/nowhere/metrics.csv")), []);
    }
}
