//! What does an all-reduce of a tensor through a process group cost, compared with NCCL called directly?
//!
//! On one rank, and on two threads as ranks that share the GPU, if `NCCL_MULTI_RANK_GPU_ENABLE=1` allows it (NCCL 2.30 and
//! newer). The group returns a new tensor each time. Called directly, NCCL writes to the same memory each time. Arguments choose
//! sizes by name.

use benches::{
    Comparison, Goal, Goals, Partner, is_selected, log_warnings, share_of_time, time_left,
};
use burn::tensor::{Device, Tensor, TensorData};
use burn_ddp::{Backend, DdpError, LocalGroup, ProcessGroup, ReduceOp, TensorOp};
use cudarc::{
    driver::{CudaContext, CudaSlice, CudaStream},
    nccl::{
        result::get_nccl_version,
        safe::{self, Comm, Id},
    },
};
use std::{process::ExitCode, sync::Arc, time::Duration};

/// The numbers of f32 elements, the rounds in which they are timed, and the names of the sizes.
const SIZES: [(usize, usize, &str); 4] = [
    (1 << 10, 500, "4 KB"),
    (1 << 18, 500, "1 MB"),
    (25 << 18, 200, "25 MB"),
    (1 << 26, 50, "256 MB"),
];

/// The smallest number of elements for which the bandwidth of two ranks is judged. Below, the time is that of launching a kernel.
const JUDGED: usize = 25 << 18;

/// The code of the first NCCL version that allows ranks to share a GPU.
const SHARING: i32 = 23_000;

const DIRECTLY: &str = "NCCL, directly";
const GROUP: &str = "process group";

fn main() -> ExitCode {
    log_warnings();
    // The time limit counts from here.
    time_left();
    // First through a group, whose error says what is missing: cudarc panics without the library.
    if let Err(error) = all_reduce_one() {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    let version = get_nccl_version().expect("NCCL is there");
    let allowed = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
    let shared = allowed && version >= SHARING;
    println!("NCCL {version}\n");
    if !shared {
        println!(
            "Skipped: two ranks on one GPU, for which NCCL {SHARING} and NCCL_MULTI_RANK_GPU_ENABLE=1 are needed\n"
        );
    }
    let sizes = SIZES.into_iter().filter(|(_, _, size)| is_selected(size));
    let sizes: Vec<_> = sizes.collect();
    let cases =
        (1..=1 + usize::from(shared)).flat_map(|ranks| sizes.iter().map(move |size| (ranks, size)));
    let cases: Vec<_> = cases.collect();
    for (number, (ranks, (elements, rounds, size))) in cases.iter().enumerate() {
        compare(
            *ranks,
            *elements,
            *rounds,
            size,
            share_of_time(cases.len() - number),
        );
    }
    ExitCode::SUCCESS
}

/// An all-reduce of one element on one rank.
fn all_reduce_one() -> Result<(), DdpError> {
    let group = &LocalGroup::with_backend(1, Backend::Nccl)[0];
    let one = Tensor::<1>::ones([1], &Device::cuda(0));
    group.collective(TensorOp::AllReduce(ReduceOp::Sum), one)?;
    Ok(())
}

fn compare(ranks: usize, elements: usize, rounds: usize, size: &str, limit: Option<Duration>) {
    let meaning = match ranks {
        1 => "1 rank: a copy on the device",
        _ => "2 ranks that share a GPU",
    };
    let question = format!("What does an all-reduce of {size} cost? {meaning}");
    let table = Comparison::new(&question, DIRECTLY, directly(ranks, elements))
        .with(GROUP, through_group(ranks, elements))
        .within(limit)
        .run(rounds);
    let bytes = (4 * elements) as f64;
    let table = table.with_column("GB/s of the tensor", |row| {
        format!("{:.1}", bytes / row.median.as_secs_f64() / 1e9)
    });
    println!("{table}");
    if ranks == 1 {
        println!(
            "- not judged: of a copy on the device, which is short, the calls on the host are a large part\n"
        );
    } else if elements >= JUDGED {
        let mut goals = Goals::new(&question);
        let ratio = table.ratio(DIRECTLY, GROUP);
        goals.add_timed(
            "bandwidth, of NCCL's",
            ratio,
            table.rounds,
            Goal::AtLeast(0.98),
        );
        println!("{goals}");
    }
}

/// A job that `ranks` ranks do together. This thread is rank 0.
fn together<W: FnMut() + 'static>(
    ranks: usize,
    work: impl Fn(usize) -> W + Send + Sync + 'static,
) -> impl FnMut() {
    let work = Arc::new(work);
    let theirs = work.clone();
    let partner = (ranks == 2).then(|| Partner::with(move || theirs(1)));
    let mut ours = work(0);
    move || match &partner {
        Some(partner) => partner.join_in(&mut ours),
        None => ours(),
    }
}

fn directly(ranks: usize, elements: usize) -> impl FnMut() {
    let id = Id::new().expect("NCCL is there");
    together(ranks, move |rank| {
        let mut rank = Rank::new(rank, ranks, elements, id);
        move || rank.all_reduce()
    })
}

/// A rank without a process group.
struct Rank {
    comm: Comm,
    stream: Arc<CudaStream>,
    from: CudaSlice<f32>,
    into: CudaSlice<f32>,
}

impl Rank {
    fn new(rank: usize, ranks: usize, elements: usize, id: Id) -> Self {
        let context = CudaContext::new(0).expect("a GPU");
        let stream = context.new_stream().expect("a stream");
        let from = stream.clone_htod(&vec![1.0; elements]).expect("memory");
        let into = stream.alloc_zeros(elements).expect("memory");
        let comm = Comm::from_rank(stream.clone(), rank, ranks, id).expect("the ranks meet");
        let mut rank = Self {
            comm,
            stream,
            from,
            into,
        };
        rank.all_reduce();
        let sums = rank.stream.clone_dtoh(&rank.into).expect("the sums");
        assert!(sums.iter().all(|sum| *sum == ranks as f32));
        rank
    }

    fn all_reduce(&mut self) {
        let sum = safe::ReduceOp::Sum;
        let done = self.comm.all_reduce(&self.from, &mut self.into, &sum);
        done.expect("all-reduce");
        self.stream.synchronize().expect("all-reduce");
    }
}

fn through_group(ranks: usize, elements: usize) -> impl FnMut() {
    let groups = LocalGroup::with_backend(ranks, Backend::Nccl);
    together(ranks, move |rank| {
        let group: ProcessGroup = groups[rank].clone();
        let device = Device::cuda(0);
        let from = Tensor::<1>::from_data(TensorData::ones::<f32, _>([elements]), &device);
        // Returns when the device is done, like the all-reduce by NCCL directly.
        let all_reduce = move || {
            let op = TensorOp::AllReduce(ReduceOp::Sum);
            group.collective(op, from.clone()).expect("all-reduce")
        };
        let sums: Vec<f32> = all_reduce().into_data().try_to_vec().expect("f32");
        assert!(sums.iter().all(|sum| *sum == ranks as f32));
        move || drop(all_reduce())
    })
}
