//! Ranks that make the same call with other arguments or tensors: all find out, and at once.

use std::{
    thread,
    time::{Duration, Instant},
};

use burn::tensor::{Device, Tensor};
use burn_ddp::{DdpError, ProcessGroup, ReduceOp, TensorOp};

use crate::suite::ranks::{locally, over_tcp};

#[test]
fn arguments_that_cannot_work_are_found_out_like_others() {
    type Calls = fn(&ProcessGroup, bool) -> Result<(), DdpError>;
    // What the odd rank passes, and what all may.
    let calls: [Calls; 5] = [
        |group, odd| {
            group
                .all_to_all(&vec![1u8; if odd { 5 } else { 6 }])
                .map(drop)
        },
        |group, odd| {
            let data = vec![1f32; if odd { 4 } else { 3 }];
            group.reduce_scatter(&data, ReduceOp::Sum).map(drop)
        },
        |group, odd| group.broadcast(&mut [1u8], if odd { 3 } else { 0 }),
        |group, odd| {
            let op = if odd { ReduceOp::Mean } else { ReduceOp::Sum };
            group.reduce(&mut [1i32], op, 1)
        },
        |group, odd| {
            let op = if odd { ReduceOp::Mean } else { ReduceOp::Sum };
            group.all_reduce(&mut [1i32], op)
        },
    ];
    for call in calls {
        // All are told the same, and nothing else has happened.
        let harmless = |group: ProcessGroup| {
            let refused = call(&group, true).unwrap_err();
            assert!(matches!(refused, DdpError::InvalidArgument(_)), "{refused}");
            call(&group, false).unwrap();
        };
        over_tcp(3, 1, harmless);
        locally(3, harmless);
        let body = |group: ProcessGroup| {
            let odd = group.rank() == 2;
            let end = call(&group, odd)
                .and_then(|()| group.barrier())
                .unwrap_err();
            thread::sleep(Duration::from_millis(100));
            end
        };
        let start = Instant::now();
        let ends = over_tcp(3, 1, body).into_iter().chain(locally(3, body));
        for end in ends {
            let DdpError::Diverged { rank, other, .. } = end else {
                panic!("{end}");
            };
            assert!(rank == 2 || other == 2, "{rank} {other}");
        }
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

/// What a rank is told whose tensors have other shapes than the others'.
fn shapes(error: DdpError) -> (usize, usize, String) {
    let DdpError::Diverged {
        rank,
        other,
        call,
        other_call,
        shapes: Some(shapes),
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!(call, other_call);
    (rank, other, shapes.join(" and "))
}

#[test]
fn other_shapes_with_as_many_elements_are_found_out_by_all() {
    let (op, root) = (ReduceOp::Max, 1);
    for op in [
        TensorOp::AllReduce(op),
        TensorOp::Reduce { op, root },
        TensorOp::Broadcast { root },
        TensorOp::ReduceScatter(op),
        TensorOp::AllToAll,
    ] {
        let body = |group: ProcessGroup| {
            let shape = if group.rank() == 1 { [12, 2] } else { [6, 4] };
            let tensor = Tensor::<2>::ones(shape, &Device::flex());
            let told = shapes(group.collective(op, tensor).unwrap_err());
            assert_eq!(told, (0, 1, "[6, 4] and [12, 2]".into()), "{op:?}");
            assert!(group.fault().is_some());
        };
        over_tcp(3, 1, body);
        locally(2, body);
    }
}

#[test]
fn rows_of_an_all_gather_and_messages_have_one_shape_too() {
    let told = locally(2, |group| {
        let rank = group.rank();
        // As many elements of a row, and of all rows; their number may differ.
        let rows = [[1, 2, 3], [4, 3, 2]][rank];
        let tensor = Tensor::<3>::ones(rows, &Device::flex());
        shapes(group.collective(TensorOp::AllGather, tensor).unwrap_err())
    });
    assert_eq!(told, vec![(0, 1, "[_, 2, 3] and [_, 3, 2]".to_string()); 2]);
    let told = over_tcp(2, 1, |group| {
        let tensor = |shape: [usize; 2]| Tensor::<2>::ones(shape, &Device::flex());
        match group.rank() {
            0 => {
                let sent = group.send_tensor(tensor([2, 3]), 1);
                sent.and_then(|()| group.barrier()).unwrap_err()
            }
            _ => group.recv_tensor(tensor([3, 2]), 0).unwrap_err(),
        }
        .to_string()
    });
    for told in told {
        let call = "send/recv(f32 x 6) #0";
        let expected = format!(
            "ranks diverged: rank 1 called {call} over [3, 2], but rank 0 called {call} over [2, 3]"
        );
        assert_eq!(told, expected);
    }
}

#[test]
fn tensors_that_cannot_work_on_one_rank_are_found_out_by_all() {
    for (op, odd) in [
        (TensorOp::AllToAll, [3, 4]),
        (TensorOp::AllToAll, [5, 2]),
        (TensorOp::ReduceScatter(ReduceOp::Sum), [1, 12]),
        (TensorOp::AllGather, [2, 0]),
    ] {
        let ends = locally(2, |group| {
            let shape = if group.rank() == 1 { odd } else { [4, 3] };
            let tensor = Tensor::<2>::ones(shape, &Device::flex());
            group.tensor_backend(&Device::flex()).unwrap();
            group.collective(op, tensor).unwrap_err()
        });
        for end in ends {
            assert!(matches!(end, DdpError::Diverged { .. }), "{op:?}: {end}");
        }
    }
}

/// Enough ranks for shapes to be compared along a tree.
#[test]
fn one_of_many_ranks_with_another_shape_is_named() {
    for odd in [None, Some(0), Some(7), Some(19)] {
        let ends = locally(20, |group| {
            let rows = if odd == Some(group.rank()) { 2 } else { 3 };
            let tensor = Tensor::<2>::ones([rows, 6 / rows], &Device::flex());
            let sum = group.collective(TensorOp::AllReduce(ReduceOp::Sum), tensor);
            sum.map(|sum| sum.into_data().iter::<f32>().collect::<Vec<_>>())
        });
        for end in ends {
            let Some(odd) = odd else {
                assert_eq!(end.unwrap(), [20.0; 6]);
                continue;
            };
            let error = end.unwrap_err();
            let DdpError::Diverged {
                rank,
                other,
                shapes: Some(shapes),
                ..
            } = error
            else {
                panic!("{error}");
            };
            assert_eq!((rank, other), (0, odd.max(1)));
            let expected = if odd == 0 {
                ["[2, 3]", "[3, 2]"]
            } else {
                ["[3, 2]", "[2, 3]"]
            };
            assert_eq!(*shapes, expected);
        }
    }
}

/// Nobody sends anything that the others could compare with what they expect.
#[test]
fn ranks_that_all_receive_find_out() {
    type Call = fn(&ProcessGroup) -> Result<(), DdpError>;
    let pairs: [[Call; 2]; 3] = [
        [
            |group| group.broadcast(&mut [1u8], 1),
            |group| group.broadcast(&mut [1u8], 0),
        ],
        [
            |group| group.reduce(&mut [1f32], ReduceOp::Sum, 0),
            |group| group.reduce(&mut [1f32], ReduceOp::Sum, 1),
        ],
        [
            |group| group.reduce(&mut [1f32], ReduceOp::Sum, 0),
            |group| group.broadcast(&mut [1f32], 0),
        ],
    ];
    for pair in pairs {
        let body = |group: ProcessGroup| {
            group.barrier().unwrap();
            pair[group.rank()](&group).unwrap_err()
        };
        let start = Instant::now();
        for end in over_tcp(2, 1, body).into_iter().chain(locally(2, body)) {
            let DdpError::Diverged {
                call, other_call, ..
            } = &end
            else {
                panic!("{end}");
            };
            assert_eq!((call.sequence, other_call.sequence), (1, 1));
            assert_ne!(call, other_call);
        }
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
