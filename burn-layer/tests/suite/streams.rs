//! Tensors that threads of a program hand to each other.

use super::devices::{Leased, devices_and_cpu};
use burn::tensor::{Device, Tensor};
use burn_layer::Layers;
use std::thread;

/// CubeCL orders the work on a tensor behind the stream that made it. One that another thread has since changed in place
/// is right where that one reads it, and so it is on a layered device, whose service reads it.
#[test]
fn a_thread_reads_what_it_has_computed_in_another_ones_tensor() {
    for under in devices_and_cpu() {
        let device = Layers::on(under.clone()).leased();
        for device in [&device as &Device, &under] {
            for _ in 0..3 {
                let make = || {
                    let made = Tensor::<2>::ones([512, 1024], device);
                    device.sync().unwrap();
                    made
                };
                let made = thread::scope(|scope| scope.spawn(make).join().unwrap());
                let mut computed = made;
                for _ in 0..20 {
                    computed = computed.sin().tanh();
                }
                let computed = computed * 0.0 + 3.0;
                let found = computed.into_data().try_to_vec::<f32>().unwrap();
                let wrong = found.iter().filter(|value| **value != 3.0).count();
                assert_eq!(wrong, 0, "{device:?}");
            }
        }
    }
}
