//! Tests of which ranks learn of a fault, and how.

use std::net::TcpListener;

use super::{peer::LONGEST, *};

/// The control planes of a star: rank 0 is connected to all other ranks, and these to rank 0 alone.
fn star(ranks: usize) -> Vec<Control> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut centre = HashMap::new();
    let mut others = Vec::new();
    for rank in 1..ranks {
        let stream = TcpStream::connect(address).unwrap();
        centre.insert(rank, listener.accept().unwrap().0);
        others.push(Control::start(rank, [(0, stream)].into()).unwrap());
    }
    others.insert(0, Control::start(0, centre).unwrap());
    others
}

fn fault_of(control: &Control) -> String {
    let start = Instant::now();
    loop {
        if let Some(fault) = control.fault() {
            return fault.to_string();
        }
        assert!(start.elapsed() < Duration::from_secs(20), "no fault");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn an_error_of_the_system_is_told_in_words() {
    let ranks = star(3);
    let error = DdpError::io("preparing a connection", io::Error::other("no memory"));
    let own = ranks[1].fail(error).to_string();
    assert!(
        own.contains("rank 1 aborted") && own.contains("no memory"),
        "{own}"
    );
    // Rank 2 is not connected to rank 1: rank 0 passes the fault on.
    assert_eq!(fault_of(&ranks[0]), own);
    assert_eq!(fault_of(&ranks[2]), own);
}

#[test]
fn goodbyes_are_waited_for() {
    let mut ranks = star(3);
    drop(ranks.pop());
    let short = Deadline::after(Duration::from_millis(100));
    assert_eq!(ranks[0].wait_for_goodbyes(short), Err(vec![1]));
    drop(ranks.pop());
    let long = Deadline::after(Duration::from_secs(20));
    assert_eq!(ranks[0].wait_for_goodbyes(long), Ok(()));
    assert!(ranks[0].fault().is_none());
}

#[test]
fn what_is_too_long_to_tell_is_cut() {
    let ranks = star(3);
    let reason = "x".repeat(LONGEST);
    let told = ranks[1].fail(DdpError::Aborted { rank: 1, reason });
    let problem = "é".repeat(LONGEST);
    let kept = ranks[2].fail(DdpError::Protocol { rank: 1, problem });
    for (rank, own) in [(1, told), (2, kept)] {
        let text = own.to_string();
        assert!(text.len() < 2 * WORDS, "{}", text.len());
        // Whichever fault came first, no rank is taken for dead.
        let aborted = format!("rank {rank} aborted: ");
        assert!(text.starts_with(&aborted) || text == fault_of(&ranks[0]));
    }
    let fault = fault_of(&ranks[0]);
    assert!(fault.contains("aborted: "), "{}", &fault[..40]);
}

#[test]
fn who_leaves_a_communicator_is_known_for_as_long_as_that_matters() {
    let ranks = star(2);
    let [here, there] = &ranks[..] else {
        panic!("two ranks");
    };
    here.join(5, vec![1]);
    there.join(5, vec![0]);
    let barrier = Call {
        sequence: 2,
        ..crate::call::tests::barrier()
    };
    there.enter(5, &barrier);
    there.leave(5);
    assert_eq!(here.left_after(5, 1), Some(3));
    here.leave(5);

    // A rank may leave before the other has joined.
    there.join(7, vec![0]);
    there.leave(7);
    assert_eq!(here.left_after(7, 1), Some(0));
    here.join(7, vec![1]);
    assert_eq!(here.left_after(7, 1), Some(0));
    here.leave(7);

    // After rank 0 has left, nothing is kept about who leaves.
    here.join(8, vec![1]);
    there.join(8, vec![0]);
    here.leave(8);
    there.leave(8);
    there.join(9, vec![0]);
    there.leave(9);
    assert_eq!(here.left_after(9, 1), Some(0));
    let state = here.shared.state();
    assert_eq!(state.peers[&1].left, [(9, 0)].into());
    assert_eq!(state.joined, HashMap::new());
    drop(state);

    assert_eq!(here.left_after(10, 1), None);
    assert!(here.fault().is_none() && there.fault().is_none());
}

/// Communicators with other members may have the same number.
#[test]
fn ranks_that_do_different_things_in_the_same_place_are_found_out() {
    let ranks = star(4);
    let barrier = crate::call::tests::barrier();
    let broadcast = |root| Call {
        kind: CallKind::Broadcast,
        root,
        ..barrier
    };
    for (rank, members) in [(0, vec![2]), (2, vec![0]), (1, vec![3]), (3, vec![1])] {
        ranks[rank].join(5, members);
    }
    ranks[0].enter(5, &broadcast(0));
    ranks[1].enter(5, &barrier);
    thread::sleep(4 * HEARTBEAT);
    assert!(ranks.iter().all(|rank| rank.fault().is_none()));
    // A difference from the other's next call does not count.
    let next = Call {
        sequence: 1,
        ..broadcast(1)
    };
    ranks[2].enter(5, &next);
    thread::sleep(4 * HEARTBEAT);
    assert!(ranks.iter().all(|rank| rank.fault().is_none()));

    ranks[2].enter(5, &broadcast(1));
    let fault = fault_of(&ranks[0]);
    for text in ["rank 0 called broadcast", "rank 2 called broadcast"] {
        let other = text.replace("rank", "but rank");
        assert!(fault.contains(text) || fault.contains(&other), "{fault}");
    }
}

#[test]
fn a_rank_that_says_nothing_is_silent() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let [mute, alive] = [(); 2].map(|()| {
        let caller = TcpStream::connect(address).unwrap();
        (caller, listener.accept().unwrap().0)
    });
    let start = Instant::now();
    let _other = Control::start(2, [(0, alive.0)].into()).unwrap();
    let control = Control::start(0, [(1, mute.0), (2, alive.1)].into()).unwrap();
    let long = 3 * HEARTBEAT;
    while !control.silent(long, |_| true).contains(&1) {
        assert!(start.elapsed() < Duration::from_secs(20));
        thread::sleep(Duration::from_millis(10));
    }
    assert!(start.elapsed() >= long);
    assert!(control.silent(Duration::ZERO, |rank| rank > 2).is_empty());
    // A rank that has said goodbye is not silent.
    let goodbye = Frame::Goodbye.encode().unwrap();
    (&mute.1).write_all(&goodbye).unwrap();
    let has_left = || {
        let state = control.shared.state();
        state.peers[&1].said_goodbye && state.looked > state.peers[&1].heard
    };
    while !has_left() {
        assert!(start.elapsed() < Duration::from_secs(40));
        thread::sleep(Duration::from_millis(10));
    }
    assert!(control.silent(Duration::ZERO, |rank| rank == 1).is_empty());
}
