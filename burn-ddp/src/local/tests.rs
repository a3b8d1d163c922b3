//! Which ranks are blamed, and when a communicator is forgotten.

use std::thread;

use super::*;

/// Runs code on a thread for each rank, and returns the results.
pub(crate) fn on_ranks<R: Send>(
    groups: Vec<ProcessGroup>,
    code: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let code = &code;
        let ranks = groups.into_iter();
        let ranks: Vec<_> = ranks
            .map(|group| scope.spawn(move || code(group)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn call(kind: CallKind, sequence: u64) -> Call {
    Call {
        sequence,
        kind,
        ..crate::call::tests::barrier()
    }
}

#[test]
fn messages_say_nothing_of_the_calls_of_all() {
    let hub = Arc::new(Hub::default());
    let ranks = [0, 1, 2].map(|rank| Local::new(&hub, rank, 0, (0..3).collect()));
    let short = Deadline::after(Duration::from_millis(50));
    // Rank 1 has sent many messages, but made no collective call.
    for sequence in 0..5 {
        let outgoing = vec![Outgoing::new::<u8>(2, &[])];
        let message = call(CallKind::Message, sequence);
        ranks[1]
            .exchange(&message, outgoing, vec![], short)
            .unwrap();
    }
    let barrier = call(CallKind::Barrier, 0);
    ranks[2].exchange(&barrier, vec![], vec![], short).unwrap();
    let (late, why) = ranks[0].blame(&barrier, &[1]);
    let expected = format!("not in this call yet{IF_LATE}");
    assert_eq!((late, why), (vec![1], expected));

    let incoming = vec![Incoming::copy::<u8>(1, &mut [])];
    let message = call(CallKind::Message, 0);
    let error = ranks[0].exchange(&message, vec![], incoming, short);
    let Err(DdpError::Timeout { ranks, why, .. }) = error else {
        panic!("nobody sent it");
    };
    let expected = format!("the message did not come{IF_LATE}");
    assert_eq!((ranks, why), (vec![1], expected));
}

#[test]
fn a_communicator_is_forgotten_when_all_have_left_it() {
    let hub = Arc::new(Hub::default());
    let ranks = [0, 1].map(|rank| Local::new(&hub, rank, 0, (0..2).collect()));
    let limit = Deadline::after(Duration::from_secs(60));
    let [first, second] = ranks.each_ref().map(|rank| {
        let made = rank.duplicate(1, &[0, 1], limit);
        made.unwrap()
    });
    let message = call(CallKind::Message, 0);
    let payload = [1u8, 2, 3];
    let outgoing = vec![Outgoing::new(1, &payload)];
    first.exchange(&message, outgoing, vec![], limit).unwrap();
    drop(first);
    // What rank 0 sent before it left is still received; then its absence is noticed at once.
    let mut received = [0u8; 3];
    let incoming = vec![Incoming::copy(0, &mut received)];
    second.exchange(&message, vec![], incoming, limit).unwrap();
    let incoming = vec![Incoming::copy::<u8>(0, &mut [])];
    let barrier = call(CallKind::Barrier, 0);
    let error = second.exchange(&barrier, vec![], incoming, limit);
    assert!(
        matches!(
            error,
            Err(DdpError::RankLeft {
                rank: 0,
                calls: 0,
                ..
            })
        ),
        "{error:?}"
    );
    assert_eq!(received, payload);
    let is_known = || {
        let state = hub.state();
        state.communicators.contains_key(&(1, [0, 1].into()))
    };
    assert!(is_known());
    drop(second);
    assert!(!is_known());
}
