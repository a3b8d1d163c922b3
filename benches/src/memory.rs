//! The memory that work on CubeCL's devices needs.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use burn::tensor::Device;
use cubecl::{MemoryScope, client::Client};

/// The bytes that work has in use on `device`, which is that of `client`, at most, beyond what was in use before: `init` makes the work,
/// which is done `warm_up` times before it counts, so that what tuning takes does not, and then twice. As
/// `torch.cuda.max_memory_allocated` counts, free memory that the allocator holds does not.
///
/// The device is asked over and over meanwhile, in between its launches, so what is allocated for a moment may be missed,
/// and the work takes longer. No other work may be going on there.
///
/// ```
/// use benches::peak_memory;
/// use burn::tensor::{Device, Tensor};
///
/// # #[cfg(feature = "cpu")] {
/// let client = cubecl::Device::Cpu(cubecl::cpu::CpuDevice).client();
/// let device = Device::cpu();
/// let peak = peak_memory(&client, &device, 1, || {
///     let kept = Tensor::<1>::ones([1 << 20], &device);
///     move || drop(kept.clone().into_data())
/// });
/// assert!(peak >= 4 << 20);
/// # }
/// ```
pub fn peak_memory<W: FnMut()>(
    client: &Client,
    device: &Device,
    warm_up: usize,
    init: impl FnOnce() -> W,
) -> u64 {
    let in_use = || {
        client
            .memory_report(MemoryScope::Device)
            .usage()
            .bytes_in_use
    };
    // What was dropped is gone.
    device.sync().expect("the device computes");
    let before = in_use();
    let mut work = init();
    (0..warm_up).for_each(|_| work());
    let done = AtomicBool::new(false);
    let peak = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut peak = 0;
            while !done.load(Ordering::Acquire) {
                peak = in_use().max(peak);
            }
            peak
        });
        work();
        work();
        // What is kept is seen in any case.
        let last = in_use();
        done.store(true, Ordering::Release);
        watch.join().expect("the device answers").max(last)
    });
    drop(work);
    // Layered devices hear of it a little later.
    thread::sleep(Duration::from_millis(200));
    peak.saturating_sub(before)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::tensor::Tensor;
    use cubecl::cpu::CpuDevice;

    use super::*;

    /// What is kept counts, and what is there for a while; what only warms up does not.
    #[test]
    fn it_is_what_the_work_holds_at_once() {
        let client = cubecl::Device::Cpu(CpuDevice).client();
        let device = Device::cpu();
        let ones = |megabytes: usize| {
            let ones = Tensor::<1>::ones([megabytes << 18], &device);
            device.sync().unwrap();
            ones
        };
        let found = [8, 64].map(|size| {
            peak_memory(&client, &device, 1, || {
                let kept = ones(16);
                let mut first = Some(ones(512));
                let (ones, device) = (&ones, &device);
                move || {
                    drop(first.take());
                    let passing = [ones(size), ones(size)];
                    // Long enough to be seen.
                    thread::sleep(Duration::from_millis(50));
                    assert_eq!(kept.shape(), [16 << 18].into());
                    drop(passing);
                    device.sync().unwrap();
                }
            })
        });
        let megabytes = found.map(|bytes| bytes >> 20);
        assert_eq!(megabytes, [16 + 2 * 8, 16 + 2 * 64]);
    }
}
