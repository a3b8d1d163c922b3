//! A rank that ends, after its last call or in the middle of backward.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::{
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Distribution, Tensor},
};
use burn_backend::{DeviceId, distributed::ReduceOperation};
use burn_ddp::{Ddp, DdpConfig, DdpError, Overlap, ProcessGroup, ReduceOp, with_custom_ops};
use burn_layer::{FloatView, Layer, Layers, Reduced};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::accumulate_when_overlapped;
use crate::suite::{
    net::Net,
    ranks::{all_succeed, results},
};

/// Rank 1 has ended before rank 0 takes what it has sent last.
pub(super) fn leave_after_a_reduce(group: &ProcessGroup) -> Result<(), DdpError> {
    let pids = group.all_gather(&[std::process::id()])?;
    accumulate_when_overlapped(group, Device::flex())?;
    if group.is_main() {
        let path = format!("/proc/{}/stat", pids[1]);
        // A zombie, until this test's process asks for its end.
        let has_ended = |stat: String| stat.contains(") Z ");
        while !std::fs::read_to_string(&path).map_or(true, has_ended) {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        // What its end told has arrived.
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
    let mut last = [group.rank() as f32 + 1.0];
    group.reduce(&mut last, ReduceOp::Sum, 0)?;
    assert!(!group.is_main() || last == [3.0]);
    Ok(())
}

#[test]
fn an_overlapped_rank_says_goodbye() {
    all_succeed("overlapped reduce", 2);
}

/// Sends its process a signal when backward hands over the second gradient of the third step: the norm's backward
/// has not run, and the others wait in it.
#[derive(Debug)]
struct Deadly(Signal, AtomicUsize);

/// Parameters of the network.
const PARAMETERS: usize = 6;

impl Layer for Deadly {
    fn all_reduce(
        &self,
        _tensor: FloatView<'_>,
        _op: ReduceOperation,
        _devices: &[DeviceId],
    ) -> Option<Reduced> {
        if self.1.fetch_add(1, Ordering::SeqCst) == 2 * PARAMETERS + 1 {
            kill(Pid::this(), self.0).unwrap();
        }
        None
    }
}

/// Rank 1 gets a signal in the middle of backward.
pub(super) fn signalled_in_backward(group: &ProcessGroup, signal: Signal) -> Result<(), DdpError> {
    let norms = group.duplicate()?;
    let overlap = Overlap::new(group, DdpConfig::new().first_bucket_bytes(100))?;
    let mut layers = Layers::on(Device::flex()).layer(overlap.layer());
    if group.rank() == 1 {
        layers = layers.layer(Deadly(signal, AtomicUsize::new(0)));
    }
    let device = with_custom_ops(layers).serve().unwrap().autodiff();
    let model = Net::new(&norms, &device);
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let mut model = ddp.broadcast_parameters(model)?;
    let mut optimizer = SgdConfig::new().init();
    for step in 1..10 {
        let images = Tensor::random([2, 3, 8, 8], Distribution::Default, &device);
        let loss = model.forward(images).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model)?;
        model = optimizer.step(0.01, model, gradients);
        println!("STEP {step}");
    }
    Ok(())
}

#[test]
fn a_kill_in_the_middle_of_backward_is_named() {
    for (rank, (success, output)) in results("overlapped killed", 3).into_iter().enumerate() {
        assert!(!success, "{output}");
        assert!(
            output.contains("STEP 2") && !output.contains("STEP 3"),
            "{output}"
        );
        if rank != 1 {
            assert!(output.contains("RESULT error rank 1 died"), "{output}");
        }
    }
}
