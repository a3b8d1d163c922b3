//! The listening side of a rank: a thread that accepts connections, answers their handshakes, and keeps the connections
//! until they are taken.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, PipeReader, PipeWriter},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    descriptors,
    handshake::{self, HANDSHAKE, Hello, Identity, Purpose, Verdict},
};
use crate::{DdpError, transport::Deadline};

/// The largest number of callers that have not proved yet that they know the job's secret. The job's own ranks do so at once,
/// so that the oldest caller is cut off when more come.
const STRANGERS: usize = 256;

/// A rank that registered at the master.
pub(crate) struct Registered {
    pub(crate) stream: TcpStream,
    pub(crate) address: SocketAddr,
    pub(crate) port: u16,
}

#[derive(Default)]
struct Arrivals {
    registered: HashMap<usize, Registered>,
    links: HashMap<(usize, u32, u32), TcpStream>,
    /// Why no caller can be let in at present.
    failed: Option<DdpError>,
}

struct Shared {
    own: Identity,
    session: AtomicU64,
    arrivals: Mutex<Arrivals>,
    arrived: Condvar,
    strangers: Mutex<Strangers>,
}

/// Callers that have not proved yet that they know the job's secret, oldest first.
#[derive(Default)]
struct Strangers {
    next: u64,
    callers: VecDeque<(u64, TcpStream)>,
}

impl Strangers {
    /// Adds a caller, by a second handle of its connection, and returns its number.
    fn take_in(&mut self, caller: TcpStream) -> u64 {
        if self.callers.len() == STRANGERS
            && let Some((_, oldest)) = self.callers.pop_front()
        {
            // This makes its handshake fail. An error only means that the caller has gone.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let number = self.next;
        self.next += 1;
        self.callers.push_back((number, caller));
        number
    }

    fn let_go(&mut self, number: u64) {
        self.callers.retain(|(other, _)| *other != number);
    }
}

/// Accepts connections for as long as it lives.
pub(crate) struct Acceptor {
    shared: Arc<Shared>,
    port: u16,
    /// Closed to end the thread, even while it waits for callers.
    life: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    pub(crate) fn start(listener: TcpListener, own: Identity) -> io::Result<Self> {
        let port = listener.local_addr()?.port();
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            own,
            session: AtomicU64::new(0),
            arrivals: Mutex::default(),
            arrived: Condvar::new(),
            strangers: Mutex::default(),
        });
        let (end, life) = io::pipe()?;
        let thread = thread::Builder::new().name("ddp-accept".into()).spawn({
            let shared = shared.clone();
            move || accept(&listener, &end, &shared)
        })?;
        Ok(Self {
            shared,
            port,
            life: Some(life),
            thread: Some(thread),
        })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Sets the number of the job's run, to which links must belong.
    pub(crate) fn set_session(&self, session: u64) {
        self.shared.session.store(session, Ordering::SeqCst);
    }

    /// Waits until all other ranks have registered.
    pub(crate) fn wait_registered(
        &self,
        deadline: Deadline,
    ) -> Result<HashMap<usize, Registered>, DdpError> {
        let mut arrivals = self.shared.arrivals.lock().expect("no panic under lock");
        let wanted = self.shared.own.world_size - 1;
        loop {
            let left = deadline.left();
            if arrivals.registered.len() == wanted || left.is_none() {
                // Ranks that have died since do not count, and may register again.
                arrivals.registered.retain(|_, it| is_open(&it.stream));
                if arrivals.registered.len() == wanted {
                    return Ok(std::mem::take(&mut arrivals.registered));
                }
            }
            if let Some(error) = &arrivals.failed {
                return Err(error.clone());
            }
            let Some(left) = left else {
                let world_size = self.shared.own.world_size;
                let missing = |rank: &usize| !arrivals.registered.contains_key(rank);
                return Err(DdpError::MissingRanks {
                    missing: (1..world_size).filter(missing).collect(),
                    world_size,
                    after: deadline.after,
                });
            };
            arrivals = self
                .shared
                .arrived
                .wait_timeout(arrivals, left)
                .expect("no panic under lock")
                .0;
        }
    }

    /// Takes the ranks that have registered so far.
    pub(crate) fn take_registered(&self) -> HashMap<usize, Registered> {
        let mut arrivals = self.shared.arrivals.lock().expect("no panic under lock");
        std::mem::take(&mut arrivals.registered)
    }

    /// Waits for the link of a rank. `None` if the time is over, or when `interrupted`.
    pub(crate) fn wait_link(
        &self,
        rank: usize,
        communicator: u32,
        lane: u32,
        deadline: Deadline,
        interrupted: impl Fn() -> bool,
    ) -> Result<Option<TcpStream>, DdpError> {
        let mut arrivals = self.shared.arrivals.lock().expect("no panic under lock");
        loop {
            if let Some(stream) = arrivals.links.remove(&(rank, communicator, lane)) {
                return Ok(Some(stream));
            }
            if let Some(error) = &arrivals.failed {
                return Err(error.clone());
            }
            let Some(left) = deadline.left().filter(|_| !interrupted()) else {
                return Ok(None);
            };
            arrivals = self
                .shared
                .arrived
                .wait_timeout(arrivals, left.min(Duration::from_millis(50)))
                .expect("no panic under lock")
                .0;
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        drop(self.life.take());
        if let Some(thread) = self.thread.take() {
            // The thread does not panic; a failed join leaves nothing to do.
            let _ = thread.join();
        }
    }
}

/// Accepts callers until the pipe `end` is closed.
fn accept(listener: &TcpListener, end: &PipeReader, shared: &Arc<Shared>) {
    // Since when there have been no file descriptors left.
    let mut used_up: Option<Instant> = None;
    loop {
        let wanted = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut wanted = [wanted(listener.as_fd()), wanted(end.as_fd())];
        if poll(&mut wanted, PollTimeout::NONE).is_err() {
            // Interrupted by a signal, or the system is short of memory.
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        if wanted[1].any() == Some(true) {
            return;
        }
        let accepted = listener
            .accept()
            .and_then(|(stream, address)| Ok((stream.try_clone()?, stream, address)));
        let (caller, stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // After the time of a handshake, strangers no longer hold file descriptors.
                if descriptors::are_used_up(&error) {
                    let since = *used_up.get_or_insert_with(Instant::now);
                    if since.elapsed() > HANDSHAKE {
                        shared.set_failed(Some(descriptors::used_up(error)));
                    }
                }
                // With any other error, the caller went away. Others may still come.
                thread::sleep(Duration::from_millis(10));
                continue;
            }
        };
        if used_up.take().is_some() {
            shared.set_failed(None);
        }
        let number = shared.strangers().take_in(caller);
        let handler = thread::Builder::new().name("ddp-handshake".into()).spawn({
            let shared = shared.clone();
            move || {
                welcome(stream, address, number, &shared);
                shared.strangers().let_go(number);
            }
        });
        if handler.is_err() {
            shared.strangers().let_go(number);
        }
    }
}

impl Shared {
    fn set_failed(&self, failed: Option<DdpError>) {
        let mut arrivals = self.arrivals.lock().expect("no panic under lock");
        arrivals.failed = failed;
        self.arrived.notify_all();
    }

    fn strangers(&self) -> MutexGuard<'_, Strangers> {
        self.strangers.lock().expect("no panic under lock")
    }
}

/// Answers one caller, and keeps its connection if it belongs to the job.
fn welcome(stream: TcpStream, address: SocketAddr, number: u64, shared: &Shared) {
    let ready = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_nodelay(true));
    let answer = ready.and_then(|()| {
        handshake::answer(&stream, &shared.own.key, |hello| {
            shared.strangers().let_go(number);
            judge(hello, shared)
        })
    });
    let hello = match answer {
        Ok(Ok(hello)) => hello,
        Ok(Err(verdict)) => {
            // A rank that comes too early, or while another run is ending, calls again.
            let level = match verdict {
                Verdict::Session | Verdict::Begun => log::Level::Debug,
                _ => log::Level::Warn,
            };
            let reason = verdict.reason();
            log::log!(
                level,
                "burn-ddp: refused a connection from {address}: {reason}"
            );
            return;
        }
        Err(error) => {
            log::debug!("burn-ddp: dropped a connection from {address}: {error}");
            return;
        }
    };
    let mut arrivals = shared.arrivals.lock().expect("no panic under lock");
    let rank = hello.rank as usize;
    match hello.purpose {
        Purpose::Register { port } => {
            let newcomer = Registered {
                stream,
                address,
                port,
            };
            arrivals.registered.insert(rank, newcomer);
        }
        Purpose::Link { communicator, lane } => {
            arrivals.links.insert((rank, communicator, lane), stream);
        }
    }
    shared.arrived.notify_all();
}

fn judge(hello: &Hello, shared: &Shared) -> Verdict {
    let own = &shared.own;
    if hello.world_size as usize != own.world_size {
        return Verdict::WorldSize;
    }
    if hello.rank as usize >= own.world_size {
        return Verdict::RankRange;
    }
    if hello.rank as usize == own.rank {
        return Verdict::DuplicateRank;
    }
    if usize::from(hello.sockets) != own.sockets {
        return Verdict::Sockets;
    }
    match hello.purpose {
        Purpose::Register { .. } if shared.session.load(Ordering::SeqCst) != 0 => Verdict::Begun,
        Purpose::Register { .. } => {
            let arrivals = shared.arrivals.lock().expect("no panic under lock");
            match arrivals.registered.get(&(hello.rank as usize)) {
                // A rank that registered and died may register again.
                Some(earlier) if is_open(&earlier.stream) => Verdict::DuplicateRank,
                _ => Verdict::Welcome,
            }
        }
        Purpose::Link { .. } if hello.session != shared.session.load(Ordering::SeqCst) => {
            Verdict::Session
        }
        Purpose::Link { .. } => Verdict::Welcome,
    }
}

/// Whether the other side still holds the connection. It sends nothing while it waits.
fn is_open(stream: &TcpStream) -> bool {
    let mut byte = [0];
    let seen = stream
        .set_nonblocking(true)
        .and_then(|()| stream.peek(&mut byte));
    let reset = stream.set_nonblocking(false);
    reset.is_ok()
        && match seen {
            Ok(read) => read > 0,
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
}
