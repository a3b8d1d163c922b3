//! The GPU: its memory, kernels, and clock.

use std::{
    collections::HashMap,
    fs::OpenOptions,
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, LazyLock, Mutex, MutexGuard},
};

use ptx_machine::{Argument, Global, Kernel, Launch, TensorMap};

use crate::model::MEMORY;

/// What is wrong, by the numbers of `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Error {
    InvalidValue = 1,
    OutOfMemory = 2,
    InvalidDevice = 101,
    InvalidPtx = 218,
    NotFound = 500,
    IllegalAddress = 700,
    LaunchFailed = 719,
    NotSupported = 801,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// The GPU of the process.
pub(crate) struct Gpu {
    memory: Global,
    /// The sizes of what is allocated.
    sizes: HashMap<u64, usize>,
    kernels: HashMap<u64, Arc<Kernel>>,
    tensor_maps: HashMap<u64, TensorMap>,
    /// When events were recorded.
    events: HashMap<u64, u64>,
    last: u64,
    /// The instructions that all kernels ran.
    clock: u64,
    /// Whether a kernel has failed.
    failed: bool,
}

/// An argument of a launch: bytes, or the number of a tensor map.
pub(crate) enum Given {
    Bytes(Vec<u8>),
    TensorMap(u64),
}

impl Default for Gpu {
    fn default() -> Self {
        Self {
            memory: Global::poisoned(),
            sizes: HashMap::new(),
            kernels: HashMap::new(),
            tensor_maps: HashMap::new(),
            events: HashMap::new(),
            last: 0,
            clock: 0,
            failed: false,
        }
    }
}

impl Gpu {
    /// Exclusive use of it. Errors if a kernel has failed before.
    pub(crate) fn get() -> Result<MutexGuard<'static, Self>> {
        static GPU: LazyLock<Mutex<Gpu>> = LazyLock::new(Mutex::default);
        let gpu = GPU.lock().map_err(|_| Error::LaunchFailed)?;
        match gpu.failed {
            true => Err(Error::LaunchFailed),
            false => Ok(gpu),
        }
    }

    /// Something to tell handles apart by.
    pub(crate) fn new_handle(&mut self) -> u64 {
        self.last += 16;
        self.last
    }

    pub(crate) fn allocate(&mut self, size: usize) -> Result<u64> {
        match size {
            0 => Err(Error::InvalidValue),
            // Addresses of buffers are 4 GiB apart.
            _ if size >= 1 << 32 || self.used() + size > MEMORY => Err(Error::OutOfMemory),
            _ => {
                let address = self.memory.allocate(size);
                self.sizes.insert(address, size);
                Ok(address)
            }
        }
    }

    pub(crate) fn used(&self) -> usize {
        self.sizes.values().sum()
    }

    pub(crate) fn free(&mut self, address: u64) -> Result<()> {
        self.sizes.remove(&address).ok_or(Error::InvalidValue)?;
        self.memory.free(address).map_err(|_| Error::InvalidValue)
    }

    pub(crate) fn read(&mut self, address: u64, size: usize) -> Result<Vec<u8>> {
        let bytes = self.memory.copy(address, size);
        self.checked(bytes, Error::IllegalAddress)
    }

    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        let done = self.memory.write_from_host(address, bytes);
        self.checked(done, Error::IllegalAddress)
    }

    /// Prints an error, after which the GPU fails.
    fn checked<T>(&mut self, result: std::result::Result<T, String>, error: Error) -> Result<T> {
        result.map_err(|reason| {
            eprintln!("ptx-driver: {reason}");
            self.failed = true;
            error
        })
    }

    /// A module, which is its only kernel.
    pub(crate) fn load(&mut self, ptx: &str) -> Result<u64> {
        let kernel = catch_unwind(|| Kernel::new(ptx)).map_err(|_| {
            // The panic has said what it does not know.
            let path = std::env::temp_dir().join("ptx-driver-unknown.ptx");
            if std::fs::write(&path, ptx).is_ok() {
                eprintln!("ptx-driver: in {}", path.display());
            }
            Error::InvalidPtx
        })?;
        let handle = self.new_handle();
        self.kernels.insert(handle, Arc::new(kernel));
        Ok(handle)
    }

    pub(crate) fn kernel(&self, module: u64) -> Result<&Arc<Kernel>> {
        self.kernels.get(&module).ok_or(Error::InvalidValue)
    }

    pub(crate) fn unload(&mut self, module: u64) {
        self.kernels.remove(&module);
    }

    pub(crate) fn add_tensor_map(&mut self, map: TensorMap) -> u64 {
        let handle = self.new_handle();
        self.tensor_maps.insert(handle, map);
        handle
    }

    pub(crate) fn launch(
        &mut self,
        module: u64,
        grid: [u32; 3],
        threads: [u32; 3],
        dynamic_shared: usize,
        given: &[Given],
    ) -> Result<()> {
        let kernel = self.kernel(module)?.clone();
        let arguments = given.iter().map(|given| match given {
            Given::Bytes(bytes) => Some(Argument::Bytes(bytes)),
            Given::TensorMap(handle) => {
                Some(Argument::TensorMap(self.tensor_maps.get(handle)?.clone()))
            }
        });
        let launch = Launch {
            grid,
            threads,
            dynamic_shared,
            arguments: arguments
                .collect::<Option<_>>()
                .ok_or(Error::InvalidValue)?,
        };
        let started = std::time::Instant::now();
        let run = AssertUnwindSafe(|| kernel.run(launch, &mut self.memory));
        let run = catch_unwind(run).unwrap_or_else(|_| Err("a panic: see above".into()));
        let count = self.checked(run, Error::LaunchFailed)?;
        self.clock += count;
        log(&format!(
            "{} {grid:?} {threads:?} {count} instructions {:.3} s",
            kernel.name,
            started.elapsed().as_secs_f64()
        ));
        Ok(())
    }

    pub(crate) fn record(&mut self, event: u64) {
        self.events.insert(event, self.clock);
    }

    /// Milliseconds between two events: a microsecond for an instruction and a millisecond more, so that what is measured until it took long
    /// enough soon has.
    pub(crate) fn elapsed(&self, [start, end]: [u64; 2]) -> Result<f32> {
        let at = |event| self.events.get(&event).ok_or(Error::InvalidValue);
        let microseconds = at(end)?.saturating_sub(*at(start)?) + 1000;
        Ok((microseconds as f64 * 1e-3) as f32)
    }
}

fn log(line: &str) {
    let Some(path) = std::env::var_os("PTX_DRIVER_LOG") else {
        return;
    };
    let file = OpenOptions::new().create(true).append(true).open(path);
    // Nothing depends on the log.
    let _ = file.and_then(|mut file| writeln!(file, "{line}"));
}
