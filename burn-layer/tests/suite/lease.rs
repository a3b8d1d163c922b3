//! Devices that go.

use super::child;
use burn::tensor::{Device, Tensor};
use burn_layer::{Layer, Layers, Lease};
use std::time::{Duration, Instant};

#[derive(Debug)]
struct Nothing;
impl Layer for Nothing {}

fn lease() -> Lease {
    Layers::on(Device::flex()).layer(Nothing).lease().unwrap()
}

/// Threads, sockets and memory of this process, from the kernel.
#[derive(Clone, Copy, Debug)]
struct Holds {
    threads: usize,
    sockets: usize,
    megabytes: usize,
}

fn holds() -> Holds {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| -> usize {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    Holds {
        threads: field("Threads:"),
        sockets: targets
            .filter(|target| target.to_string_lossy().starts_with("socket:"))
            .count(),
        megabytes: field("VmRSS:") / 1024,
    }
}

/// Makes devices, uses and drops them; the tensor outlives the lease or the lease the tensor.
fn make_and_drop(devices: usize) {
    for step in 0..devices {
        let lease = lease();
        let x = Tensor::<1>::ones([256], &lease.device()).mul_scalar(3);
        if step % 2 == 0 {
            drop(lease);
            assert_eq!(x.sum().into_scalar::<f32>(), 768.0);
        } else {
            assert_eq!(x.sum().into_scalar::<f32>(), 768.0);
        }
    }
}

/// In a process of its own, where no other test makes devices.
#[cfg(target_os = "linux")]
#[test]
fn a_thousand_devices_leave_nothing_behind() {
    if child::of(
        "suite::lease::a_thousand_devices_leave_nothing_behind",
        |_| {},
    ) {
        return;
    }
    // What a few devices at a time need, is kept: a device whose tensor outlives its lease goes only
    // while the next one is in use.
    let some: Vec<_> = (0..6).map(|_| lease()).collect();
    drop(some);
    make_and_drop(100);
    let before = holds();
    make_and_drop(1000);
    // Sockets and threads that were left are on their way out.
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut after = holds();
    while Instant::now() < deadline
        && (after.threads > before.threads || after.sockets > before.sockets)
    {
        std::thread::sleep(Duration::from_millis(100));
        after = holds();
    }
    assert!(after.threads <= before.threads, "{before:?}, {after:?}");
    assert!(after.sockets <= before.sockets, "{before:?}, {after:?}");
    assert!(
        after.megabytes <= before.megabytes + 20,
        "{before:?}, {after:?}"
    );
}

#[test]
fn leases_live_side_by_side() {
    let leases = [lease(), lease(), lease()];
    assert_ne!(leases[0].device(), leases[1].device());
    let [first, second, third] = leases;
    let x = Tensor::<1>::ones([4], &second.device());
    drop(first);
    drop(second);
    let y = Tensor::<1>::ones([4], &third.device());
    assert_eq!(
        (
            x.neg().sum().into_scalar::<f32>(),
            y.sum().into_scalar::<f32>()
        ),
        (-4.0, 4.0)
    );
}

#[test]
fn a_lease_on_an_autodiff_device_is_an_autodiff_device() {
    let lease = Layers::on(Device::flex().autodiff())
        .layer(Nothing)
        .lease()
        .unwrap();
    assert!(lease.device().is_autodiff());
}
