//! What `peak_memory` sees, in a process of its own: all that uses the device counts.
#![cfg(feature = "cpu")]

use std::{thread, time::Duration};

use benches::{Memory, peak_memory};
use burn::tensor::{Device, Tensor};
use cubecl::cpu::CpuDevice;

/// Memory that is kept counts, and memory that is in use for a while, even if only in one of several runs.
#[test]
fn it_is_what_the_work_holds_at_once() {
    let client = cubecl::Device::Cpu(CpuDevice).client();
    let device = Device::cpu();
    let ones = |megabytes: usize| {
        let ones = Tensor::<1>::ones([megabytes << 18], &device);
        device.sync().unwrap();
        ones
    };
    let before = client.in_use();
    let kept = ones(16);
    for size in [8, 64] {
        let mut sizes = [size, 4].into_iter();
        let peak = peak_memory(&client, 2, || {
            let size = sizes.next().unwrap();
            let passing = [ones(size), ones(size)];
            // Long enough to be seen.
            thread::sleep(Duration::from_millis(50));
            assert_eq!(kept.shape(), [16 << 18].into());
            drop(passing);
            device.sync().unwrap();
        });
        assert_eq!((peak.bytes - before) >> 20, 16 + 2 * size as u64);
        assert!(peak.polls >= 1.0);
    }
}
