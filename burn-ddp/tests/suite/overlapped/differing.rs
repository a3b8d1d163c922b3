//! Ranks whose backward differs from that of the others.

use burn::{
    module::Param,
    nn::LinearConfig,
    optim::{GradientsParams, SgdConfig},
    tensor::Tensor,
};
use burn_ddp::{Ddp, DdpConfig, DdpError, ProcessGroup};

use super::layered;
use crate::suite::{
    ddp::Branches,
    ranks::{all_fail, results},
};

#[test]
fn overlapped_ranks_must_use_the_same_parameters() {
    // The buckets of the ranks differ: if that ends the job first, the log says what is missing where.
    let lacking = [r#"["never", "sometimes"]"#, r#"["never"]"#];
    for ((success, output), lacking) in results("overlapped unused", 2).iter().zip(lacking) {
        assert!(!success);
        let lacking = format!("this rank has no gradients of {lacking}");
        let diverged = output.contains("RESULT error ranks diverged") && output.contains(&lacking);
        let named = output.contains("rank 1 has a gradient of `sometimes` and rank 0 has none");
        assert!(diverged || named, "{output}");
    }
    // One rank has a bucket more, and the others none that differs from it.
    for output in all_fail("overlapped unused at the end", 2) {
        let named = "rank 1 has a gradient of `sometimes` and rank 0 has none";
        assert!(output.contains(named), "{output}");
    }
    // They are alike, and the ranks can tell each other.
    for output in all_fail("overlapped unused elsewhere", 2) {
        assert!(output.contains("a gradient of `never`"), "{output}");
    }
}

#[test]
fn overlapped_ranks_must_come_to_their_gradients_in_the_same_order() {
    for scenario in ["overlapped other order", "overlapped other order, static"] {
        for output in all_fail(scenario, 2) {
            let place = "`1.weight` is gradient 1 of backward on rank 0 and 2 on rank 1";
            assert!(output.contains(place), "{output}");
        }
    }
    for output in all_fail("overlapped new order, static", 2) {
        assert!(output.contains("a static graph was promised"), "{output}");
    }
}

/// Rank 1 uses a parameter that rank 0 does not, which may use another instead.
pub(super) fn unused_when_overlapped(
    group: &ProcessGroup,
    config: DdpConfig,
    elsewhere: bool,
) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, config)?;
    let param = || Param::from_tensor(Tensor::<1>::ones([3], &device));
    let model = Branches {
        used: param(),
        sometimes: param(),
        never: param(),
    };
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    let mut loss = model.used.val().sum();
    match group.rank() {
        1 => loss = loss + model.sometimes.val().sum(),
        _ if elsewhere => loss = loss + model.never.val().sum(),
        _ => {}
    }
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    ddp.reduce_gradients(gradients, &model).map(drop)
}

/// Rank 1 applies two layers of the same shape in the other order, from some step on.
pub(super) fn other_order_when_overlapped(
    group: &ProcessGroup,
    from: usize,
    promised: bool,
) -> Result<(), DdpError> {
    let config = DdpConfig::new().static_graph(promised);
    let (device, overlap) = layered(group, config)?;
    let linear = || LinearConfig::new(4, 4).with_bias(false).init(&device);
    let model = [linear(), linear()];
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let mut model = ddp.broadcast_parameters(model)?;
    let mut optimizer = SgdConfig::new().init();
    for step in 0..2 {
        let [first, second] = &model;
        let input = Tensor::<2>::ones([2, 4], &device);
        let output = match group.rank() == 1 && step >= from {
            true => first.forward(second.forward(input)),
            false => second.forward(first.forward(input)),
        };
        let gradients = GradientsParams::from_grads(output.sum().backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model)?;
        model = optimizer.step(0.1, model, gradients);
    }
    group.barrier()
}
