//! Messages between two ranks, beside the calls of all.

use std::{thread, time::Duration};

use burn::tensor::{Device, Tensor};
use burn_ddp::{CallKind, DdpError, ProcessGroup};

use crate::suite::ranks::{impatiently, locally, over_tcp};

/// More than a connection holds by itself.
const LARGE: usize = 20_000_000;

#[test]
fn two_ranks_exchange_large_messages_at_once() {
    over_tcp(2, 2, |group| {
        let other = 1 - group.rank();
        let mut received = vec![0u8; LARGE + other];
        let own = vec![group.rank() as u8 + 1; LARGE + group.rank()];
        group.send_recv(&own, other, &mut received, other).unwrap();
        assert!(received.iter().all(|value| *value == other as u8 + 1));
    });
}

#[test]
fn exchanged_messages_are_messages_like_others() {
    let body = |group: ProcessGroup| {
        let (rank, ranks) = (group.rank(), group.world_size());
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let mut received = [0; 2];
        // One more message from rank 0 to rank 1, so that numbers differ by direction.
        match rank {
            0 => group.send(&[7, 7], 1).unwrap(),
            1 => group.recv(&mut received, 0).unwrap(),
            _ => {}
        }
        for round in 0..3 {
            let own = [rank as i32, round];
            // Rank 2 does by halves what the others do at once.
            match rank {
                2 => {
                    group.recv(&mut received, previous).unwrap();
                    group.send(&own, next).unwrap();
                }
                _ => group
                    .send_recv(&own, next, &mut received, previous)
                    .unwrap(),
            }
            assert_eq!(received, [previous as i32, round]);
        }
        assert!(group.send_recv(&[1], rank, &mut [1], next).is_err());
        assert!(group.send_recv(&[1], next, &mut [1], rank).is_err());
        assert!(group.send_async(vec![1u8], rank).wait().is_err());
    };
    over_tcp(3, 1, body);
    locally(3, body);
}

#[test]
fn a_message_that_does_not_come_is_its_senders_fault_alone() {
    let errors = impatiently(3, |group| {
        // Ranks 1 and 2 have something else to do.
        match group.rank() {
            0 => group.recv(&mut [0f32; 3], 1).unwrap_err(),
            _ => {
                thread::sleep(Duration::from_millis(2500));
                group.barrier().unwrap_err()
            }
        }
    });
    for error in errors {
        let DdpError::Timeout {
            ranks, call, why, ..
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!((&ranks[..], call.kind), (&[1][..], CallKind::Message));
        assert!(why.contains("the message did not come through"), "{why}");
    }
}

#[test]
fn messages_do_not_count_as_calls_of_all() {
    let errors = impatiently(3, |group| {
        for _ in 0..5 {
            match group.rank() {
                1 => group.send(&[1u8], 2).unwrap(),
                2 => group.recv(&mut [0u8], 1).unwrap(),
                _ => {}
            }
        }
        if group.rank() == 1 {
            thread::sleep(Duration::from_millis(2500));
        }
        group.barrier().unwrap_err()
    });
    for error in errors {
        let DdpError::Timeout { ranks, why, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(&ranks[..], &[1], "{why}");
        assert!(why.contains("rank 1 has made 0 calls so far"), "{why}");
    }
}

#[test]
fn messages_count_in_the_numbers_of_calls_and_in_their_time() {
    let body = |group: ProcessGroup| {
        let (rank, other) = (group.rank(), 1 - group.rank());
        let tensor = || Tensor::<1>::ones([3], &Device::flex());
        let messages: [&dyn Fn(); 3] = [
            &|| match rank {
                0 => group.send(&[1u8], other).unwrap(),
                _ => group.recv(&mut [0u8], other).unwrap(),
            },
            &|| {
                let into = &mut [0u8];
                group.send_recv(&[1u8], other, into, other).unwrap();
            },
            &|| match rank {
                0 => group.send_tensor(tensor(), other).unwrap(),
                _ => drop(group.recv_tensor(tensor(), other).unwrap()),
            },
        ];
        for message in messages {
            let before = group.stats();
            message();
            let after = group.stats();
            assert_eq!(after.calls, before.calls + 1);
            assert!(after.time > before.time);
        }
    };
    over_tcp(2, 1, body);
    locally(2, body);
}
