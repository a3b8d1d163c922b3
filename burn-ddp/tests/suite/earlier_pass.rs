//! Ranks of which one has run a backward pass that the others have not, over parameters that are not updated afterwards.

use burn::{
    module::Param,
    optim::GradientsParams,
    tensor::{Device, Tensor},
};
use burn_ddp::{Ddp, DdpConfig, DdpError, Overlap, ProcessGroup};
use burn_layer::Layers;

use crate::suite::{ddp::Branches, ranks::all_fail};

/// The pass runs in a step inside `no_sync`, which is skipped.
pub(crate) fn when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    let overlap = Overlap::new(group, DdpConfig::new())?;
    let layers = Layers::on(Device::flex()).layer(overlap.layer());
    let device = layers.serve().unwrap().autodiff();
    let param = || Param::from_tensor(Tensor::<1>::ones([3], &device));
    let model = Branches {
        used: param(),
        sometimes: param(),
        never: param(),
    };
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    let gradients = |loss: Tensor<1>| GradientsParams::from_grads(loss.backward(), &model);
    let skipped = ddp.no_sync(|_| {
        let used = model.used.val().sum();
        gradients(match group.rank() {
            1 => used + model.sometimes.val().sum(),
            _ => used,
        })
    });
    ddp.reduce_gradients(skipped, &model)?;
    let both = gradients(model.used.val().sum() + model.sometimes.val().sum());
    ddp.reduce_gradients(both, &model).map(drop)
}

#[test]
fn an_earlier_pass_of_one_rank_is_named() {
    for output in all_fail("overlapped earlier pass", 2) {
        let named = "1 gradients were averaged during backward on rank 0 and 0 on rank 1";
        assert!(output.contains(named), "{output}");
    }
}
