//! [`AutocastReport`]: what ran in which precision.

use burn::tensor::DType;
use burn_layer::{Cast, Op};
use core::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The float dtypes for which ops are counted.
const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

fn column(dtype: DType) -> Option<usize> {
    DTYPES.iter().position(|known| *known == dtype)
}

/// The counters of one device. They take a few atomic additions per op.
#[derive(Debug)]
pub(super) struct Counters {
    ops: Vec<[AtomicU64; DTYPES.len()]>,
    fp8: Vec<AtomicU64>,
    casts: AtomicU64,
    casts_saved: AtomicU64,
    cast_elements: AtomicU64,
    low_bytes: AtomicU64,
    recomputed: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            ops: Op::ALL.iter().map(|_| Default::default()).collect(),
            fp8: Op::ALL.iter().map(|_| Default::default()).collect(),
            casts: AtomicU64::new(0),
            casts_saved: AtomicU64::new(0),
            cast_elements: AtomicU64::new(0),
            low_bytes: AtomicU64::new(0),
            recomputed: AtomicU64::new(0),
        }
    }
}

impl Counters {
    pub(super) fn ran(&self, op: Op, dtype: DType) {
        if let Some(column) = column(dtype) {
            self.ops[op.index()][column].fetch_add(1, Relaxed);
        }
    }

    pub(super) fn ran_in_fp8(&self, op: Op) {
        self.fp8[op.index()].fetch_add(1, Relaxed);
    }

    pub(super) fn cast(&self, cast: Cast) {
        if cast.saved {
            self.casts_saved.fetch_add(1, Relaxed);
        } else {
            self.casts.fetch_add(1, Relaxed);
            self.cast_elements.fetch_add(cast.elements as u64, Relaxed);
        }
    }

    pub(super) fn stored(&self, dtype: DType, nominal: DType, elements: usize) {
        if dtype.size() < nominal.size() {
            let bytes = (elements * dtype.size()) as u64;
            self.low_bytes.fetch_add(bytes, Relaxed);
        }
    }

    pub(super) fn recomputed(&self) {
        self.recomputed.fetch_add(1, Relaxed);
    }

    pub(super) fn report(&self) -> AutocastReport {
        let row = |op: &Op| OpCount {
            op: *op,
            fp8: self.fp8[op.index()].load(Relaxed),
            runs: core::array::from_fn(|column| self.ops[op.index()][column].load(Relaxed)),
        };
        let ops = Op::ALL.iter().map(row);
        AutocastReport {
            ops: ops.filter(|count| count.total() > 0).collect(),
            casts: self.casts.load(Relaxed),
            casts_saved: self.casts_saved.load(Relaxed),
            cast_elements: self.cast_elements.load(Relaxed),
            low_bytes: self.low_bytes.load(Relaxed),
            recomputed: self.recomputed.load(Relaxed),
        }
    }
}

/// How often an op ran in which dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpCount {
    /// The op.
    pub op: Op,
    runs: [u64; DTYPES.len()],
    fp8: u64,
}

impl OpCount {
    /// How often the op ran in `dtype`.
    pub fn runs(&self, dtype: DType) -> u64 {
        column(dtype).map_or(0, |column| self.runs[column])
    }

    /// How often the op ran in fp8.
    pub fn fp8_runs(&self) -> u64 {
        self.fp8
    }

    /// How often the op ran.
    pub fn total(&self) -> u64 {
        self.runs.iter().sum::<u64>() + self.fp8
    }
}

/// What ran in which precision on an autocast device since it was created: ops by dtype, casts made,
/// and casts saved by keeping copies of parameters and activations.
///
/// Ops run on a thread of the device, so a report is complete only after
/// [`Device::sync`](burn::tensor::Device::sync) or a readback. Printing it prints a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AutocastReport {
    /// The ops that ran.
    pub ops: Vec<OpCount>,
    /// Casts made.
    pub casts: u64,
    /// Casts saved, because the tensor had been cast before.
    pub casts_saved: u64,
    /// The number of elements in the casts made.
    pub cast_elements: u64,
    /// Bytes of results that were stored in a narrower dtype than the program sees.
    pub low_bytes: u64,
    /// Ops that ran once more because their results were [not kept](crate::Autocast::recompute). These runs are not counted in
    /// `ops`.
    pub recomputed: u64,
}

impl AutocastReport {
    /// How many ops ran in `dtype`.
    pub fn runs(&self, dtype: DType) -> u64 {
        self.ops.iter().map(|count| count.runs(dtype)).sum()
    }

    /// How many ops ran in fp8.
    pub fn fp8_runs(&self) -> u64 {
        self.ops.iter().map(OpCount::fp8_runs).sum()
    }

    /// How often `op` ran in fp8.
    pub fn fp8_runs_of(&self, op: Op) -> u64 {
        let count = self.ops.iter().find(|count| count.op == op);
        count.map_or(0, OpCount::fp8_runs)
    }

    /// How often `op` ran in `dtype`.
    pub fn runs_of(&self, op: Op, dtype: DType) -> u64 {
        let count = self.ops.iter().find(|count| count.op == op);
        count.map_or(0, |count| count.runs(dtype))
    }
}

impl fmt::Display for AutocastReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<36} {:>10} {:>10} {:>10} {:>10} {:>10}",
            "op", "fp8", "f16", "bf16", "f32", "f64"
        )?;
        for count in &self.ops {
            write!(f, "{:<36} {:>10}", count.op, count.fp8)?;
            for runs in count.runs {
                write!(f, " {runs:>10}")?;
            }
            writeln!(f)?;
        }
        write!(
            f,
            "{} casts made ({} elements), {} saved; {} bytes kept low; {} ops recomputed",
            self.casts, self.cast_elements, self.casts_saved, self.low_bytes, self.recomputed
        )
    }
}
