//! How near does an all-reduce over TCP come to what the machine's loopback carries?
//!
//! Two ranks on two threads. `loopback` moves as many bytes each way over one raw TCP stream a
//! direction, which is what an all-reduce of two ranks has to move; the ratio of the two times at one
//! size is the share of the raw rate that the all-reduce reaches.

use burn_ddp::{ProcessGroup, ReduceOp};
use divan::{Bencher, counter::BytesCount};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
};

fn main() {
    divan::main();
}

/// Elements of f32: 4 KB, 256 KB, 4 MB and the 25 MB of a bucket.
const ELEMENTS: [usize; 4] = [1 << 10, 1 << 16, 1 << 20, 25 << 18];

/// A second rank that does whatever it is told to, until its channel closes.
fn partner(mut work: impl FnMut() + Send + 'static) -> (SyncSender<()>, Receiver<()>) {
    let (start, started) = sync_channel::<()>(0);
    let (done, finished) = sync_channel(0);
    thread::spawn(move || {
        while started.recv().is_ok() {
            work();
            if done.send(()).is_err() {
                break;
            }
        }
    });
    (start, finished)
}

#[divan::bench(args = ELEMENTS, sample_count = 10)]
fn all_reduce(bencher: Bencher, elements: usize) {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("file://{}", folder.path().join("master").display());
    let other = {
        let url = url.clone();
        thread::spawn(move || ProcessGroup::connect(&url, 1, 2).expect("rank 1 connects"))
    };
    let group = ProcessGroup::connect(&url, 0, 2).expect("rank 0 connects");
    let other = other.join().expect("rank 1");
    let mut theirs = vec![1.0f32; elements];
    let (start, finished) = partner(move || {
        other
            .all_reduce(&mut theirs, ReduceOp::Mean)
            .expect("all-reduce");
    });
    let mut ours = vec![1.0f32; elements];
    bencher
        .counter(BytesCount::new(elements * 4))
        .bench_local(|| {
            start.send(()).expect("rank 1 is there");
            group
                .all_reduce(&mut ours, ReduceOp::Mean)
                .expect("all-reduce");
            finished.recv().expect("rank 1 is there");
        });
}

fn exchange(stream: &TcpStream, send: &[u8], receive: &mut [u8]) {
    thread::scope(|scope| {
        scope.spawn(|| (&*stream).write_all(send).expect("loopback"));
        (&*stream).read_exact(receive).expect("loopback");
    });
}

#[divan::bench(args = ELEMENTS, sample_count = 10)]
fn loopback(bencher: Bencher, elements: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let ours = TcpStream::connect(listener.local_addr().expect("bound")).expect("loopback");
    let (theirs, _) = listener.accept().expect("loopback");
    let bytes = elements * 4;
    let (sent, mut received) = (vec![1u8; bytes], vec![0u8; bytes]);
    let (start, finished) = partner(move || exchange(&theirs, &sent, &mut received));
    let (sent, mut received) = (vec![1u8; bytes], vec![0u8; bytes]);
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        start.send(()).expect("the partner is there");
        exchange(&ours, &sent, &mut received);
        finished.recv().expect("the partner is there");
    });
}
