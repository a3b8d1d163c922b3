//! The service: who may reach it, and what devices can carry layers.

use burn::tensor::{Device, Tensor};
use burn_flex::FlexDevice;
use burn_layer::{Layer, LayerError, LayeredDevice, Layers};
use burn_std::device::Device as _;

#[derive(Debug)]
struct Nothing;
impl Layer for Nothing {}

fn nothing() -> Device {
    Layers::on(Device::flex()).layer(Nothing).serve().unwrap()
}

/// The ports that this process listens on, from the kernel.
#[cfg(target_os = "linux")]
fn listening() -> Vec<(String, u16)> {
    let inodes: std::collections::HashSet<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| {
            let target = std::fs::read_link(entry.ok()?.path()).ok()?;
            let target = target.to_str()?.strip_prefix("socket:[")?;
            Some(target.trim_end_matches(']').to_string())
        })
        .collect();
    let mut ports = Vec::new();
    for file in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(file)
            .unwrap_or_default()
            .lines()
            .skip(1)
        {
            let fields: Vec<_> = line.split_whitespace().collect();
            if fields[3] == "0A" && inodes.contains(fields[9]) {
                let (address, port) = fields[1].split_once(':').unwrap();
                ports.push((address.to_string(), u16::from_str_radix(port, 16).unwrap()));
            }
        }
    }
    ports
}

#[cfg(target_os = "linux")]
#[test]
fn it_listens_on_loopback_only() {
    let _device = nothing();
    let ports = listening();
    assert!(!ports.is_empty());
    for (address, port) in ports {
        // 127.0.0.1, as the kernel writes it on a little-endian machine.
        assert_eq!(address, "0100007F", "port {port}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_client_without_the_token_is_refused() {
    use burn::remote::RemoteHost;

    let _device = nothing();
    // One of all: a device that was refused keeps a thread.
    let (_, port) = listening().pop().unwrap();
    let url = format!("ws://127.0.0.1:{port}");
    for host in [
        RemoteHost::websocket(&url),
        RemoteHost::websocket(&url).with_credential("guess"),
    ] {
        assert!(Device::remote_options(&host).init().is_err(), "{url}");
    }
}

#[test]
fn devices_live_side_by_side_on_many_threads() {
    let devices = [nothing(), nothing()];
    assert_ne!(devices[0], devices[1]);
    std::thread::scope(|scope| {
        for device in devices.iter().cycle().take(6) {
            scope.spawn(move || {
                for step in 1..20 {
                    let x = Tensor::<1>::full([4], step, device).mul_scalar(2);
                    assert_eq!(x.sum().into_scalar::<f32>(), 8.0 * step as f32);
                }
            });
        }
    });
}

#[test]
fn an_autodiff_device_gives_an_autodiff_device() {
    let device = Layers::on(Device::flex().autodiff())
        .layer(Nothing)
        .serve()
        .unwrap();
    assert!(device.is_autodiff());
    assert!(!nothing().is_autodiff());
}

#[test]
fn tensors_move_between_plain_and_layered_devices() {
    let (plain, layered) = (Device::flex(), nothing());
    let x = Tensor::<1>::from_floats([1.0, 2.0], &plain);
    let back = x
        .clone()
        .to_device(&layered)
        .mul_scalar(2)
        .to_device(&plain);
    assert_eq!(back.into_data(), x.mul_scalar(2).into_data());
}

#[test]
fn a_layered_device_carries_no_further_layer() {
    let error = Layers::on(nothing()).layer(Nothing).serve().unwrap_err();
    assert!(matches!(error, LayerError::AlreadyServed { .. }));
    assert!(error.to_string().contains("at once"), "{error}");
}

#[test]
fn a_device_is_found_by_its_id_as_long_as_it_lives() {
    let device = LayeredDevice::new(FlexDevice, []);
    let other = LayeredDevice::new(FlexDevice, []);
    assert_ne!(device, other);
    assert_ne!(device.to_id(), other.to_id());
    let id = other.to_id();
    drop(other);
    assert!(std::panic::catch_unwind(|| LayeredDevice::<FlexDevice>::from_id(id)).is_err());
    assert_eq!(LayeredDevice::<FlexDevice>::from_id(device.to_id()), device);
}

/// A layered backend is one that Burn's `Device` does not know; it carries layers as well.
#[test]
fn any_backend_can_carry_layers() {
    use burn::tensor::DType;
    use burn_flex::Flex;
    use burn_layer::{Inputs, Layered, Op, Plan, device_under};

    /// Adds in bf16.
    #[derive(Debug)]
    struct Low;
    impl Layer for Low {
        fn plan(&self, op: Op, _inputs: &Inputs) -> Option<Plan> {
            (op == Op::float_add_scalar).then(|| Plan::compute(DType::BF16))
        }
    }

    let low: Box<dyn Layer> = Box::new(Low);
    let under = LayeredDevice::new(FlexDevice, [low]);
    let device = Layers::over::<Layered<Flex>>(under).layer(Nothing).serve();
    let device = device.unwrap();
    assert_eq!(device_under(&device), None);
    // 1 + 2^-9 is 1 in bf16.
    let sum = Tensor::<1>::from_floats([1.0], &device).add_scalar(2f32.powi(-9));
    assert_eq!(sum.into_scalar::<f32>(), 1.0);
    let plain = Tensor::<1>::from_floats([1.0], &nothing()).add_scalar(2f32.powi(-9));
    assert_eq!(plain.into_scalar::<f32>(), 1.0 + 2f32.powi(-9));
}
