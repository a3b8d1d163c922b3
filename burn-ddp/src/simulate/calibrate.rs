//! Alpha and beta of this machine, and how well they foretell an all-reduce.

use std::{thread, time::Instant};

use super::{AllReduce, Network};
use crate::{DdpError, ProcessGroup, ReduceOp, collective::RING};

/// Bytes of the messages that are timed: from those of which only the latency counts to those of which only the
/// bandwidth does.
const MESSAGES: [usize; 6] = [64, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20];

/// What was measured between so many ranks of one machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// The number of ranks.
    pub ranks: usize,
    /// The network that fits the messages best.
    pub network: Network,
    /// All-reduces, which were not fitted to.
    pub cases: Vec<Case>,
}

/// An all-reduce, measured and foretold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// Its bytes of `f32`.
    pub bytes: u64,
    /// The algorithm that [`ProcessGroup::all_reduce`] took.
    pub algorithm: AllReduce,
    /// The seconds that it took.
    pub measured: f64,
    /// The seconds that the model says.
    pub predicted: f64,
}

/// Times messages between `ranks` threads of this process, over TCP on the loopback interface, fits a
/// [`Network`] to them, and times all-reduces of `sizes` bytes beside what the model says of them.
///
/// The messages are those of all-gathers, in which all ranks send at the same time, as they do in an
/// all-reduce; so what the ranks of one machine take from each other is in the network that comes out. Adding up
/// is not in the model. Each time is the least of `repetitions`.
///
/// ```
/// use burn_ddp::simulate::calibrate;
///
/// let calibration = calibrate(2, &[4 << 10], 2)?;
/// let case = calibration.cases[0];
/// println!("measured {:.1e} s, predicted {:.1e} s", case.measured, case.predicted);
/// # Ok::<(), burn_ddp::DdpError>(())
/// ```
///
/// # Errors
///
/// [`DdpError::InvalidArgument`] for fewer than 2 ranks or no repetitions, and what
/// [`ProcessGroup::connect`] may return.
pub fn calibrate(ranks: usize, sizes: &[u64], repetitions: usize) -> Result<Calibration, DdpError> {
    if ranks < 2 || repetitions == 0 {
        return Err(DdpError::InvalidArgument(format!(
            "{ranks} ranks and {repetitions} repetitions; expected at least 2 and 1"
        )));
    }
    let folder =
        tempfile::tempdir().map_err(|error| DdpError::io("making a temporary folder", error))?;
    let url = format!("file://{}", folder.path().join("master").display());
    let mut results = thread::scope(|scope| {
        let ranks: Vec<_> = (0..ranks)
            .map(|rank| {
                let url = &url;
                scope.spawn(move || {
                    let group = ProcessGroup::connect(url, rank, ranks)?;
                    measure(&group, sizes, repetitions)
                })
            })
            .collect();
        let join = |rank: thread::ScopedJoinHandle<'_, _>| rank.join().expect("no panic");
        ranks.into_iter().map(join).collect::<Vec<_>>()
    });
    // Rank 0's clock.
    results.swap_remove(0)
}

fn measure(
    group: &ProcessGroup,
    sizes: &[u64],
    repetitions: usize,
) -> Result<Calibration, DdpError> {
    let others = group.world_size() - 1;
    let mut messages = Vec::with_capacity(MESSAGES.len());
    for bytes in MESSAGES {
        let data = vec![0u8; bytes];
        let seconds = time(group, repetitions, || group.all_gather(&data).map(drop))?;
        messages.push(match bytes * group.world_size() < RING {
            // To all others at once.
            true => ((others * bytes) as f64, seconds),
            // Around the ring, one after the other.
            false => (bytes as f64, seconds / others as f64),
        });
    }
    let network = Network::fit(&messages).expect("messages of several sizes");
    let mut cases = Vec::with_capacity(sizes.len());
    for &bytes in sizes {
        let mut data = vec![0f32; bytes as usize / 4];
        let measured = time(group, repetitions, || {
            group.all_reduce(&mut data, ReduceOp::Sum)
        })?;
        let algorithm = AllReduce::chosen(group.world_size(), bytes);
        cases.push(Case {
            bytes,
            algorithm,
            measured,
            predicted: algorithm.seconds(network, group.world_size(), bytes),
        });
    }
    Ok(Calibration {
        ranks: group.world_size(),
        network,
        cases,
    })
}

/// The least of the times that a call takes, after one that does not count.
fn time(
    group: &ProcessGroup,
    repetitions: usize,
    mut call: impl FnMut() -> Result<(), DdpError>,
) -> Result<f64, DdpError> {
    call()?;
    let mut least = f64::INFINITY;
    for _ in 0..repetitions {
        group.barrier()?;
        let start = Instant::now();
        call()?;
        // When the last rank has it, too.
        group.barrier()?;
        least = least.min(start.elapsed().as_secs_f64());
    }
    let mut barrier = f64::INFINITY;
    for _ in 0..repetitions {
        let start = Instant::now();
        group.barrier()?;
        barrier = barrier.min(start.elapsed().as_secs_f64());
    }
    // The clock's own resolution is the least that anything takes.
    Ok((least - barrier).max(1e-9))
}
