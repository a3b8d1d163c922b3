//! A client of PyTorch's TCPStore, with the few requests that a rendezvous under `torchrun` needs.
//!
//! torchrun's agent serves such a store on MASTER_PORT, and expects every rank to be its client
//! (`TORCHELASTIC_USE_AGENT_STORE`). A request starts with one byte for its kind. Strings and values are sent as a u64
//! length, in the machine's byte order, and the bytes.

use std::{io, net::TcpStream, thread, time::Duration};

use super::{
    connection,
    handshake::{limit_to_connect, read_exact, write_all},
    resolve::resolve,
};
use crate::{DdpError, transport::Deadline};

const VALIDATE: u8 = 0;
const VALIDATION: u32 = 0x3C85_F7CE;
const SET: u8 = 1;
const GET: u8 = 3;
const CHECK: u8 = 5;
const READY: u8 = 0;
/// The longest value that is accepted. No address is longer.
const LONGEST: u64 = 4096;

pub(super) struct TorchStore {
    stream: TcpStream,
    address: String,
    deadline: Deadline,
}

impl TorchStore {
    pub(super) fn connect(host: &str, port: u16, deadline: Deadline) -> Result<Self, DdpError> {
        let address = format!("{host}:{port}");
        let attempt = || -> io::Result<TcpStream> {
            let mut last = io::Error::from(io::ErrorKind::NotFound);
            for address in resolve(host, port, deadline).map_err(io::Error::other)? {
                match connection::connect(&address, limit_to_connect(deadline)) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        let stream = loop {
            match attempt() {
                Ok(stream) => break stream,
                Err(error) if deadline.left().is_none() => {
                    return Err(DdpError::Connect {
                        rank: 0,
                        address,
                        after: deadline.after,
                        problem: error.to_string(),
                    });
                }
                Err(_) => thread::sleep(Duration::from_millis(50)),
            }
        };
        let mut request = vec![VALIDATE];
        request.extend_from_slice(&VALIDATION.to_ne_bytes());
        let store = Self {
            stream,
            address,
            deadline,
        };
        store.write(&request)?;
        Ok(store)
    }

    pub(super) fn set(&mut self, key: &str, value: &str) -> Result<(), DdpError> {
        let mut request = vec![SET];
        put(&mut request, key);
        put(&mut request, value);
        self.write(&request)?;
        // The store does not answer a set. Reading the value back ensures that it arrived.
        match self.get(key)? {
            Some(found) if found == value => Ok(()),
            _ => Err(self.failed(io::Error::other("it did not keep a value"))),
        }
    }

    /// The value of a key, if it is set.
    pub(super) fn get(&mut self, key: &str) -> Result<Option<String>, DdpError> {
        let mut request = vec![CHECK];
        request.extend_from_slice(&1u64.to_ne_bytes());
        put(&mut request, key);
        self.write(&request)?;
        let mut ready = [0];
        self.read(&mut ready)?;
        if ready[0] != READY {
            return Ok(None);
        }
        let mut request = vec![GET];
        put(&mut request, key);
        self.write(&request)?;
        let mut length = [0; 8];
        self.read(&mut length)?;
        let length = u64::from_ne_bytes(length);
        if length > LONGEST {
            return Err(self.failed(io::Error::other("it does not speak TCPStore's protocol")));
        }
        let mut value = vec![0; length as usize];
        self.read(&mut value)?;
        String::from_utf8(value)
            .map(Some)
            .map_err(|_| self.failed(io::Error::other("a value is no text")))
    }

    fn write(&self, bytes: &[u8]) -> Result<(), DdpError> {
        write_all(&self.stream, bytes, self.deadline.at).map_err(|error| self.failed(error))
    }

    fn read(&self, bytes: &mut [u8]) -> Result<(), DdpError> {
        read_exact(&self.stream, bytes, self.deadline.at).map_err(|error| self.failed(error))
    }

    fn failed(&self, error: io::Error) -> DdpError {
        DdpError::io(format!("torchrun's store at {}", self.address), error)
    }
}

fn put(request: &mut Vec<u8>, text: &str) {
    request.extend_from_slice(&(text.len() as u64).to_ne_bytes());
    request.extend_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use std::{iter, net::TcpListener, time::Instant};

    use super::*;
    use crate::tcp::handshake::HANDSHAKE;

    #[test]
    fn an_address_that_does_not_answer_takes_no_more_than_the_time_that_is_left() {
        // The listener accepts nobody. Once its queue is full, the kernel answers no more callers.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let call = || TcpStream::connect_timeout(&address, Duration::from_millis(100)).ok();
        let _queue: Vec<TcpStream> = iter::from_fn(call).collect();
        let limit = Duration::from_millis(200);
        let start = Instant::now();
        let store = TorchStore::connect("127.0.0.1", address.port(), Deadline::after(limit));
        let took = start.elapsed();
        let error = store.map(drop).unwrap_err();
        let DdpError::Connect { after, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(*after, limit);
        assert!(took < HANDSHAKE, "{took:?}");
    }
}
