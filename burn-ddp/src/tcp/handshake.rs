//! The handshake of every connection, in which both sides prove that they know the job's secret.
//!
//! The listener sends a nonce. The caller answers with its [`Hello`], a nonce of its own, and a keyed
//! hash over these and the listener's nonce. The listener answers with a [`Verdict`] and a keyed hash over it and the
//! caller's nonce. All messages have a fixed size, and the handshake has one short deadline, so that neither garbage nor a
//! caller that sends its bytes one by one holds anything up.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use strum::FromRepr;

use crate::transport::Deadline;

/// How long a handshake may take.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);

const MAGIC: [u8; 8] = *b"BURN-DDP";
const VERSION: u16 = 4;
const NONCE: usize = 16;
const MAC: usize = 32;
const HELLO: usize = 32;

/// The key derived from the job's secret.
#[derive(Clone)]
pub(crate) struct Key([u8; 32]);

impl Key {
    pub(crate) fn from_secret(secret: &str) -> Self {
        Self(blake3::derive_key(
            "burn-ddp job secret 1",
            secret.as_bytes(),
        ))
    }

    fn sign(&self, label: &str, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(label.as_bytes());
        for part in parts {
            hasher.update(part);
        }
        hasher.finalize()
    }
}

/// A rank's place in its job, and the settings that all ranks share.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) key: Key,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// The number of connections between any two ranks of a communicator.
    pub(crate) sockets: usize,
}

impl Identity {
    pub(crate) fn hello(&self, purpose: Purpose, session: u64) -> Hello {
        Hello {
            purpose,
            world_size: self.world_size as u32,
            rank: self.rank as u32,
            sockets: self.sockets as u8,
            session,
        }
    }
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Registers at the master, which answers with the table of all ranks' addresses.
    Register {
        /// The caller's own listening port.
        port: u16,
    },
    /// Links two ranks by one lane of a communicator.
    Link { communicator: u32, lane: u32 },
}

/// What a caller says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    pub(crate) world_size: u32,
    pub(crate) rank: u32,
    /// 1 to 64.
    pub(crate) sockets: u8,
    /// The number that the master chose for this run of the job; 0 while registering.
    pub(crate) session: u64,
}

impl Hello {
    fn encode(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        let (purpose, first, second) = match self.purpose {
            Purpose::Register { port } => (1, u32::from(port), 0),
            Purpose::Link { communicator, lane } => (2, communicator, lane),
        };
        bytes[..2].copy_from_slice(&VERSION.to_le_bytes());
        bytes[2] = purpose;
        bytes[3] = self.sockets;
        bytes[4..8].copy_from_slice(&self.world_size.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.rank.to_le_bytes());
        bytes[12..16].copy_from_slice(&first.to_le_bytes());
        bytes[16..20].copy_from_slice(&second.to_le_bytes());
        bytes[20..28].copy_from_slice(&self.session.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HELLO]) -> Result<Self, Verdict> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        if bytes[..2] != VERSION.to_le_bytes() {
            return Err(Verdict::Version);
        }
        Ok(Self {
            purpose: match bytes[2] {
                1 => Purpose::Register {
                    port: word(12) as u16,
                },
                2 => Purpose::Link {
                    communicator: word(12),
                    lane: word(16),
                },
                _ => return Err(Verdict::Version),
            },
            world_size: word(4),
            rank: word(8),
            sockets: bytes[3],
            session: u64::from_le_bytes(bytes[20..28].try_into().expect("8 bytes")),
        })
    }
}

/// The listener's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromRepr)]
#[repr(u8)]
pub(crate) enum Verdict {
    Welcome,
    Version,
    Secret,
    WorldSize,
    RankRange,
    DuplicateRank,
    Session,
    Sockets,
    Begun,
}

impl Verdict {
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Welcome => "it was welcome",
            Self::Version => "the other side speaks another version of the protocol",
            Self::Secret => {
                "the other side is of another job, or the job secrets differ (give each job a MASTER_PORT of its \
                 own, and all its ranks the same BURN_DDP_SECRET)"
            }
            Self::WorldSize => "the world sizes differ",
            Self::RankRange => "its rank is not below the world size",
            Self::DuplicateRank => "another process has the same rank",
            Self::Session => "it belongs to another run of the job",
            Self::Begun => "the job there has begun, with all its ranks",
            Self::Sockets => "the numbers of sockets between two ranks differ",
        }
    }
}

/// Why a caller's handshake did not succeed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The listener refused the caller.
    Refused(Verdict),
    /// The listener does not belong to the job, or the connection failed.
    Stranger(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Stranger(error.to_string())
    }
}

/// How long one attempt to connect may take: as long as a handshake, if that much time is left.
pub(super) fn limit_to_connect(deadline: Deadline) -> Duration {
    let limit = deadline.left().unwrap_or_default().min(HANDSHAKE);
    // `connect_timeout` refuses a limit of 0.
    limit.max(Duration::from_millis(1))
}

/// The caller's side of the handshake, which must be over at `until`, however long a handshake [may take](HANDSHAKE).
pub(crate) fn call(
    stream: &TcpStream,
    key: &Key,
    hello: &Hello,
    until: Instant,
) -> Result<(), Failure> {
    present(stream, key, &hello.encode(), until)
}

fn present(
    stream: &TcpStream,
    key: &Key,
    body: &[u8; HELLO],
    until: Instant,
) -> Result<(), Failure> {
    let deadline = until.min(Instant::now() + HANDSHAKE);
    let mut challenge = [0; MAGIC.len() + NONCE];
    read_exact(stream, &mut challenge, deadline)?;
    let (magic, theirs) = challenge.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(Failure::Stranger("the listener is another program".into()));
    }
    let ours: [u8; NONCE] = rand::random();
    let mac = key.sign("caller", &[theirs, &ours, body]);
    let mut message = Vec::with_capacity(HELLO + NONCE + MAC);
    message.extend_from_slice(body);
    message.extend_from_slice(&ours);
    message.extend_from_slice(mac.as_bytes());
    write_all(stream, &message, deadline)?;

    let mut answer = [0; 1 + MAC];
    read_exact(stream, &mut answer, deadline)?;
    let verdict = Verdict::from_repr(answer[0])
        .ok_or_else(|| Failure::Stranger("the listener's answer makes no sense".into()))?;
    // The signature of a refusal cannot be checked if the listener has another secret.
    if verdict == Verdict::Secret {
        return Err(Failure::Refused(verdict));
    }
    let mac: [u8; MAC] = answer[1..].try_into().expect("32 bytes");
    if key.sign("listener", &[&ours, &answer[..1]]) != mac {
        return Err(Failure::Stranger(
            "the listener does not know the job secret".into(),
        ));
    }
    match verdict {
        Verdict::Welcome => Ok(()),
        verdict => Err(Failure::Refused(verdict)),
    }
}

/// The listener's side of the handshake. `judge` decides about a caller that knows the secret.
///
/// Returns the caller's [`Hello`] if it was welcomed, or the [`Verdict`] that refused it.
pub(crate) fn answer(
    stream: &TcpStream,
    key: &Key,
    judge: impl FnOnce(&Hello) -> Verdict,
) -> io::Result<Result<Hello, Verdict>> {
    let deadline = Instant::now() + HANDSHAKE;
    let nonce: [u8; NONCE] = rand::random();
    let mut challenge = [0; MAGIC.len() + NONCE];
    challenge[..MAGIC.len()].copy_from_slice(&MAGIC);
    challenge[MAGIC.len()..].copy_from_slice(&nonce);
    write_all(stream, &challenge, deadline)?;

    let mut message = [0; HELLO + NONCE + MAC];
    read_exact(stream, &mut message, deadline)?;
    let body: &[u8; HELLO] = message[..HELLO].try_into().expect("32 bytes");
    let theirs = &message[HELLO..HELLO + NONCE];
    let mac: [u8; MAC] = message[HELLO + NONCE..].try_into().expect("32 bytes");
    let hello = Hello::decode(body);
    let verdict = if key.sign("caller", &[&nonce, theirs, body]) != mac {
        Verdict::Secret
    } else {
        hello.as_ref().map_or_else(|verdict| *verdict, judge)
    };
    let code = [verdict as u8];
    let mut reply = code.to_vec();
    reply.extend_from_slice(key.sign("listener", &[theirs, &code]).as_bytes());
    write_all(stream, &reply, deadline)?;
    Ok(match (verdict, hello) {
        (Verdict::Welcome, hello) => hello,
        (verdict, _) => Err(verdict),
    })
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long"));
    }
    Ok(left)
}

/// Fills `bytes` before `deadline`, however slowly they come. Bytes that have already arrived are read even after the
/// deadline, so that a process that was stopped for a while does not miss an answer.
pub(crate) fn read_exact(
    mut stream: &TcpStream,
    mut bytes: &mut [u8],
    deadline: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = left(deadline);
        let patience = *left.as_ref().unwrap_or(&Duration::from_millis(1));
        stream.set_read_timeout(Some(patience))?;
        match stream.read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) if is_pause(&error) => {}
            Err(error) => return Err(error),
        }
        if !bytes.is_empty() {
            left?;
        }
    }
    Ok(())
}

/// Writes all of `bytes` before `deadline`.
pub(crate) fn write_all(
    mut stream: &TcpStream,
    mut bytes: &[u8],
    deadline: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if is_pause(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether to try again, because a call was interrupted or could not proceed just now.
pub(crate) fn is_pause(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

#[cfg(test)]
mod tests;
