//! Mistakes of one rank that the numbers of its call do not show: it is told what it did, and the others who did.

use burn::{
    nn::LinearConfig,
    tensor::{DType, Device, Tensor},
};
use burn_ddp::{
    Backend, Call, Ddp, DdpConfig, DdpError, Flaw, LocalGroup, Overlap, ProcessGroup, ReduceOp,
    TensorOp,
};

use crate::suite::{
    overlapped::layered,
    ranks::{locally, over_tcp},
};

const SUM: TensorOp = TensorOp::AllReduce(ReduceOp::Sum);

fn ones(device: &Device) -> Tensor<2> {
    Tensor::ones([2, 32], device)
}

/// A type that no call takes.
fn quantized() -> Tensor<2> {
    let device = Device::flex();
    ones(&device).quantize_dynamic(&device.settings().quantization.scheme)
}

type Make = fn(&ProcessGroup, bool) -> Result<(), DdpError>;

/// Calls that a rank may make by mistake, or as they should be made.
fn calls() -> Vec<(Flaw, Make)> {
    let mut calls: Vec<(Flaw, Make)> = vec![
        (Flaw::NoTensors, |group, odd| {
            let tensors = vec![ones(&Device::flex()); if odd { 0 } else { 2 }];
            group.collective_many(SUM, tensors).map(drop)
        }),
        (Flaw::SeveralTypes, |group, odd| {
            let tensor = ones(&Device::flex());
            let other = tensor
                .clone()
                .cast(if odd { DType::F64 } else { DType::F32 });
            let root = 0;
            let op = TensorOp::Broadcast { root };
            group.collective_many(op, vec![tensor, other]).map(drop)
        }),
        (Flaw::TypeUnsupported, |group, odd| {
            let tensor = if odd {
                quantized()
            } else {
                ones(&Device::flex())
            };
            group.collective(TensorOp::AllGather, tensor).map(drop)
        }),
        (Flaw::TypeUnsupported, |group, odd| {
            let tensor = if odd {
                quantized()
            } else {
                ones(&Device::flex())
            };
            group.collective_async(SUM, tensor)?.wait().map(drop)
        }),
        (Flaw::NoRanks, |group, odd| {
            let list: &[usize] = if odd { &[] } else { &[0] };
            group.subgroup(list).map(drop)
        }),
        (Flaw::UnknownRank, |group, odd| {
            group
                .subgroup(if odd { &[0, 3] } else { &[0, 1] })
                .map(drop)
        }),
        (Flaw::RankTwice, |group, odd| {
            let list: &[usize] = if odd { &[1, 0, 1] } else { &[1, 0] };
            group.subgroup(list).map(drop)
        }),
    ];
    if cfg!(feature = "cpu") {
        calls.push((Flaw::SeveralDevices, |group, odd| {
            let tensors = vec![ones(&Device::flex()), ones(&other_device(odd))];
            group.collective_many(SUM, tensors).map(drop)
        }));
    }
    calls
}

#[cfg(feature = "cpu")]
fn other_device(other: bool) -> Device {
    if other { Device::cpu() } else { Device::flex() }
}

#[cfg(not(feature = "cpu"))]
fn other_device(_other: bool) -> Device {
    Device::flex()
}

/// What a rank gets that has made a mistake. To pass no tensors is one only where others pass some.
fn check_own(end: Result<(), DdpError>, flaw: Flaw, all: bool) {
    match end {
        Ok(()) => assert!(all && flaw == Flaw::NoTensors, "{flaw:?}"),
        Err(DdpError::InvalidArgument(_)) => assert!(flaw != Flaw::NoTensors),
        Err(error) => {
            assert!(!all && flaw == Flaw::NoTensors, "{flaw:?}: {error}");
            check_told(&error, flaw, 1);
        }
    }
}

/// Checks that an error names the rank with a mistake, and says which.
fn check_told(error: &DdpError, flaw: Flaw, odd: usize) {
    let DdpError::Diverged {
        rank,
        call,
        other,
        other_call,
        ..
    } = error
    else {
        panic!("{flaw:?}: {error}");
    };
    let calls = [(*rank, *call), (*other, *other_call)];
    let of = |flaw: Option<Flaw>| -> Vec<(usize, Call)> {
        calls.into_iter().filter(|it| it.1.flaw == flaw).collect()
    };
    assert_eq!((of(Some(flaw)).len(), of(None).len()), (1, 1), "{error}");
    assert_eq!(of(Some(flaw))[0].0, odd, "{error}");
    assert!(error.to_string().contains(&flaw.to_string()), "{error}");
}

#[test]
fn a_mistake_of_all_ranks_harms_nothing() {
    for (flaw, call) in calls() {
        let body = |group: ProcessGroup| {
            check_own(call(&group, true), flaw, true);
            call(&group, false).unwrap();
            check_own(call(&group, true), flaw, true);
            assert!(group.all_reduce_any(true).unwrap());
        };
        over_tcp(3, 1, body);
        locally(2, body);
    }
}

#[test]
fn a_mistake_of_one_rank_is_told_to_all() {
    for (flaw, call) in calls() {
        // Also as the first call of all, before it is settled how tensors travel.
        for settled in [true, false] {
            let body = |group: ProcessGroup| {
                if settled {
                    group.tensor_backend(&Device::flex()).unwrap();
                }
                match group.rank() {
                    1 => check_own(call(&group, true), flaw, false),
                    _ => check_told(&call(&group, false).unwrap_err(), flaw, 1),
                }
                // From now on from every call.
                check_told(&group.barrier().unwrap_err(), flaw, 1);
            };
            over_tcp(3, 1, body);
            locally(2, body);
        }
    }
}

#[test]
fn another_number_of_tensors_is_told_to_all() {
    let body = |group: ProcessGroup| {
        let tensors = vec![ones(&Device::flex()); 2 + group.rank() % 2];
        let error = group.collective_many(TensorOp::AllGather, tensors);
        error.unwrap_err().to_string()
    };
    for error in [over_tcp(3, 1, body), locally(2, body)].concat() {
        assert!(
            error.contains("rank 1 called all_gather(f32 x 96)"),
            "{error}"
        );
        assert!(error.contains("called all_gather(f32 x 64)"), "{error}");
    }
    // As many elements of each row.
    let body = |group: ProcessGroup| {
        let shapes = match group.rank() {
            0 => vec![[2, 4], [2, 4]],
            _ => vec![[2, 8]],
        };
        let tensors = shapes
            .into_iter()
            .map(|it| Tensor::<2>::ones(it, &Device::flex()));
        let error = group.collective_many(SUM, tensors.collect());
        error.unwrap_err().to_string()
    };
    for error in [over_tcp(2, 1, body), locally(2, body)].concat() {
        assert!(error.contains("over [2, 4] [2, 4]"), "{error}");
        assert!(error.contains("over [2, 8]"), "{error}");
    }
}

#[test]
fn a_message_to_oneself_is_no_message() {
    let body = |group: ProcessGroup| {
        let (rank, next) = (group.rank(), 1 - group.rank());
        let tensor = || ones(&Device::flex());
        let mistakes = |group: &ProcessGroup| {
            let ends = [
                group.send(&[1], rank),
                group.recv(&mut [1], rank),
                group.send_recv(&[1], rank, &mut [1], next),
                group.send_recv(&[1], next, &mut [1], rank),
                group.send_async(vec![1], rank).wait(),
                group.recv_async(vec![1], rank).wait().map(drop),
                group.send_tensor(tensor(), rank),
                group.recv_tensor(tensor(), rank).map(drop),
                group.send_tensor_async(tensor(), rank).map(drop),
                group.recv_tensor_async(tensor(), rank).map(drop),
            ];
            for end in ends {
                assert!(matches!(end, Err(DdpError::InvalidArgument(_))), "{end:?}");
            }
        };
        for round in 0..3 {
            // One rank's mistakes are nothing to the other.
            if rank == 0 || round == 2 {
                mistakes(&group);
            }
            let mut received = [0; 2];
            let own = [rank, round].map(|it| it as u32);
            group.send_recv(&own, next, &mut received, next).unwrap();
            assert_eq!(received, [next as u32, round as u32]);
            match rank {
                0 => group.send_tensor(tensor(), 1).unwrap(),
                _ => drop(group.recv_tensor(tensor(), 0).unwrap()),
            }
            assert_eq!(group.all_gather(&[rank as u32]).unwrap(), [0, 1]);
        }
    };
    over_tcp(2, 1, body);
    locally(2, body);
}

/// Sends a tensor from rank 0 to rank 1, of which some may make a mistake.
fn message(group: &ProcessGroup, tensor: Tensor<2>) -> Result<(), DdpError> {
    match group.rank() {
        0 => group.send_tensor(tensor, 1),
        _ => group.recv_tensor(tensor, 0).map(drop),
    }
}

#[test]
fn a_message_that_one_side_cannot_make_is_told_to_the_other() {
    for odd in [0, 1] {
        let body = |group: ProcessGroup| {
            // Both alike harm nothing.
            let refused = message(&group, quantized()).unwrap_err();
            assert!(matches!(refused, DdpError::InvalidArgument(_)), "{refused}");
            message(&group, ones(&Device::flex())).unwrap();
            if group.rank() == odd {
                let refused = message(&group, quantized()).unwrap_err();
                assert!(matches!(refused, DdpError::InvalidArgument(_)), "{refused}");
            } else {
                let told = message(&group, ones(&Device::flex()));
                // A message may be on its way before the other rank looks at it.
                let told = told.and_then(|()| group.barrier()).unwrap_err();
                check_told(&told, Flaw::TypeUnsupported, odd);
            }
        };
        over_tcp(2, 1, body);
        locally(2, body);
    }
}

#[test]
fn a_message_before_anything_was_settled_is_told_to_the_other() {
    let ranks = |body: fn(ProcessGroup)| {
        std::thread::scope(|scope| {
            for group in LocalGroup::with_backend(2, Backend::Nccl) {
                scope.spawn(move || body(group));
            }
        });
    };
    ranks(|group| {
        let refused = message(&group, ones(&Device::flex())).unwrap_err();
        assert!(refused.to_string().contains("tensor_backend"), "{refused}");
        // Both alike harm nothing.
        match group.rank() {
            0 => group.send(&[1f32; 3], 1).unwrap(),
            _ => group.recv(&mut [0f32; 3], 0).unwrap(),
        }
    });
    ranks(|group| match group.rank() {
        0 => {
            let refused = message(&group, ones(&Device::flex())).unwrap_err();
            assert!(refused.to_string().contains("tensor_backend"), "{refused}");
        }
        _ => {
            let told = group.recv(&mut [0f32; 64], 0).unwrap_err();
            check_told(&told, Flaw::Unsettled, 0);
        }
    });
}

#[test]
fn a_model_without_layers_on_one_rank_is_told_to_all() {
    let body = |group: ProcessGroup| {
        let (layers, overlap) = layered(&group, DdpConfig::new()).unwrap();
        let overlapped = |device: &Device, overlap: &Overlap| {
            let model = LinearConfig::new(2, 1).init(device);
            let refused = Ddp::overlapped(&group, overlap.clone(), &model).unwrap_err();
            assert!(matches!(refused, DdpError::InvalidArgument(_)));
            refused.to_string()
        };
        let plain = Device::flex().autodiff();
        let device = if group.rank() == 1 { &plain } else { &layers };
        let told = overlapped(device, &overlap);
        assert!(told.contains("has no layers"), "{told}");
        assert_eq!(told.contains("rank 1"), group.rank() != 1, "{told}");
        // The ranks go on together, with the same if need be.
        assert!(overlapped(&plain, &overlap).contains("has no layers"));
        group.barrier().unwrap();
    };
    over_tcp(3, 1, body);
    locally(2, body);
}
