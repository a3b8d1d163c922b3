//! NCCL on NVIDIA GPUs: two ranks, each with a GPU of its own or, with NCCL 2.30 or newer, sharing one.

use std::time::{Duration, Instant};

use burn::tensor::Device;
#[cfg(feature = "cuda")]
use burn_ddp::NcclError;
use burn_ddp::{Backend, DdpError, LocalGroup, ProcessGroup, ReduceOp};
use nix::sys::signal::Signal;

use crate::suite::ranks::{meeting_place, start};

/// Whether there is none, which is said.
fn no_gpu() -> bool {
    let none = !cfg!(feature = "cuda") || !std::path::Path::new("/dev/nvidiactl").exists();
    if none {
        eprintln!("skipped: no NVIDIA GPU, or built without the feature cuda");
    }
    none
}

#[test]
fn two_ranks_with_gpus() {
    if no_gpu() {
        return;
    }
    let (_folder, url) = meeting_place();
    for rank in start("nccl", 2, &url, 120.0) {
        let output = rank.succeed(400);
        assert!(output.contains("RESULT ok"), "{output}");
        if output.contains("skipped") {
            eprintln!("{output}");
        }
    }
}

#[test]
fn threads_with_gpus() {
    if no_gpu() {
        return;
    }
    // In a process of its own, which has NCCL's variables.
    let (_folder, url) = meeting_place();
    let process = start("nccl threads", 1, &url, 120.0).pop().unwrap();
    let output = process.succeed(400);
    assert!(output.contains("RESULT ok"), "{output}");
    if output.contains("skipped") {
        eprintln!("{output}");
    }
}

/// NCCL's kernels would spin for ever; the control plane knows who is lost.
#[test]
fn a_rank_that_is_lost_in_a_call_of_nccls_is_named() {
    if no_gpu() {
        return;
    }
    let losses = [
        (Signal::SIGKILL, 60.0, "rank 1 died"),
        (Signal::SIGSTOP, 5.0, "waiting for ranks [1]"),
    ];
    for (signal, timeout, named) in losses {
        let (_folder, url) = meeting_place();
        let mut ranks = start("nccl for ever", 2, &url, timeout);
        let printed = ranks[1].wait_for_steps(3);
        if printed.contains("skipped") {
            eprintln!("{printed}");
            return;
        }
        let lost = ranks.pop().unwrap();
        lost.signal(signal);
        let start = Instant::now();
        let output = ranks.pop().unwrap().fail(60);
        assert!(output.contains(named), "{output}");
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{:?}",
            start.elapsed()
        );
    }
}

/// One rank gets NCCL where it asks for it, and its calls are NCCL's then.
#[test]
fn one_rank_with_a_gpu() {
    if !no_gpu() {
        #[cfg(feature = "cuda")]
        one_rank();
    }
}

#[cfg(feature = "cuda")]
fn one_rank() {
    let group = LocalGroup::with_backend(1, Backend::Nccl).remove(0);
    let device = Device::cuda(0);
    match group.tensor_backend(&device) {
        Err(DdpError::Nccl {
            reason: reason @ NcclError::NotFound { .. },
            ..
        }) => eprintln!("skipped: {reason}"),
        backend => {
            assert_eq!(backend.unwrap(), Backend::Nccl);
            crate::suite::tensors::check_types(&group, &device);
        }
    }
}

/// One rank that asks for NCCL is a group as others are: what is on the host goes through its calls.
#[test]
fn one_rank_that_asks_for_nccl_gets_it_or_the_reason() {
    let (_folder, url) = meeting_place();
    let over_tcp = ProcessGroup::builder().backend(Backend::Nccl);
    one_rank_without_nccl(over_tcp.connect(&url, 0, 1).unwrap());
    one_rank_without_nccl(LocalGroup::with_backend(1, Backend::Nccl).remove(0));
}

fn one_rank_without_nccl(group: ProcessGroup) {
    let found = group.tensor_backend(&Device::flex());
    assert!(
        matches!(found, Err(DdpError::Nccl { rank: 0, .. })),
        "{found:?}"
    );

    let group = group.duplicate().unwrap();
    let own = [3.0f32, -1.0, 0.5];
    for op in [
        ReduceOp::Sum,
        ReduceOp::Mean,
        ReduceOp::Min,
        ReduceOp::Product,
    ] {
        let mut data = own;
        group.all_reduce(&mut data, op).unwrap();
        assert_eq!(data, own, "{op:?}");
        group.reduce(&mut data, op, 0).unwrap();
        assert_eq!(data, own, "{op:?}");
        assert_eq!(group.reduce_scatter(&own, op).unwrap(), own, "{op:?}");
    }
    let mut data = own;
    group.broadcast(&mut data, 0).unwrap();
    assert_eq!(data, own);
    assert_eq!(group.all_gather(&own).unwrap(), own);
    assert_eq!(group.all_gather_uneven(&own).unwrap(), [own]);
    assert_eq!(group.all_to_all(&own).unwrap(), own);
    assert!(group.all_gather::<i64>(&[]).unwrap().is_empty());
    let large: Vec<f32> = (0..1 << 20).map(|i| i as f32).collect();
    let mut sums = large.clone();
    group.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
    assert_eq!(sums, large);
    group.barrier().unwrap();
    assert_eq!(
        group.abort("enough").to_string(),
        group.barrier().unwrap_err().to_string()
    );
}

/// The GPU of a rank, whose tensors go by NCCL, or why the test is skipped.
#[cfg(feature = "cuda")]
fn gpu_by_nccl(group: &ProcessGroup) -> Result<Result<Device, String>, DdpError> {
    let gpus = Device::enumerate(burn::tensor::DeviceType::Cuda).len();
    let device = Device::cuda(group.rank() % gpus);
    match group.tensor_backend(&device) {
        Ok(backend) => {
            assert_eq!(backend, Backend::Nccl);
            Ok(Ok(device))
        }
        // Not what is tested here.
        Err(DdpError::Nccl {
            reason: reason @ (NcclError::NotFound { .. } | NcclError::SharedGpu { .. }),
            ..
        }) => Ok(Err(format!("skipped: {reason}"))),
        Err(error) => Err(error),
    }
}

/// Every call between threads of one process: two, or four where there are as many GPUs (means of these are
/// exact). On one GPU, both share it.
#[cfg(feature = "cuda")]
pub(crate) fn threads(_process: ProcessGroup) -> Result<String, DdpError> {
    use burn::tensor::DeviceType;

    use crate::suite::tensors::check_types;

    let gpus = Device::enumerate(DeviceType::Cuda).len();
    let ranks = if gpus >= 4 { 4 } else { 2 };
    let results: Result<Vec<String>, DdpError> = std::thread::scope(|scope| {
        let ranks: Vec<_> = LocalGroup::with_backend(ranks, Backend::Nccl)
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let device = match gpu_by_nccl(&group)? {
                        Ok(device) => device,
                        Err(skipped) => return Ok(skipped),
                    };
                    check_types(&group, &device);
                    Ok(format!("checked {device:?}"))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    Ok(results?.join(", "))
}

/// Means of tensors for ever, with a word after each.
#[cfg(feature = "cuda")]
pub(crate) fn for_ever(group: ProcessGroup) -> Result<String, DdpError> {
    use burn::tensor::Tensor;
    use burn_ddp::TensorOp;

    let device = match gpu_by_nccl(&group)? {
        Ok(device) => device,
        Err(skipped) => return Ok(skipped),
    };
    let mut tensor = Tensor::<1>::from_data([1.5f32; 1000], &device);
    loop {
        tensor = group.collective(TensorOp::AllReduce(ReduceOp::Mean), tensor)?;
        assert_eq!(tensor.to_data().try_to_vec::<f32>().unwrap(), [1.5; 1000]);
        println!("STEP");
    }
}

/// What each of the two does: every call against results worked out by hand, and training against one
/// process with the whole batch.
#[cfg(feature = "cuda")]
pub(crate) fn two_ranks(group: ProcessGroup) -> Result<String, DdpError> {
    use burn_ddp::{Compression, DdpConfig};

    use crate::suite::{
        net::{closest, train_at, train_overlapped},
        overlapped::accumulate_when_overlapped,
        tensors::check_types,
    };

    let device = match gpu_by_nccl(&group)? {
        Ok(device) => device,
        Err(skipped) => return Ok(skipped),
    };
    check_types(&group, &device);
    check_types(&group.subgroup(&[1, 0])?.expect("both are in it"), &device);

    // Burn multiplies f32 in TF32 on tensor cores, of 11 bits, by kernels that depend on the size of the batch.
    let tolerance = 1e-2;
    let buckets = DdpConfig::new().bucket_bytes(600).first_bucket_bytes(100);
    let (_, alone) = train_at(&ProcessGroup::single(), buckets.clone(), 12, device.clone());
    let (_, together) = train_at(&group, buckets.clone(), 12, device.clone());
    let error = closest(&alone.parameters, &together.parameters);
    assert!(error < tolerance, "averaged after backward: {error}");
    let (together, _) = train_overlapped(&group, buckets, 12, device.clone())?;
    let error = closest(&alone.parameters, &together.parameters);
    assert!(error < tolerance, "averaged during backward: {error}");
    // On a layered device, this is an error where gradients leave the GPU.
    accumulate_when_overlapped(&group, device.clone())?;
    let compressed = DdpConfig::new().compression(Compression::BF16);
    let (_, together) = train_at(&group, compressed, 12, device);
    let error = closest(&alone.parameters, &together.parameters);
    assert!(error < 5e-2, "averaged in bf16: {error}");
    let ours: Vec<u32> = together
        .parameters
        .iter()
        .map(|value| value.to_bits())
        .collect();
    let all = group.all_gather(&ours)?;
    assert!(
        all.chunks(ours.len()).all(|theirs| theirs == ours),
        "ranks are equal to the bit"
    );
    Ok("checked".into())
}
