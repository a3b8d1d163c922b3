//! Devices in host memory. Their memory has addresses that are no pointers, and work that
//! is put on a stream is done later, by a thread.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use burn::tensor::Shape;

use super::super::ffi::{DeviceStream, Resident, Stream};
use crate::{DdpError, Element};

/// The memory of all devices, by address.
static MEMORY: Mutex<BTreeMap<u64, Vec<u8>>> = Mutex::new(BTreeMap::new());

const DEVICE: u64 = 1 << 40;

fn allocate(device: usize, bytes: usize) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(256);
    let place = NEXT.fetch_add((bytes as u64 + 256) & !255, Ordering::Relaxed);
    let address = DEVICE * (device as u64 + 1) + place;
    // New memory has arbitrary content.
    MEMORY.lock().unwrap().insert(address, vec![0x5a; bytes]);
    address
}

/// The device of an address.
pub(super) fn device_of(address: u64) -> Option<usize> {
    (address / DEVICE)
        .checked_sub(1)
        .map(|device| device as usize)
}

/// Runs `code` on the `len` bytes at an address. Fails unless all belong to one allocation.
fn with_bytes<R>(address: u64, len: usize, code: impl FnOnce(&mut [u8]) -> R) -> Result<R, String> {
    let mut memory = MEMORY.lock().unwrap();
    let found = memory.range_mut(..=address).next_back();
    found
        .and_then(|(start, bytes)| bytes.get_mut((address - start) as usize..)?.get_mut(..len))
        .map(code)
        .ok_or_else(|| {
            format!("an illegal memory access was encountered: {len} bytes at {address:#x}")
        })
}

pub(super) fn read(address: u64, len: usize) -> Result<Vec<u8>, String> {
    with_bytes(address, len, |bytes| bytes.to_vec())
}

pub(super) fn write(address: u64, data: &[u8]) -> Result<(), String> {
    with_bytes(address, data.len(), |bytes| bytes.copy_from_slice(data))
}

/// A tensor on a device.
pub(crate) struct Block {
    device: usize,
    shape: Shape,
    size: usize,
    address: u64,
    made: Option<JoinHandle<()>>,
}

impl Block {
    pub(crate) fn new<T: Element>(device: usize, shape: impl Into<Shape>, data: &[T]) -> Self {
        let mut block = Self::later(device, shape, data.to_vec(), Duration::ZERO);
        block.wait();
        block
    }

    /// A tensor whose elements are written after some time.
    pub(crate) fn later<T: Element>(
        device: usize,
        shape: impl Into<Shape>,
        data: Vec<T>,
        after: Duration,
    ) -> Self {
        let (shape, size) = (shape.into(), size_of::<T>());
        let address = allocate(device, data.len() * size);
        let made = thread::spawn(move || {
            thread::sleep(after);
            write(address, bytemuck::cast_slice(&data)).unwrap();
        });
        Self {
            device,
            shape,
            size,
            address,
            made: Some(made),
        }
    }

    fn wait(&mut self) {
        if let Some(made) = self.made.take() {
            made.join().unwrap();
        }
    }

    pub(crate) fn data<T: Element>(&self) -> Vec<T> {
        let bytes = read(self.address, self.shape.num_elements() * self.size).unwrap();
        bytemuck::pod_collect_to_vec(&bytes)
    }
}

impl Resident for Block {
    fn shape(&self) -> Shape {
        self.shape.clone()
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn room(&mut self, shape: Shape) -> Result<Self, DdpError> {
        let address = allocate(self.device, shape.num_elements() * self.size);
        Ok(Self {
            shape,
            address,
            made: None,
            ..*self
        })
    }

    fn precede(&mut self, stream: &dyn DeviceStream) -> Result<(), DdpError> {
        let Some(made) = self.made.take() else {
            return Ok(());
        };
        put(
            stream.raw() as usize,
            Box::new(move || made.join().unwrap()),
        )
        .map_err(DdpError::Device)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.wait();
        MEMORY.lock().unwrap().remove(&self.address);
    }
}

pub(super) type Job = Box<dyn FnOnce() + Send>;

/// The streams, by the number that stands for a `cudaStream_t` here.
static STREAMS: Mutex<Option<HashMap<usize, mpsc::Sender<Job>>>> = Mutex::new(None);

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// This thread's current device.
pub(super) fn current() -> Option<usize> {
    CURRENT.get()
}

/// Puts work on a stream.
pub(super) fn put(stream: usize, job: Job) -> Result<(), String> {
    let streams = STREAMS.lock().unwrap();
    let stream = streams.as_ref().and_then(|streams| streams.get(&stream));
    let stream = stream.ok_or("invalid resource handle: no such stream")?;
    stream.send(job).map_err(|error| error.to_string())
}

pub(super) struct HostStream {
    device: usize,
    number: usize,
    noted: Option<Arc<AtomicBool>>,
}

impl HostStream {
    pub(super) fn new(device: usize) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (sender, jobs) = mpsc::channel::<Job>();
        thread::spawn(move || jobs.into_iter().for_each(|job| job()));
        let mut streams = STREAMS.lock().unwrap();
        streams.get_or_insert_default().insert(number, sender);
        Self {
            device,
            number,
            noted: None,
        }
    }
}

impl DeviceStream for HostStream {
    fn bind(&self) -> Result<(), String> {
        CURRENT.set(Some(self.device));
        Ok(())
    }

    fn raw(&self) -> Stream {
        self.number as Stream
    }

    fn record(&mut self) -> Result<(), String> {
        let noted = Arc::new(AtomicBool::new(false));
        self.noted = Some(noted.clone());
        put(
            self.number,
            Box::new(move || noted.store(true, Ordering::Release)),
        )
    }

    fn is_done(&self) -> Result<bool, String> {
        Ok(self
            .noted
            .as_ref()
            .is_none_or(|noted| noted.load(Ordering::Acquire)))
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        let mut streams = STREAMS.lock().unwrap();
        streams.get_or_insert_default().remove(&self.number);
    }
}
