//! Who learns of a fault, and how.

use std::net::TcpListener;

use super::*;

/// The control planes of a star: rank 0 knows all, the others rank 0.
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
    // Rank 2 does not know rank 1: rank 0 passes it on.
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
