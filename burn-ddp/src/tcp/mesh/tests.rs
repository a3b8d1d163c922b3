//! Tests of calls that end while bytes still arrive.

use std::{io::Write, thread};

use super::*;
use crate::{ReduceOp, call::tests::barrier, tcp};

/// The result of a call in which rank 0 receives much data from rank 1, which sends whatever happens. Rank 0 takes so long
/// to combine a quarter of a MiB that more is always waiting.
fn receive(
    slowly: fn(ReduceOp, &mut [u8], &[u8]),
    limit: Duration,
    before: impl Fn(&Mesh),
) -> Result<(), DdpError> {
    let folder = tempfile::tempdir().unwrap();
    let place = tcp::Place::File(folder.path().join("master"));
    let long = Deadline::after(Duration::from_secs(60));
    let call = Call {
        kind: CallKind::Reduce,
        ..barrier()
    };
    const LEN: usize = 64 << 20;
    thread::scope(|scope| {
        let place = &place;
        scope.spawn(move || {
            let mesh = tcp::connect_mesh(place, 1, 2, "s", 1, long).unwrap();
            let mut stream = &mesh.lanes[0][0];
            stream.set_nonblocking(false).unwrap();
            let sent = stream.write_all(&call.encode());
            // Fails when the other side gives up.
            let _ = sent.and_then(|()| stream.write_all(&vec![0; LEN]));
        });
        let mesh = tcp::connect_mesh(place, 0, 2, "s", 1, long).unwrap();
        before(&mesh);
        let mut into = vec![0u8; LEN];
        let incoming = Incoming {
            fold: Some((call.op, slowly)),
            ..Incoming::copy(1, &mut into)
        };
        mesh.exchange(&call, vec![], vec![incoming], Deadline::after(limit))
    })
}

#[test]
fn time_is_over_though_bytes_still_come() {
    let slowly = |_, _: &mut [u8], _: &[u8]| thread::sleep(Duration::from_millis(5));
    let result = receive(slowly, Duration::from_millis(20), |_| ());
    let Err(DdpError::Timeout { ranks, .. }) = &result else {
        panic!("it takes longer than that: {result:?}");
    };
    assert_eq!(ranks, &[1]);
}

#[test]
fn a_fault_ends_a_call_though_bytes_still_come() {
    let slowly = |_, _: &mut [u8], _: &[u8]| thread::sleep(Duration::from_millis(20));
    let result = receive(slowly, Duration::from_secs(60), |mesh| {
        mesh.fail(DdpError::RankDied { rank: 2 });
    });
    let died = matches!(result, Err(DdpError::RankDied { rank: 2 }));
    assert!(died, "{result:?}");
}

#[test]
fn a_rank_that_does_not_connect_for_a_duplicate_holds_it_up() {
    let folder = tempfile::tempdir().unwrap();
    let place = tcp::Place::File(folder.path().join("master"));
    let long = Deadline::after(Duration::from_secs(60));
    let call = Call {
        kind: CallKind::Duplicate,
        ..barrier()
    };
    thread::scope(|scope| {
        let connect = |rank| tcp::connect_mesh(&place, rank, 2, "s", 1, long).unwrap();
        let other = scope.spawn(move || connect(1));
        let mesh = connect(0);
        let _other = other.join().unwrap();
        // The call in which the ranks agree on a number.
        mesh.exchange(&call, vec![], vec![], long).unwrap();
        let short = Deadline::after(Duration::from_millis(200));
        let result = mesh.duplicate(7, &[0, 1], short).map(drop);
        let Err(DdpError::Timeout {
            ranks, call: held, ..
        }) = &result
        else {
            panic!("{result:?}");
        };
        assert_eq!((&ranks[..], held), (&[1][..], &call));
    });
}
