//! Measures the memory that work on a device needs.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// The memory of a device.
pub trait Memory: Sync {
    /// The bytes in use, without free memory that an allocator holds.
    fn in_use(&self) -> u64;

    /// Returns free memory that the allocator holds to the device.
    fn release(&self);
}

/// A device that does not report its memory: nothing is in use.
impl Memory for () {
    fn in_use(&self) -> u64 {
        0
    }

    fn release(&self) {}
}

#[cfg(any(feature = "cpu", feature = "cuda"))]
impl Memory for cubecl::client::Client {
    fn in_use(&self) -> u64 {
        let report = self.memory_report(cubecl::MemoryScope::Device);
        report.usage().bytes_in_use
    }

    /// Releases the free memory of all streams.
    fn release(&self) {
        // Only refused while a graph is recorded, which nothing here does.
        let _ = self.memory_cleanup();
    }
}

/// The largest amount of memory that was seen in use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// The amount in bytes.
    pub bytes: u64,
    /// How often the device was polled during one run of the work, on average.
    pub polls: f64,
}

/// The peak memory of `work`, which runs `times` times. As in `torch.cuda.max_memory_allocated`, free memory
/// that the allocator holds does not count.
///
/// The device is polled all the while, in between its launches, so a short-lived allocation may be missed,
/// and the work takes longer. No other work may run on the device.
///
/// ```
/// use benches::peak_memory;
/// use burn::tensor::{Device, Tensor};
///
/// # #[cfg(feature = "cpu")] {
/// let client = cubecl::Device::Cpu(cubecl::cpu::CpuDevice).client();
/// let kept = Tensor::<1>::ones([1 << 20], &Device::cpu());
/// let peak = peak_memory(&client, 2, || drop(kept.clone().into_data()));
/// assert!(peak.bytes >= 4 << 20);
/// # }
/// assert_eq!(peak_memory(&(), 2, || ()).bytes, 0);
/// ```
pub fn peak_memory(memory: &impl Memory, times: usize, mut work: impl FnMut()) -> Peak {
    let done = AtomicBool::new(false);
    let (bytes, polls) = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let (mut peak, mut polls) = (0, 0u64);
            while !done.load(Ordering::Acquire) {
                peak = memory.in_use().max(peak);
                polls += 1;
            }
            (peak, polls)
        });
        (0..times).for_each(|_| work());
        // Memory that is kept is always seen.
        let last = memory.in_use();
        done.store(true, Ordering::Release);
        let (peak, polls) = watch.join().expect("the device answers");
        (peak.max(last), polls)
    });
    Peak {
        bytes,
        polls: polls as f64 / times as f64,
    }
}
