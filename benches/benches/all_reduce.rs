//! How close does an all-reduce over TCP come to the bandwidth of the machine's loopback?
//!
//! Two ranks on two threads. An all-reduce of two ranks has to move as many bytes in each direction as the tensor has. The
//! baseline moves the same bytes in both directions of a raw TCP connection. One over the ratio is the share of that rate that
//! the all-reduce reaches, as algorithm and as bus bandwidth (nccl-tests' names; for two ranks they are the same).

use benches::{Comparison, Partner, is_selected, tcp_groups};
use burn_ddp::ReduceOp;
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
};

/// The numbers of f32 elements, the rounds in which they are timed, and the names of the sizes.
const SIZES: [(usize, usize, &str); 4] = [
    (1 << 10, 200, "4 KB"),
    (1 << 16, 100, "256 KB"),
    (1 << 20, 50, "4 MB"),
    (25 << 18, 30, "25 MB"),
];

fn main() {
    for (elements, rounds, size) in SIZES {
        if !is_selected(size) {
            continue;
        }
        let bytes = 4 * elements;
        let table = Comparison::new(
            &format!("What does an all-reduce of {size} over two ranks cost?"),
            "raw loopback streams",
            raw(bytes),
        )
        .with("all-reduce (mean), f32", all_reduce(elements))
        .run(rounds);
        println!("{table}");
        for row in &table.rows {
            let rate = bytes as f64 / row.median.as_secs_f64() / 1e9;
            println!("- {}: algbw = busbw = {rate:.3} GB/s", row.name);
        }
        println!();
    }
}

fn all_reduce(elements: usize) -> impl FnMut() {
    let [ours, theirs] = tcp_groups();
    let mut values = vec![1.0f32; elements];
    let partner = Partner::new(move || {
        let done = theirs.all_reduce(&mut values, ReduceOp::Mean);
        done.expect("all-reduce");
    });
    let mut values = vec![1.0f32; elements];
    move || {
        partner.join_in(|| {
            let done = ours.all_reduce(&mut values, ReduceOp::Mean);
            done.expect("all-reduce");
        });
    }
}

fn raw(bytes: usize) -> impl FnMut() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let ours = TcpStream::connect(listener.local_addr().expect("bound")).expect("loopback");
    let (theirs, _) = listener.accept().expect("loopback");
    for stream in [&ours, &theirs] {
        stream.set_nodelay(true).expect("a TCP stream");
    }
    let (sent, mut received) = (vec![1u8; bytes], vec![0u8; bytes]);
    let partner = Partner::new(move || exchange(&theirs, &sent, &mut received));
    let (sent, mut received) = (vec![1u8; bytes], vec![0u8; bytes]);
    move || partner.join_in(|| exchange(&ours, &sent, &mut received))
}

fn exchange(stream: &TcpStream, send: &[u8], receive: &mut [u8]) {
    thread::scope(|scope| {
        scope.spawn(|| (&*stream).write_all(send).expect("loopback"));
        (&*stream).read_exact(receive).expect("loopback");
    });
}
