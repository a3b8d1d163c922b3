//! Measures alpha and beta of this machine, and how well they predict an all-reduce.

use std::{thread, time::Instant};

use super::{AllReduce, Network};
use crate::{DdpError, ProcessGroup, ReduceOp, collective::RING};

/// The sizes in bytes of the messages that are timed, from sizes where only the latency counts to sizes where only the
/// bandwidth counts.
const MESSAGES: [usize; 6] = [64, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20];

/// What was measured between the ranks of one machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// The number of ranks.
    pub ranks: usize,
    /// The network that best fits messages which all ranks send at once, as in a ring.
    pub network: Network,
    /// The network that best fits messages which two ranks send in turn while the others are idle, as in a tree. If
    /// each rank has a machine of its own, this is the same as `network`.
    pub quiet: Network,
    /// The all-reduces. The networks were not fitted to them.
    pub cases: Vec<Case>,
}

/// An all-reduce, as measured and as predicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// The size in bytes, of `f32` elements.
    pub bytes: u64,
    /// The algorithm that [`ProcessGroup::all_reduce`] used.
    pub algorithm: AllReduce,
    /// The measured time, in seconds.
    pub measured: f64,
    /// The time that the model predicts, in seconds.
    pub predicted: f64,
}

/// Times messages between `ranks` threads of this process, over TCP on the loopback interface, fits
/// [`Network`]s to them, and times all-reduces of `sizes` bytes to compare them with the model.
///
/// Most messages are those of all-gathers, in which all ranks send at the same time, as they do in a ring or where each rank
/// sends to all others. The fitted network therefore includes how much the ranks of one machine slow each other down. In a
/// tree, few ranks send at a time, so trees are predicted from messages that go to and fro between two ranks. The model
/// does not include the time for additions. Each time is the median of `repetitions`.
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
/// [`DdpError::InvalidArgument`] for fewer than 2 ranks or no repetitions, and the errors of
/// [`ProcessGroup::connect`].
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
    // The times are those of rank 0's clock.
    results.swap_remove(0)
}

/// A call to time, and its size in bytes.
#[derive(Clone, Copy, Debug)]
enum Timed {
    AllGather(usize),
    ToAndFro(usize),
    AllReduce(usize),
}

fn measure(
    group: &ProcessGroup,
    sizes: &[u64],
    repetitions: usize,
) -> Result<Calibration, DdpError> {
    fit(group.world_size(), sizes, |timed| match timed {
        Timed::AllGather(bytes) => {
            let data = vec![0u8; bytes];
            time(repetitions, || group.all_gather(&data).map(drop))
        }
        Timed::ToAndFro(bytes) => {
            let mut data = vec![0u8; bytes];
            time(repetitions, || to_and_fro(group, &mut data))
        }
        Timed::AllReduce(bytes) => {
            let mut data = vec![0f32; bytes / 4];
            time(repetitions, || group.all_reduce(&mut data, ReduceOp::Sum))
        }
    })
}

/// Sends a message from rank 0 to rank 1 and one back.
fn to_and_fro(group: &ProcessGroup, data: &mut [u8]) -> Result<(), DdpError> {
    match group.rank() {
        0 => group.send(data, 1).and_then(|()| group.recv(data, 1)),
        1 => group.recv(data, 0).and_then(|()| group.send(data, 0)),
        _ => Ok(()),
    }
}

/// Fits networks to the seconds of all-gathers and of messages to and fro, and predicts all-reduces by them.
fn fit(
    ranks: usize,
    sizes: &[u64],
    mut seconds: impl FnMut(Timed) -> Result<f64, DdpError>,
) -> Result<Calibration, DdpError> {
    let others = ranks - 1;
    let mut messages = Vec::with_capacity(MESSAGES.len());
    let mut quiet = Vec::with_capacity(MESSAGES.len());
    for bytes in MESSAGES {
        let both = seconds(Timed::ToAndFro(bytes))?;
        quiet.push((bytes as f64, both / 2.0));
        let seconds = seconds(Timed::AllGather(bytes))?;
        messages.push(match bytes * ranks < RING {
            // To all others at once.
            true => ((others * bytes) as f64, seconds),
            // Around the ring, one after the other.
            false => (bytes as f64, seconds / others as f64),
        });
    }
    let [network, quiet] = [messages, quiet]
        .map(|messages| Network::fit(&messages).expect("messages of several sizes"));
    let mut cases = Vec::with_capacity(sizes.len());
    for &bytes in sizes {
        let measured = seconds(Timed::AllReduce(bytes as usize))?;
        let algorithm = AllReduce::chosen(ranks, bytes);
        let on = match algorithm {
            AllReduce::Tree => quiet,
            _ => network,
        };
        cases.push(Case {
            bytes,
            algorithm,
            measured,
            predicted: algorithm.seconds(on, ranks, bytes),
        });
    }
    Ok(Calibration {
        ranks,
        network,
        quiet,
        cases,
    })
}

/// The median time of `repetitions` successive calls, after one call that does not count.
///
/// There is no barrier between two calls: where a call is short because another rank was ahead, the next is long.
fn time(
    repetitions: usize,
    mut call: impl FnMut() -> Result<(), DdpError>,
) -> Result<f64, DdpError> {
    call()?;
    let mut seconds = Vec::with_capacity(repetitions);
    for _ in 0..repetitions {
        let start = Instant::now();
        call()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[repetitions / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a call takes as long as its messages, one after the other. Messages that a rank sends at the same time
    /// share its link and one latency. Where all ranks send at once, each message is slower.
    struct Machine {
        alpha: f64,
        beta: f64,
        slower: f64,
    }

    impl Machine {
        /// The all-gather and all-reduce of `src/collective`, round by round.
        fn seconds(&self, ranks: usize, timed: Timed) -> f64 {
            let message = |bytes: f64| self.alpha + self.beta * bytes;
            let round = |bytes: f64| self.slower * message(bytes);
            let rounds = |count: usize, bytes: f64| (0..count).map(|_| round(bytes)).sum::<f64>();
            let n = ranks as f64;
            match timed {
                Timed::AllGather(bytes) if bytes * ranks < RING => round((n - 1.0) * bytes as f64),
                Timed::AllGather(bytes) => rounds(ranks - 1, bytes as f64),
                Timed::ToAndFro(bytes) => message(bytes as f64) + message(bytes as f64),
                Timed::AllReduce(bytes) => {
                    let bytes = bytes as f64;
                    match AllReduce::chosen(ranks, bytes as u64) {
                        AllReduce::Direct => round((n - 1.0) * bytes),
                        AllReduce::Ring => rounds(2 * (ranks - 1), bytes / n),
                        // Up and down a binomial tree.
                        _ => 2.0 * n.log2().ceil() * message(bytes),
                    }
                }
            }
        }
    }

    #[test]
    fn a_known_machine_is_recovered_and_its_all_reduces_foretold() {
        let sizes = [1 << 10, 40 << 10, 1 << 20, 8 << 20];
        for ranks in [2, 3, 4, 8] {
            for (alpha, beta, slower) in
                [(20e-6, 0.5e-9, 1.0), (1e-6, 1e-8, 3.0), (1e-3, 1e-10, 2.0)]
            {
                let machine = Machine {
                    alpha,
                    beta,
                    slower,
                };
                let seconds = |timed| Ok(machine.seconds(ranks, timed));
                let calibration = fit(ranks, &sizes, seconds).unwrap();
                for (network, slower) in [(calibration.network, slower), (calibration.quiet, 1.0)] {
                    let Network { latency, bandwidth } = network;
                    let [alpha, beta] = [alpha, beta].map(|it| it * slower);
                    assert!((latency / alpha - 1.0).abs() < 1e-6, "{ranks}: {latency}");
                    assert!(
                        (bandwidth * beta - 1.0).abs() < 1e-6,
                        "{ranks}: {bandwidth}"
                    );
                }
                let algorithms = calibration.cases.iter().map(|case| {
                    assert!(
                        (case.predicted / case.measured - 1.0).abs() < 1e-6,
                        "{case:?}"
                    );
                    case.algorithm
                });
                let mut algorithms: Vec<AllReduce> = algorithms.collect();
                algorithms.dedup();
                assert!(algorithms.contains(&AllReduce::Ring));
                assert!(algorithms.len() > 1);
            }
        }
    }
}
